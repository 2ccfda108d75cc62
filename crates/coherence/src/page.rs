//! Page numbers, and rights to pages.

use std::fmt;

/// Number of a page of 4 KiB in the region.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Page(pub u32);

impl fmt::Display for Page {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:#x}", self.0)
    }
}

/// Kind of access that faulted.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Access {
    /// A read, for which a shared copy is enough.
    Read,
    /// A write, or an atomic read and write.
    Write,
}

/// Right of a node's processors to a page. A later one includes the earlier ones.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Right {
    /// Every access faults.
    None,
    /// A write faults.
    Read,
    /// No access faults.
    Write,
}

/// Request of a node for a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Want {
    /// A copy, which other nodes may have too.
    Read,
    /// The only copy.
    Write,
    /// The ownership without bytes: the page is to be zero again on all nodes. Only its manager requests
    /// this.
    Discard,
}

impl From<Access> for Want {
    fn from(access: Access) -> Self {
        match access {
            Access::Read => Self::Read,
            Access::Write => Self::Write,
        }
    }
}

impl Right {
    /// Returns whether the right permits the access.
    pub fn allows(self, access: Access) -> bool {
        self >= access.right()
    }
}

impl Access {
    /// Returns the least right that permits the access.
    pub fn right(self) -> Right {
        match self {
            Self::Read => Right::Read,
            Self::Write => Right::Write,
        }
    }
}

/// Source of the bytes of a granted page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Data {
    /// The bytes are in place: processors could read the page, or [`crate::Effect::Store`] stored it.
    Local,
    /// The bytes came with the message that is being received.
    Received,
    /// The page is zero: no node has written it since the start or since it was discarded. The bytes in its
    /// place are invalid.
    Zero,
}
