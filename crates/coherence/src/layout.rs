//! The nodes of a memory, and the manager of each page.

use thiserror::Error;

use crate::{MAX_NODES, NodeId, Page};

/// A range of pages with one manager. It ends at the next range, or at the end of the memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ManagedRange {
    /// First page of the range.
    pub first: Page,
    /// Manager and first owner of the pages. Requests for them go to this node.
    pub manager: NodeId,
}

/// Configuration of an engine. All nodes have the same one but for `me`.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Layout {
    /// The node whose engine this is.
    pub me: NodeId,
    /// Number of nodes. Their numbers begin with 0.
    pub nodes: u16,
    /// Number of pages of the region.
    pub pages: u32,
    /// Managed ranges in ascending order of their first page. The first one begins with page 0.
    pub ranges: Vec<ManagedRange>,
    /// Number of this engine's stripe: the pages whose number is `stripe` modulo `stripes`.
    pub stripe: u32,
    /// Number of stripes, and so of engines on each node.
    pub stripes: u32,
    /// Whether a migratory page is granted for writing at the read (see `migratory.rs`).
    pub migratory: bool,
}

/// Reason why a layout is invalid.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum LayoutError {
    /// The number of nodes is out of range.
    #[error("{0} nodes; take 1 to {MAX_NODES}")]
    Nodes(u16),
    /// A node's number is out of range.
    #[error("there is no node {0}; count from 0")]
    NoSuchNode(NodeId),
    /// The ranges don't begin with page 0, or their first pages don't ascend.
    #[error("the managed range at page {0} is out of order; begin with page 0 and let the first pages rise")]
    Order(Page),
    /// The list of ranges is empty.
    #[error("no page has a manager; name one for page 0")]
    NoManager,
    /// The stripe's number is out of range.
    #[error("stripe {stripe} of {stripes}; count from 0")]
    Stripe {
        /// Number of the stripe.
        stripe: u32,
        /// Number of stripes.
        stripes: u32,
    },
}

impl Layout {
    /// Returns a layout of one stripe whose pages are divided evenly among the nodes.
    pub fn even(me: NodeId, nodes: u16, pages: u32) -> Self {
        let first = |node: u16| {
            let first = u64::from(pages) * u64::from(node) / u64::from(nodes.max(1));
            Page(u32::try_from(first).expect("less than all pages"))
        };
        let range = |node| ManagedRange {
            first: first(node),
            manager: NodeId(node),
        };
        let mut ranges: Vec<ManagedRange> = (0..nodes).map(range).collect();
        // With fewer pages than nodes some nodes manage no page.
        ranges.dedup_by(|later, earlier| {
            let is_same = later.first == earlier.first;
            if is_same {
                earlier.manager = later.manager;
            }
            is_same
        });
        Self {
            me,
            nodes,
            pages,
            ranges,
            stripe: 0,
            stripes: 1,
            migratory: false,
        }
    }

    /// Checks the layout.
    ///
    /// # Errors
    /// The first [`LayoutError`] found.
    pub fn check(&self) -> Result<(), LayoutError> {
        if self.nodes == 0 || self.nodes > MAX_NODES {
            return Err(LayoutError::Nodes(self.nodes));
        }
        let managers = self.ranges.iter().map(|range| range.manager);
        if let Some(node) = managers.chain([self.me]).find(|node| node.0 >= self.nodes) {
            return Err(LayoutError::NoSuchNode(node));
        }
        let first = self.ranges.first().ok_or(LayoutError::NoManager)?;
        if first.first != Page(0) {
            return Err(LayoutError::Order(first.first));
        }
        if let Some(pair) = self.ranges.windows(2).find(|pair| pair[0].first >= pair[1].first) {
            return Err(LayoutError::Order(pair[1].first));
        }
        let (stripe, stripes) = (self.stripe, self.stripes);
        if stripe >= stripes {
            return Err(LayoutError::Stripe { stripe, stripes });
        }
        Ok(())
    }

    /// Returns the manager of a page.
    pub fn manager(&self, page: Page) -> NodeId {
        let after = self.ranges.partition_point(|range| range.first <= page);
        self.ranges[after - 1].manager
    }

    /// Returns the index of a page in this stripe, or `None` if it belongs to another one.
    pub(crate) fn place(&self, page: Page) -> Option<usize> {
        let is_here = page.0 < self.pages && page.0 % self.stripes == self.stripe;
        is_here.then(|| usize::try_from(page.0 / self.stripes).expect("32 bits fit"))
    }

    /// Returns the number of pages of this stripe.
    pub(crate) fn count(&self) -> usize {
        let count = self.pages.saturating_sub(self.stripe).div_ceil(self.stripes);
        usize::try_from(count).expect("32 bits fit")
    }

    /// Returns the page at an index of this stripe.
    pub(crate) fn page(&self, place: usize) -> Page {
        let place = u32::try_from(place).expect("less than all pages");
        Page(place * self.stripes + self.stripe)
    }
}
