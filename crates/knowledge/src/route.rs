//! Multicast trees (section 5.1): how a message reaches all cells soonest.
//!
//! The source sends to one cell of each node, the farthest first, since theirs is the longest way; each of them sends to
//! the others of its node, which is near. What that gains over sending to all one by one follows from the latencies and
//! from what a sender pays for each message before it can send the next.

use std::collections::BTreeMap;

use crate::Base;
use crate::ways::Ways;

/// What is known of the ways between `count` cells.
#[derive(Clone, Debug)]
pub struct Costs {
    /// `latency_ns[from][to]`: from the send to the receipt.
    pub latency_ns: Vec<Vec<u64>>,
    /// What each message costs its sender before the next.
    pub send_ns: u64,
    /// The node, of whichever host, that each cell is in.
    pub node: Vec<u32>,
}

impl Costs {
    /// Of these cells, as `base` knows them: `cells[i]` is the cell `i` of costs and trees. What is not measured is derived
    /// as [`Ways`] says.
    pub fn of(base: &Base, cells: &[u16]) -> Self {
        let ways = Ways::of(base);
        let row = |from: &u16| cells.iter().map(|to| ways.fastest_ns(*from, *to)).collect();
        let mut nodes = BTreeMap::new();
        let node = |cell: &u16| {
            let next = nodes.len() as u32;
            *nodes.entry(ways.node(*cell)).or_insert(next)
        };
        Self {
            latency_ns: cells.iter().map(row).collect(),
            send_ns: ways.send_ns(),
            node: cells.iter().map(node).collect(),
        }
    }
}

/// Who sends to whom, in which order.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Tree {
    /// For each cell those to which it sends, the first one first.
    pub children: Vec<Vec<usize>>,
}

impl Tree {
    /// The source sends to each one by one, the farthest first.
    pub fn unicast(costs: &Costs, source: usize) -> Self {
        let count = costs.node.len();
        let mut children = vec![Vec::new(); count];
        children[source] = (0..count).filter(|to| *to != source).collect();
        farthest_first(costs, source, &mut children[source]);
        Self { children }
    }

    /// The source sends to one cell of each node, and to those of its own.
    pub fn multicast(costs: &Costs, source: usize) -> Self {
        let count = costs.node.len();
        let mut nodes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for cell in (0..count).filter(|cell| *cell != source) {
            nodes.entry(costs.node[cell]).or_default().push(cell);
        }
        let mut children = vec![Vec::new(); count];
        for (node, mut cells) in nodes {
            if node == costs.node[source] {
                children[source].extend(cells);
                continue;
            }
            // The nearest one of them is soonest at work.
            cells.sort_by_key(|cell| costs.latency_ns[source][*cell]);
            let first = cells.remove(0);
            children[source].push(first);
            farthest_first(costs, first, &mut cells);
            children[first] = cells;
        }
        let mut order = std::mem::take(&mut children[source]);
        // A whole node waits for its first cell.
        order.sort_by_key(|cell| {
            let last = children[*cell]
                .last()
                .map_or(0, |last| costs.latency_ns[*cell][*last]);
            let after = children[*cell].len() as u64 * costs.send_ns + last;
            std::cmp::Reverse(costs.latency_ns[source][*cell] + after)
        });
        children[source] = order;
        Self { children }
    }

    /// Whichever of both reaches the last cell sooner.
    pub fn best(costs: &Costs, source: usize) -> Self {
        let [unicast, multicast] = [Self::unicast(costs, source), Self::multicast(costs, source)];
        if unicast.last_ns(costs, source) <= multicast.last_ns(costs, source) {
            unicast
        } else {
            multicast
        }
    }

    /// When each cell has the message, nanoseconds after the source began.
    pub fn arrivals_ns(&self, costs: &Costs, source: usize) -> Vec<u64> {
        let mut arrivals = vec![0; self.children.len()];
        let mut next = vec![source];
        while let Some(cell) = next.pop() {
            let sends = (1..).map(|sent| sent * costs.send_ns);
            for (child, sent_ns) in self.children[cell].iter().zip(sends) {
                arrivals[*child] = arrivals[cell] + sent_ns + costs.latency_ns[cell][*child];
                next.push(*child);
            }
        }
        arrivals
    }

    /// When the last one has it.
    pub fn last_ns(&self, costs: &Costs, source: usize) -> u64 {
        self.arrivals_ns(costs, source).into_iter().max().unwrap_or(0)
    }
}

fn farthest_first(costs: &Costs, from: usize, cells: &mut [usize]) {
    cells.sort_by_key(|cell| std::cmp::Reverse(costs.latency_ns[from][*cell]));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Cells in nodes; within a node messages take `near_ns`, between nodes `far_ns` and more with their distance.
    fn costs(nodes: u32, cells_each: u32, near_ns: u64, far_ns: u64, send_ns: u64) -> Costs {
        let node: Vec<u32> = (0..nodes * cells_each).map(|cell| cell / cells_each).collect();
        let latency = |from: &u32, to: &u32| match from.abs_diff(*to) {
            0 => near_ns,
            hops => far_ns + u64::from(hops) * 20,
        };
        let row = |from| node.iter().map(|to| latency(from, to)).collect();
        Costs {
            latency_ns: node.iter().map(row).collect(),
            send_ns,
            node,
        }
    }

    proptest! {
        #[test]
        fn every_cell_is_reached_once(nodes in 1..9_u32, cells in 1..9_u32, source in 0..64_usize, far in 100..2000_u64) {
            let costs = costs(nodes, cells, 100, far, 50);
            let count = costs.node.len();
            let source = source % count;
            for tree in [Tree::unicast(&costs, source), Tree::multicast(&costs, source)] {
                let mut reached: Vec<usize> = tree.children.iter().flatten().copied().collect();
                reached.push(source);
                reached.sort_unstable();
                prop_assert_eq!(reached, (0..count).collect::<Vec<_>>());
                let arrivals = tree.arrivals_ns(&costs, source);
                prop_assert!(arrivals.iter().enumerate().all(|(cell, at)| (*at == 0) == (cell == source)));
            }
        }

        #[test]
        fn the_best_is_never_later_than_either(nodes in 1..9_u32, cells in 1..9_u32, far in 100..2000_u64, send in 1..500_u64) {
            let costs = costs(nodes, cells, 100, far, send);
            let best = Tree::best(&costs, 0).last_ns(&costs, 0);
            prop_assert!(best <= Tree::unicast(&costs, 0).last_ns(&costs, 0));
            prop_assert!(best <= Tree::multicast(&costs, 0).last_ns(&costs, 0));
        }
    }

    /// The paper's machine with 8 sockets of 4 cores (Figure 6): one after another is much slower there.
    #[test]
    fn on_eight_nodes_of_four_a_tree_is_sooner() {
        let costs = costs(8, 4, 250, 300, 120);
        let [unicast, multicast] =
            [Tree::unicast(&costs, 0), Tree::multicast(&costs, 0)].map(|tree| tree.last_ns(&costs, 0));
        assert!(
            multicast * 2 < unicast,
            "{multicast} ns by the tree, {unicast} ns one by one"
        );
        // One aggregation point for each other node, and the three neighbours.
        assert_eq!(Tree::multicast(&costs, 0).children[0].len(), 7 + 3);
    }
}
