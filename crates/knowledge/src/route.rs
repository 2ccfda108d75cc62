//! Multicast trees (Multikernel, SOSP '09, section 5.1) that minimise the time until all cells have a
//! message.
//!
//! The source sends to one cell of each node, the farthest first, and each of these cells sends to the others
//! of its node. The groups may also be sockets, boards or hosts. The gain over sequential sends follows from
//! the latencies, the sender's cost per message, and the time until a relay starts to forward.
//!
//! [`Revocation`] is the resulting time for a change that all cells must acknowledge.

use std::collections::{BTreeMap, BTreeSet};

use crate::route_costs::RouteCosts;

/// Most groupings that are tried; measured latencies are all different.
const REACHES_MAX: usize = 16;

/// Message costs between the cells of a tree.
#[derive(Clone, Debug)]
pub struct Costs {
    /// `latency_ns[from][to]`: time from send to receipt, nanoseconds.
    pub latency_ns: Vec<Vec<u64>>,
    /// Sender's cost of a message, nanoseconds: time until it can send the next.
    pub send_ns: u64,
    /// Time from the receipt of a message until the receiver can send, nanoseconds; includes its wake-up.
    pub relay_ns: u64,
    /// Cost of a message for a running receiver, nanoseconds.
    pub take_ns: u64,
    /// NUMA node of each cell, numbered over all hosts.
    pub node: Vec<u32>,
}

impl Costs {
    /// Returns the costs between these cells by the measured route costs: `cells[i]` is the cell `i` of costs
    /// and trees. Relays forward at once.
    pub fn of(costs: &RouteCosts, cells: &[u16]) -> Self {
        let row = |from: &u16| cells.iter().map(|to| costs.fastest_ns(*from, *to)).collect();
        let mut nodes = BTreeMap::new();
        let node = |cell: &u16| {
            let next = nodes.len() as u32;
            *nodes.entry(costs.node(*cell)).or_insert(next)
        };
        Self {
            latency_ns: cells.iter().map(row).collect(),
            send_ns: costs.send_ns(),
            relay_ns: 0,
            take_ns: 0,
            node: cells.iter().map(node).collect(),
        }
    }
}

/// A multicast tree, with the order of sends.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Tree {
    /// Children of each cell, in the order of sends.
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

    /// Returns the tree in which the source sends to one cell of each node, and to those of its own node.
    pub fn multicast(costs: &Costs, source: usize) -> Self {
        Self::by_group(costs, source, &costs.node)
    }

    /// Returns the tree in which the source sends to one cell of each group, and to those of its own group.
    fn by_group<G: Copy + Ord>(costs: &Costs, source: usize, group: &[G]) -> Self {
        let count = costs.node.len();
        let mut groups: BTreeMap<G, Vec<usize>> = BTreeMap::new();
        for cell in (0..count).filter(|cell| *cell != source) {
            groups.entry(group[cell]).or_default().push(cell);
        }
        let mut children = vec![Vec::new(); count];
        for (own, mut cells) in groups {
            if own == group[source] {
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
        // A whole group waits for its first cell.
        order.sort_by_key(|cell| {
            let below = &children[*cell];
            let after = below.last().map_or(0, |last| {
                let sends = below.len() as u64 * costs.send_ns;
                costs.relay_ns + sends + costs.latency_ns[*cell][*last]
            });
            std::cmp::Reverse(costs.latency_ns[source][*cell] + after)
        });
        children[source] = order;
        Self { children }
    }

    /// The tree by which the source soonest has the replies of all: one by one, by nodes, or by groups of
    /// cells that are near one another.
    pub fn best(costs: &Costs, source: usize) -> Self {
        let by_nearness = reaches(costs)
            .into_iter()
            .map(|reach_ns| Self::by_group(costs, source, &near(costs, reach_ns)));
        let trees = [Self::multicast(costs, source)].into_iter().chain(by_nearness);
        let mut best = Self::unicast(costs, source);
        let mut best_ns = best.replied_ns(costs, source);
        for tree in trees {
            let replied_ns = tree.replied_ns(costs, source);
            if replied_ns < best_ns {
                (best, best_ns) = (tree, replied_ns);
            }
        }
        best
    }

    /// When each cell has the message, nanoseconds after the source began.
    pub fn arrivals_ns(&self, costs: &Costs, source: usize) -> Vec<u64> {
        let mut arrivals = vec![0; self.children.len()];
        let mut next = vec![source];
        while let Some(cell) = next.pop() {
            let begins = arrivals[cell] + if cell == source { 0 } else { costs.relay_ns };
            let sends = (1..).map(|sent| begins + sent * costs.send_ns);
            for (child, sent_ns) in self.children[cell].iter().zip(sends) {
                arrivals[*child] = sent_ns + costs.latency_ns[cell][*child];
                next.push(*child);
            }
        }
        arrivals
    }

    /// Returns the time at which the last cell has the message.
    pub fn last_ns(&self, costs: &Costs, source: usize) -> u64 {
        self.arrivals_ns(costs, source).into_iter().max().unwrap_or(0)
    }
}

/// Time of a change that all cells must acknowledge (Multikernel, SOSP '09, Figure 6): from the first send
/// until the source has taken every receipt, nanoseconds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Revocation {
    /// All poll one line that the source writes, and fetch it from its cache one after another.
    pub broadcast_ns: u64,
    /// The source sends to each one by one.
    pub unicast_ns: u64,
    /// Along the best tree; each cell sends its receipt to the source.
    pub multicast_ns: u64,
    /// Along the best tree; a relay gathers the receipts of those below it, as in the paper and as cells do
    /// it.
    pub gathered_ns: u64,
}

