//! Pages, and what may be done with them.

use std::fmt;

/// A page of 4 KiB by its number in the region.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Page(pub u32);

impl fmt::Display for Page {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:#x}", self.0)
    }
}

/// What a processor wanted.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Access {
    /// To read.
    Read,
    /// To write, or to read and write at once.
    Write,
}

/// What this node's processors may do with a page. The later ones include the earlier.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Right {
    /// Nothing: each access is a fault.
    None,
    /// Read. A write is a fault.
    Read,
    /// Read and write.
    Write,
}

/// What a node wants of a page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Want {
    /// A copy.
    Read,
    /// All of it for itself.
    Write,
    /// As much, but not the bytes: they are to be forgotten everywhere, so that the page is fresh again. Of its manager alone.
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
    /// Whether such an access needs no more.
    pub fn allows(self, access: Access) -> bool {
        self >= access.right()
    }
}

impl Access {
    /// The least right that allows it.
    pub fn right(self) -> Right {
        match self {
            Self::Read => Right::Read,
            Self::Write => Right::Write,
        }
    }
}

/// Where the bytes of a granted page are.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Data {
    /// Here already: processors could read the page, or it was stored ([`crate::Effect::Store`]).
    Local,
    /// They came with the message that is being received.
    Received,
    /// Nobody has written it, or not since it was discarded: all zeroes. Whatever this node has in its place does not count.
    Zero,
}
