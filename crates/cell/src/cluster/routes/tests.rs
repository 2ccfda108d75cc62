//! Which trees follow from what is known.

use knowledge::machine::Node;

use super::*;

fn cell(number: u16, host: &str, node: u32) -> CellPlan {
    CellPlan {
        number,
        host: Some(host.to_owned()),
        cpus: vec![usize::from(number)],
        nodes: vec![node],
        memory_bytes: 1 << 30,
    }
}

/// The tree of the first cell: whom it sends to, and how many are below each.
fn tree(ways: Ways, plans: &[CellPlan]) -> Vec<(u16, u16)> {
    let mut route = Route::new(ways);
    let cells = plans[1..].iter().map(|plan| CellId {
        number: plan.number,
        life: 1,
    });
    let plan = |cell: CellId| plans.iter().find(|plan| plan.number == cell.number).cloned();
    route.lead(&plans[0], cells.collect(), plan);
    route
        .hops()
        .iter()
        .map(|hop| (hop.cell.number, hop.below))
        .collect()
}

#[test]
fn a_few_cells_of_one_host_are_told_one_by_one() {
    let plans = [0, 1, 2, 3].map(|number| cell(number, "a", u32::from(number)));
    assert!(tree(Ways::default(), &plans).iter().all(|(_, below)| *below == 0));
}

#[test]
fn each_of_several_hosts_with_many_cells_has_one_relay() {
    let mut plans = vec![cell(0, "a", 0), cell(1, "a", 0)];
    for (first, host) in [(2, "b"), (22, "c"), (42, "d")] {
        plans.extend((first..first + 20).map(|number| cell(number, host, 0)));
    }
    let tree = tree(Ways::default(), &plans);
    assert_eq!(tree.iter().filter(|(_, below)| *below > 0).count(), 3);
    assert_eq!(tree[0].1, 19);
    assert!(tree.contains(&(1, 0)));
    assert_eq!(tree.len(), 61);
}

/// Four boards of sixteen nodes each.
#[test]
fn boards_have_relays_by_the_distances_of_their_nodes() {
    let nodes: Vec<Node> = (0..64)
        .map(|number| Node {
            number,
            ..Node::default()
        })
        .collect();
    let distance = |from: usize, to: usize| if from / 16 == to / 16 { 16 } else { 60 };
    let distances = (0..64).map(|from| (0..64).map(|to| distance(from, to)).collect());
    let host = Host {
        nodes,
        distances: distances.collect(),
        ..Host::default()
    };
    let plans: Vec<CellPlan> = (0..64)
        .map(|number| cell(number, "a", u32::from(number)))
        .collect();
    let relays = |ways| tree(ways, &plans).iter().filter(|(_, below)| *below > 0).count();
    assert_eq!(relays(Ways::of(&host)), 3);
    assert_eq!(relays(Ways::of(&host).one_by_one()), 0);
}