impl Revocation {
    /// Computes the times of a change that the cell `source` starts.
    pub fn of(costs: &Costs, source: usize) -> Self {
        let receipts = |sends: usize, arrivals: &[u64]| {
            let others = (0..arrivals.len()).filter(|cell| *cell != source);
            let come = others
                .map(|cell| arrivals[cell] + costs.relay_ns + costs.send_ns + costs.latency_ns[cell][source]);
            one_after_another(sends as u64 * costs.send_ns, come.collect(), costs.take_ns)
        };
        let by = |tree: &Tree| receipts(tree.children[source].len(), &tree.arrivals_ns(costs, source));
        let best = Tree::best(costs, source);
        Self {
            broadcast_ns: receipts(1, &broadcast_ns(costs, source)),
            unicast_ns: by(&Tree::unicast(costs, source)),
            multicast_ns: by(&best),
            gathered_ns: best.replied_ns(costs, source),
        }
    }
}

impl Tree {
    /// Returns the time at which the source has the replies of all cells, if each relay gathers those of the
    /// cells below it. A relay blocks again before the first of them arrives.
    pub fn replied_ns(&self, costs: &Costs, source: usize) -> u64 {
        let take_ns = costs.take_ns;
        let wake_ns = costs.relay_ns.saturating_sub(take_ns);
        let arrivals = self.arrivals_ns(costs, source);
        // Trees have two levels.
        let receipt = |cell: usize| arrivals[cell] + costs.relay_ns + costs.send_ns;
        let come = self.children[source].iter().map(|first| {
            let below = self.children[*first].iter();
            let below = below.map(|cell| receipt(*cell) + costs.latency_ns[*cell][*first] + wake_ns);
            let below: Vec<u64> = below.collect();
            let ready = if below.is_empty() {
                receipt(*first)
            } else {
                let sent = arrivals[*first] + costs.relay_ns + below.len() as u64 * costs.send_ns;
                one_after_another(sent, below, take_ns) + costs.send_ns
            };
            ready + costs.latency_ns[*first][source]
        });
        let sent = self.children[source].len() as u64 * costs.send_ns;
        one_after_another(sent, come.collect(), take_ns)
    }
}

/// When each cell has fetched a line that the source wrote: a message is two transfers of a line, and its
/// cache serves one at a time.
fn broadcast_ns(costs: &Costs, source: usize) -> Vec<u64> {
    let mut fetched = vec![0; costs.node.len()];
    let mut now = costs.send_ns;
    for cell in (0..fetched.len()).filter(|cell| *cell != source) {
        now += costs.latency_ns[source][cell] / 2;
        fetched[cell] = now + costs.latency_ns[source][cell] / 2;
    }
    fetched
}

/// Returns the time at which a receiver that is busy at first has taken the messages that arrive at these
/// times, each of which costs it `take_ns`.
fn one_after_another(busy_ns: u64, mut come: Vec<u64>, take_ns: u64) -> u64 {
    come.sort_unstable();
    come.into_iter().fold(busy_ns, |free, at| free.max(at) + take_ns)
}

