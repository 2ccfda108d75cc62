//! The shape of a memory: what all nodes agree on before one begins.

use serde::{Deserialize, Serialize};

use crate::region::Method;

/// The most lanes.
pub const LANES_MAX: u16 = 32;

/// What the memory is to be. The same on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// How many nodes there are.
    pub nodes: u16,
    /// Pages of 4 KiB, rounded up by the region.
    pub pages: u32,
    /// Threads that serve faults on each node, each with a part of the pages.
    pub lanes: u16,
    /// Whether pages that are read and then written by one node after the other are given for writing at once.
    pub migratory: bool,
    /// How pages get into the view, if not the best way.
    pub method: Option<Method>,
}
