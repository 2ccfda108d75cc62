//! Why a node's part in the memory ended, for all of its lanes: the first reason counts.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use nix::sys::eventfd::{EfdFlags, EventFd};

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
    Told {
        /// Who told.
        by: String,
        /// Whom it has lost.
        lost: String,
    },
    /// Another node sent what makes no sense.
    Nonsense(String),
    /// The kernel refused what it may not refuse.
    Kernel(String),
}

impl fmt::Display for End {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(out, "the shared memory was closed"),
            Self::Lost { node, why } => write!(out, "{node} is gone ({why}), and its pages with it"),
            Self::Told { by, lost } => write!(out, "{lost} is gone, says {by}, and its pages with it"),
            Self::Nonsense(what) => write!(out, "{what}"),
            Self::Kernel(what) => write!(out, "this host's kernel fails: {what}"),
        }
    }
}

/// Told of the end, once, on the thread that saw it.
pub type Hook = Box<dyn Fn(&End) + Send + Sync>;

/// Shared by a node's lanes.
pub struct Ending {
    end: OnceLock<End>,
    /// Readable from the end on.
    event: EventFd,
    hook: Hook,
}

impl Ending {
    /// Not yet.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub fn new(hook: Hook) -> nix::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            end: OnceLock::new(),
            event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            hook,
        }))
    }

    /// It ends, unless it has.
    pub fn end(&self, end: End) {
        if self.end.set(end).is_ok() {
            // It can't be full.
            let _ = self.event.write(1);
            (self.hook)(self.end.get().expect("just set"));
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

impl fmt::Debug for Ending {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ending")
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}
