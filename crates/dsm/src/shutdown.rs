//! End of a node and its reason, shared by its page servers. The first reason counts.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use locks::IgnorePoison;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Time for which the hook waits until all page servers have reported the end to the other nodes.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Reason of the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The node was closed.
    Closed,
    /// Another node is gone, and its pages with it.
    Lost {
        /// Name of the lost node.
        node: String,
        /// How the loss showed.
        why: String,
    },
    /// Another node reported that it ended because of a lost node.
    Reported {
        /// Name of the node that reported.
        by: String,
        /// Name of the lost node.
        lost: String,
    },
    /// Another node violated the protocol.
    ProtocolError(String),
    /// The kernel failed an operation that must succeed.
    Kernel(String),
}

impl fmt::Display for End {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(out, "the shared memory was closed"),
            Self::Lost { node, why } => write!(out, "{node} is gone ({why}), and its pages with it"),
            Self::Reported { by, lost } => {
                write!(out, "{lost} is gone, as {by} reports, and its pages with it")
            }
            Self::ProtocolError(what) => write!(out, "{what}"),
            Self::Kernel(what) => write!(out, "this host's kernel fails: {what}"),
        }
    }
}

/// Called once at the end, on the thread that detected it.
pub type Hook = Box<dyn Fn(&End) + Send + Sync>;

/// State of the end.
pub struct Shutdown {
    end: OnceLock<End>,
    /// Readable from the end on.
    event: EventFd,
    /// Number of page servers that have not reported the end to the other nodes.
    unreported: Mutex<u16>,
    all_reported: Condvar,
    hook: Hook,
}

impl Shutdown {
    /// Creates the state of a node that runs.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub fn new(lanes: u16, hook: Hook) -> nix::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            end: OnceLock::new(),
            event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            unreported: Mutex::new(lanes),
            all_reported: Condvar::new(),
            hook,
        }))
    }

    /// Ends the node on request of its process, unless it has ended.
    pub fn close(&self) {
        if self.set(End::Closed) {
            (self.hook)(&End::Closed);
        }
    }

    /// Records a reason. Returns whether it is the first; the caller then calls [`Shutdown::call_hook`].
    pub fn set(&self, end: End) -> bool {
        let is_first = self.end.set(end).is_ok();
        if is_first {
            // The counter can't overflow.
            let _ = self.event.write(1);
        }
        is_first
    }

    /// Records that a page server has reported the end and stopped.
    pub fn server_reported(&self) {
        let mut unreported = self.unreported.lock().ignore_poison();
        *unreported = unreported.saturating_sub(1);
        self.all_reported.notify_all();
    }

    /// Calls the hook once all page servers have reported the end, or after half a second. The hook may end
    /// the process, which closes the streams of all page servers: a node without a report would then take
    /// this one for the lost one.
    pub fn call_hook(&self) {
        let unreported = self.unreported.lock().ignore_poison();
        let waited = self
            .all_reported
            .wait_timeout_while(unreported, REPORT_TIMEOUT, |unreported| *unreported > 0);
        drop(waited);
        if let Some(end) = self.end.get() {
            (self.hook)(end);
        }
    }

    /// Returns the reason, if the node has ended.
    pub fn reason(&self) -> Option<&End> {
        self.end.get()
    }

    /// Returns the descriptor to wait on.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl fmt::Debug for Shutdown {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Shutdown")
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}