/// Latencies within which cells may be taken for near: all that there are, or some.
fn reaches(costs: &Costs) -> Vec<u64> {
    let all: BTreeSet<u64> = costs.latency_ns.iter().flatten().copied().collect();
    let step = all.len().div_ceil(REACHES_MAX).max(1);
    all.into_iter().step_by(step).collect()
}

/// The lowest cell of each cell's group: cells of a group are near one another, directly or by others.
fn near(costs: &Costs, reach_ns: u64) -> Vec<usize> {
    let count = costs.node.len();
    let mut group: Vec<usize> = (0..count).collect();
    for from in 0..count {
        for to in 0..from {
            let (joins, into) = (group[from].max(group[to]), group[from].min(group[to]));
            if joins != into && costs.latency_ns[from][to] <= reach_ns {
                for of in &mut group {
                    if *of == joins {
                        *of = into;
                    }
                }
            }
        }
    }
    group
}

fn farthest_first(costs: &Costs, from: usize, cells: &mut [usize]) {
    cells.sort_by_key(|cell| std::cmp::Reverse(costs.latency_ns[from][*cell]));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Cells in nodes; within a node messages take `near_ns`, between nodes `far_ns` and more with their
    /// distance.
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
            relay_ns: 0,
            take_ns: 0,
            node,
        }
    }

    proptest! {
        #[test]
        fn tree_reaches_every_cell_once(
            nodes in 1..9_u32,
            cells in 1..9_u32,
            source in 0..64_usize,
            far in 100..2000_u64
        ) {
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
        fn best_tree_completes_no_later_than_either_alternative(
            nodes in 1..9_u32,
            cells in 1..9_u32,
            far in 100..2000_u64,
            send in 1..500_u64
        ) {
            let costs = costs(nodes, cells, 100, far, send);
            let best = Tree::best(&costs, 0).replied_ns(&costs, 0);
            prop_assert!(best <= Tree::unicast(&costs, 0).replied_ns(&costs, 0));
            prop_assert!(best <= Tree::multicast(&costs, 0).replied_ns(&costs, 0));
        }
    }

    /// The paper's machine with 8 sockets of 4 cores (Figure 6): one after another is much slower there.
    #[test]
    fn tree_is_faster_on_eight_nodes_of_four() {
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

    /// Four boards of four nodes with a cell each; a message between boards takes six times as long.
    #[test]
    fn cells_of_one_board_share_a_relay_where_that_is_faster() {
        let latency = |from: usize, to: usize| if from / 4 == to / 4 { 100 } else { 600 };
        let mut costs = Costs {
            latency_ns: (0..16)
                .map(|from| (0..16).map(|to| latency(from, to)).collect())
                .collect(),
            send_ns: 1000,
            relay_ns: 500,
            take_ns: 0,
            node: (0..16).collect(),
        };
        let tree = Tree::best(&costs, 0);
        assert_eq!(tree.children[0].len(), 3 + 3);
        assert!(tree.last_ns(&costs, 0) < Tree::unicast(&costs, 0).last_ns(&costs, 0));
        // It would have to be woken.
        costs.relay_ns = 12_000;
        assert_eq!(Tree::best(&costs, 0), Tree::unicast(&costs, 0));
    }

    /// As in Figure 6 a tree grows slowest.
    #[test]
    fn revocation_on_eight_nodes_of_four_is_fastest_by_tree() {
        let costs = Costs {
            take_ns: 120,
            ..costs(8, 4, 250, 300, 120)
        };
        let Revocation {
            broadcast_ns,
            unicast_ns,
            multicast_ns,
            gathered_ns,
        } = Revocation::of(&costs, 0);
        assert!(
            gathered_ns < multicast_ns && multicast_ns < unicast_ns.min(broadcast_ns),
            "{broadcast_ns}, {unicast_ns}, {multicast_ns}, {gathered_ns}"
        );
    }

    #[test]
    fn revocation_between_two_cells_is_one_round_trip() {
        let costs = Costs {
            take_ns: 30,
            ..costs(2, 1, 100, 280, 20)
        };
        let two = Revocation::of(&costs, 0);
        assert_eq!(two.unicast_ns, 20 + 300 + 20 + 300 + 30);
        assert_eq!(
            (two.multicast_ns, two.gathered_ns),
            (two.unicast_ns, two.unicast_ns)
        );
    }
}
