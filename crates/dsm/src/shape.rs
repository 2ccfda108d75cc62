//! Shape of a memory, on which all nodes agree before it begins.

use serde::{Deserialize, Serialize};

use crate::region::Method;

/// Largest number of page servers of a node.
pub const LANES_MAX: u16 = 32;

/// Shape of a memory, the same on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Number of nodes.
    pub nodes: u16,
    /// Number of pages of 4 KiB. The region rounds it up.
    pub pages: u32,
    /// Number of page servers of each node, each with one stripe of the pages.
    pub lanes: u16,
    /// Whether migratory pages are granted for writing at the read.
    pub migratory: bool,
    /// How pages are mapped in the view; the best way if `None`.
    pub method: Option<Method>,
}
