//! Why a node's part in the memory ended, for all of its lanes: the first reason counts.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};

/// How long the hook waits for lanes that have not yet told the other nodes.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It was asked to.
    Closed,
    /// Another node is gone; nobody has its pages any more.
    Lost {
        /// Which, as people know it.
        node: String,
        /// How that showed.
        why: String,
    },
    /// Another node has told that it ended, with its number and that of the lost one.
    Reported {
        /// Who told.
        by: String,
        /// Whom it has lost.
        lost: String,
    },
    /// Another node sent what makes no sense.
    ProtocolError(String),
    /// The kernel refused what it may not refuse.
    Kernel(String),
}

impl fmt::Display for End {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(out, "the shared memory was closed"),
            Self::Lost { node, why } => write!(out, "{node} is gone ({why}), and its pages with it"),
            Self::Reported { by, lost } => write!(out, "{lost} is gone, says {by}, and its pages with it"),
            Self::ProtocolError(what) => write!(out, "{what}"),
            Self::Kernel(what) => write!(out, "this host's kernel fails: {what}"),
        }
    }
}

/// Told of the end, once, on the thread that saw it.
pub type Hook = Box<dyn Fn(&End) + Send + Sync>;

/// Shared by a node's lanes.
pub struct Shutdown {
    end: OnceLock<End>,
    /// Readable from the end on.
    event: EventFd,
    /// How many lanes have not yet told the other nodes.
    unreported: Mutex<u16>,
    all_reported: Condvar,
    hook: Hook,
}

impl Shutdown {
    /// Not yet.
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

    /// The node ends because its process wants it to, unless it has ended.
    pub fn close(&self) {
        if self.set(End::Closed) {
            (self.hook)(&End::Closed);
        }
    }

    /// A lane has seen the end. Whether it is the first; it calls [`Shutdown::call_hook`] then.
    pub fn set(&self, end: End) -> bool {
        let is_first = self.end.set(end).is_ok();
        if is_first {
            // It can't be full.
            let _ = self.event.write(1);
        }
        is_first
    }

    /// A lane has told the other nodes, and does nothing more.
    pub fn server_reported(&self) {
        let mut unreported = self.unreported.lock().unwrap_or_else(PoisonError::into_inner);
        *unreported = unreported.saturating_sub(1);
        self.all_reported.notify_all();
    }

    /// Calls the hook as soon as all lanes have told the other nodes, or after half a second. The hook may end the process, which closes
    /// the streams of all lanes: a node that was not told by then would take this one for the lost one.
    pub fn call_hook(&self) {
        let unreported = self.unreported.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .all_reported
            .wait_timeout_while(unreported, REPORT_TIMEOUT, |unreported| *unreported > 0);
        drop(waited);
        if let Some(end) = self.end.get() {
            (self.hook)(end);
        }
    }

    /// Why it ended.
    pub fn reason(&self) -> Option<&End> {
        self.end.get()
    }

    /// What to wait on.
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
