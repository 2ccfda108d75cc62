//! Which nodes there are, and which of them manages which pages.

use thiserror::Error;

use crate::{MAX_NODES, NodeId, Page};

/// The pages from here to the next home, or to the end, have this manager.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ManagedRange {
    /// The first of them.
    pub first: Page,
    /// Every request for them goes to this node first. It owns them at the start.
    pub manager: NodeId,
}

/// What an engine has to know of the whole. Equal on all nodes but for `me`.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Layout {
    /// The node whose engine this is.
    pub me: NodeId,
    /// How many there are, counted from 0.
    pub nodes: u16,
    /// Pages of the region.
    pub pages: u32,
    /// By their first page, which rises and begins with 0.
    pub ranges: Vec<ManagedRange>,
    /// This engine has the pages whose number is this one modulo `stripes`.
    pub stripe: u32,
    /// How many engines share the region's pages on each node.
    pub stripes: u32,
    /// Whether a page that nodes read and then write, one after the other, is given for writing at the read.
    pub migratory: bool,
}

/// Why there can't be such a layout.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum LayoutError {
    /// Too few or too many.
    #[error("{0} nodes; take 1 to {MAX_NODES}")]
    Nodes(u16),
    /// A number past the last node's.
    #[error("there is no node {0}; count from 0")]
    NoSuchNode(NodeId),
    /// Homes don't begin with page 0, or are not in order.
    #[error("the home at page {0} is out of order; begin with page 0 and let their first pages rise")]
    Order(Page),
    /// No home at all.
    #[error("no page has a manager; name one for page 0")]
    NoManager,
    /// The stripe is not one of the stripes.
    #[error("stripe {stripe} of {stripes}; count from 0")]
    Stripe {
        /// Which.
        stripe: u32,
        /// Of how many.
        stripes: u32,
    },
}

impl Layout {
    /// All pages in one stripe, spread over the nodes in equal parts.
    pub fn even(me: NodeId, nodes: u16, pages: u32) -> Self {
        let first = |node: u16| {
            let first = u64::from(pages) * u64::from(node) / u64::from(nodes.max(1));
            Page(u32::try_from(first).expect("less than all pages"))
        };
        let home = |node| ManagedRange {
            first: first(node),
            manager: NodeId(node),
        };
        let mut ranges: Vec<ManagedRange> = (0..nodes).map(home).collect();
        // Fewer pages than nodes: some manage none.
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

    /// Whether it can be.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), LayoutError> {
        if self.nodes == 0 || self.nodes > MAX_NODES {
            return Err(LayoutError::Nodes(self.nodes));
        }
        let managers = self.ranges.iter().map(|home| home.manager);
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

    /// Who manages a page.
    pub fn manager(&self, page: Page) -> NodeId {
        let after = self.ranges.partition_point(|home| home.first <= page);
        self.ranges[after - 1].manager
    }

    /// The place of a page among those of this stripe, if it is one of them.
    pub(crate) fn place(&self, page: Page) -> Option<usize> {
        let is_here = page.0 < self.pages && page.0 % self.stripes == self.stripe;
        is_here.then(|| usize::try_from(page.0 / self.stripes).expect("32 bits fit"))
    }

    /// How many pages this stripe has.
    pub(crate) fn count(&self) -> usize {
        let count = self.pages.saturating_sub(self.stripe).div_ceil(self.stripes);
        usize::try_from(count).expect("32 bits fit")
    }

    /// The page at a place of this stripe.
    pub(crate) fn page(&self, place: usize) -> Page {
        let place = u32::try_from(place).expect("less than all pages");
        Page(place * self.stripes + self.stripe)
    }
}
