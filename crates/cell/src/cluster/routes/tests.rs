//! The trees that follow from known costs.

use knowledge::Fact;

use super::*;

/// Cells of a host, each on a node of its own.
fn cells(host: &str, numbers: std::ops::Range<i64>) -> Vec<Fact> {
    numbers
        .flat_map(|cell| {
            [
                Fact::new("cell", [cell.into(), host.into()]),
                Fact::new("host", [host.into()]),
                Fact::new("node", [host.into(), cell.into()]),
                Fact::new("cell_node", [cell.into(), cell.into()]),
            ]
        })
        .collect()
}

fn known(facts: impl IntoIterator<Item = Fact>) -> MulticastRoutes {
    MulticastRoutes::of(&facts.into_iter().collect())
}

/// The tree of cell 0 of so many: the cells that it sends to, and how many are below each.
fn tree(costs: MulticastRoutes, count: u16) -> Vec<(u16, u16)> {
    let mut route = Route::new(costs);
    route.lead(0, (1..count).map(|number| CellId { number, life: 1 }).collect());
    route
        .hops()
        .iter()
        .map(|hop| (hop.cell.number, hop.below))
        .collect()
}

#[test]
fn few_cells_of_one_host_receive_a_message_without_relays() {
    assert!(
        tree(known(cells("a", 0..4)), 4)
            .iter()
            .all(|(_, below)| *below == 0)
    );
    // The same holds for cells without known costs.
    assert_eq!(tree(MulticastRoutes::default(), 4).len(), 3);
}

#[test]
fn each_of_several_hosts_with_many_cells_has_one_relay() {
    let hosts = [("a", 0..2), ("b", 2..22), ("c", 22..42), ("d", 42..62)];
    let costs = known(hosts.into_iter().flat_map(|(host, numbers)| cells(host, numbers)));
    let tree = tree(costs, 62);
    assert_eq!(tree.iter().filter(|(_, below)| *below > 0).count(), 3);
    assert_eq!(tree[0].1, 19);
    assert!(tree.contains(&(1, 0)));
    assert_eq!(tree.len(), 61);
}

/// Four boards of sixteen nodes each.
fn boards() -> Vec<Fact> {
    let distance = |from: i64, to: i64| if from / 16 == to / 16 { 16 } else { 60 };
    let distances = (0..64).flat_map(|from| {
        (0..64).map(move |to| {
            let terms = ["a".into(), from.into(), to.into(), distance(from, to).into()];
            Fact::new("distance", terms)
        })
    });
    cells("a", 0..64).into_iter().chain(distances).collect()
}

#[test]
fn boards_have_relays_by_the_distances_of_their_nodes() {
    let costs = known(boards());
    let relays = |costs| tree(costs, 64).iter().filter(|(_, below)| *below > 0).count();
    assert_eq!(relays(costs.clone()), 3);
    assert_eq!(relays(costs.one_by_one()), 0);
}

/// Cells send along the tree that `knowledge route` shows, and one asserted fact changes both.
#[test]
fn one_asserted_fact_makes_another_cell_the_relay() {
    let relays = |costs: MulticastRoutes| {
        let relays: Vec<u16> = tree(costs.clone(), 64)
            .into_iter()
            .filter(|(_, below)| *below > 0)
            .map(|(cell, _)| cell)
            .collect();
        // The command calls the same function.
        let (shown, _) = costs.tree(&(0..64).collect::<Vec<_>>());
        let shown = shown.children[0]
            .iter()
            .filter(|cell| !shown.children[**cell].is_empty());
        let shown: Vec<u16> = shown.map(|cell| *cell as u16).collect();
        assert_eq!(relays, shown);
        relays
    };
    let before = relays(known(boards()));
    assert_eq!(before.len(), 3);
    let slow = i64::from(before[0]);
    let fact = Fact::new(
        "message_ns",
        [0.into(), slow.into(), "ring".into(), 90_000.into()],
    );
    let after = relays(known(boards().into_iter().chain([fact])));
    assert!(!after.contains(&before[0]), "{before:?} {after:?}");
    assert_eq!(after.len(), 3);
}
