//! Recorded machines, with and without measurements.

use proptest::prelude::*;

use super::*;
use crate::fact::parse;
use crate::route::{Costs, Tree};

const TWO: &str = include_str!("../../machines/two-sockets.facts");
const EIGHT: &str = include_str!("../../machines/eight-nodes.facts");
const SIXTY_FOUR: &str = include_str!("../../machines/sixty-four-nodes.facts");

/// A machine with a cell on each node.
fn with_cells(machine: &str) -> Base {
    let mut base: Base = parse(machine).expect("facts").into_iter().collect();
    let host = Machine::of(&base).hosts.remove(0);
    for (number, node) in (0..).zip(&host.nodes) {
        let name = host.name.as_str();
        base.learn([
            Fact::new("cell", [number.into(), name.into()]),
            Fact::new("cell_node", [number.into(), node.number.into()]),
        ]);
        let cpus = node
            .cpus
            .iter()
            .map(|cpu| Fact::new("cell_cpu", [number.into(), cpu.number.into()]));
        base.learn(cpus);
    }
    base
}

fn learn(base: &mut Base, facts: &str) {
    base.learn(parse(facts).expect("facts"));
}

#[test]
fn unmeasured_costs_are_proportional_to_distance() {
    for (machine, count) in [(TWO, 2), (EIGHT, 8), (SIXTY_FOUR, 64)] {
        let base = with_cells(machine);
        let cells: Vec<u16> = RouteCosts::of(&base).cells().collect();
        assert_eq!(cells, (0..count).collect::<Vec<u16>>());
        let costs = Costs::of(&RouteCosts::of(&base), &cells);
        assert_eq!(costs.send_ns, SEND_NS);
        assert_eq!(costs.node, (0..u32::from(count)).collect::<Vec<u32>>());
        for fact in base.named("distance") {
            let [from, to] = [1, 2].map(|place| fact.number(place).unwrap() as usize);
            let distance = fact.number(3).unwrap() as u64;
            assert_eq!(costs.latency_ns[from][to], NEAR_NS * distance / 10);
        }
    }
}

#[test]
fn measurements_extend_to_equivalent_cpus() {
    let mut base = with_cells(TWO);
    // CPUs 0 to 3 are in cell 0, 4 to 7 in cell 1; a cell of another part of node 1 was not measured.
    learn(
        &mut base,
        "latency_ns(\"two-sockets\", 0, 4, \"ring\", 300)\n\
         latency_ns(\"two-sockets\", 4, 0, \"ring\", 310)\n\
         latency_ns(\"two-sockets\", 0, 1, \"ring\", 90)\n\
         latency_ns(\"two-sockets\", 4, 0, \"pigeon\", 9999)\n\
         send_ns(\"two-sockets\", 0, 4, \"ring\", 35)\n\
         cell(7, \"two-sockets\")\n\
         cell_cpu(7, 99)\n\
         cell_node(7, 1)",
    );
    let costs = Costs::of(&RouteCosts::of(&base), &[1, 0, 7]);
    assert_eq!(costs.latency_ns[1][0], 300);
    assert_eq!(costs.latency_ns[0][1], 310);
    assert_eq!(costs.latency_ns[1][2], 300, "as from node to node");
    assert_eq!(
        costs.latency_ns[2][0], 90,
        "within node 1 nothing was measured: as within node 0"
    );
    assert_eq!(costs.send_ns, 35);
    assert_eq!(costs.node, [0, 1, 0]);
}

#[test]
fn copy_bandwidth_is_measured_or_absent() {
    let mut base = with_cells(TWO);
    learn(
        &mut base,
        "latency_ns(\"two-sockets\", 0, 4, \"ring\", 300)\n\
         latency_ns(\"two-sockets\", 0, 1, \"ring\", 90)\n\
         latency_ns(\"two-sockets\", 2, 3, \"ring\", 91)\n\
         latency_ns(\"two-sockets\", 3, 2, \"ring\", 92)\n\
         bandwidth_mb_s(\"two-sockets\", 0, 4, \"copy\", 9000)\n\
         bandwidth_mb_s(\"two-sockets\", 0, 4, \"ring\", 77)\n\
         cell(8, \"beta\")\n\
         cell_node(8, 0)",
    );
    let costs = RouteCosts::of(&base);
    assert_eq!(
        [costs.measured_ns(0, 1), costs.measured_ns(0, 0)],
        [Some(300), Some(91)]
    );
    assert_eq!([costs.measured_ns(1, 0), costs.measured_ns(1, 1)], [None, None]);
    assert_eq!(
        [costs.copied_mb_s(0, 1), costs.copied_mb_s(1, 0)],
        [Some(9000), None]
    );
    assert_eq!([costs.distance(0, 1), costs.distance(1, 1)], [Some(21), Some(10)]);
    let others = [(0, 8), (8, 8), (0, 9)];
    assert!(
        others
            .iter()
            .all(|(from, to)| costs.distance(*from, *to).is_none())
    );
    assert!(
        others
            .iter()
            .all(|(from, to)| costs.measured_ns(*from, *to).is_none())
    );
}

#[test]
fn asserted_costs_of_cells_take_precedence() {
    let mut base = with_cells(TWO);
    learn(&mut base, "latency_ns(\"two-sockets\", 0, 4, \"ring\", 300)");
    learn(&mut base, "message_ns(0, 1, \"ring\", 77)");
    assert_eq!(RouteCosts::of(&base).fastest_ns(0, 1), 77);
    assert_eq!(RouteCosts::of(&base).fastest_ns(1, 0), 140 * 21 / 10);
    // As facts, it is there once.
    base.learn(RouteCosts::of(&base).facts());
    let facts: Vec<String> = base.named("message_ns").map(Fact::to_string).collect();
    assert_eq!(
        facts,
        [
            "message_ns(0, 1, \"ring\", 77)",
            "message_ns(1, 0, \"ring\", 294)"
        ]
    );
    let transports: Vec<String> = base.named("transport").map(Fact::to_string).collect();
    assert_eq!(
        transports,
        ["transport(0, 1, \"ring\")", "transport(1, 0, \"ring\")"]
    );
    assert_eq!(RouteCosts::of(&base).facts().len(), 4);
}

#[test]
fn cost_between_hosts_is_that_of_the_fastest_transport() {
    let mut base = with_cells(TWO);
    learn(&mut base, "cell(2, \"beta\")\ncell(3, \"gamma\")");
    let costs = RouteCosts::of(&base);
    assert_eq!(
        costs.between(0, 2),
        BTreeMap::from([(TLS.to_owned(), ELSEWHERE_NS)])
    );
    learn(
        &mut base,
        "host_latency_ns(\"two-sockets\", \"beta\", \"tls\", 41000)\nhost_latency_ns(\"beta\", \
         \"two-sockets\", \"shared\", 2000)",
    );
    // A transport that the cluster does not have carries nothing, whatever speed is asserted.
    assert_eq!(RouteCosts::of(&base).transport(0, 2), Some(TLS));
    assert_eq!(RouteCosts::of(&base).fastest_ns(0, 2), 41_000);
    learn(&mut base, "shares_memory(\"two-sockets\", \"beta\")");
    let costs = RouteCosts::of(&base);
    assert_eq!(costs.transport(2, 0), Some(SHARED));
    assert_eq!(costs.fastest_ns(0, 2), 2000);
    assert_eq!(costs.between(2, 1)[TLS], 41_000);
    assert_eq!(costs.fastest_ns(0, 3), ELSEWHERE_NS);
    let costs = Costs::of(&RouteCosts::of(&base), &[0, 1, 2, 3]);
    assert_eq!(costs.node, [0, 1, 2, 3], "each host has nodes of its own");
}

#[test]
fn shared_memory_is_chosen_unless_tls_is_known_to_be_faster() {
    let mut base = with_cells(TWO);
    let facts = "cell(2, \"beta\")\nshares_memory(\"beta\", \"two-sockets\")\n\
        host_latency_ns(\"two-sockets\", \"beta\", \"tls\", 100)";
    learn(&mut base, facts);
    let costs = RouteCosts::of(&base);
    assert_eq!(
        (costs.transport(0, 2), costs.fastest_ns(0, 2)),
        (Some(SHARED), 100)
    );
    assert_eq!(costs.transport(0, 1), Some(RING));
    // A cell that has just joined has no facts.
    assert_eq!(choose(&costs.between(0, 9), &[SHARED, TLS]), Some(SHARED));
    learn(
        &mut base,
        "host_latency_ns(\"two-sockets\", \"beta\", \"shared\", 101)",
    );
    assert_eq!(RouteCosts::of(&base).transport(0, 2), Some(TLS));
    learn(&mut base, "message_ns(0, 2, \"shared\", 7)");
    assert_eq!(RouteCosts::of(&base).transport(0, 2), Some(SHARED));
}

#[test]
fn trees_complete_no_later_than_sequential_sends_on_recorded_machines() {
    for machine in [TWO, EIGHT, SIXTY_FOUR] {
        let base = with_cells(machine);
        let cells: Vec<u16> = RouteCosts::of(&base).cells().collect();
        let costs = Costs::of(&RouteCosts::of(&base), &cells);
        for source in 0..cells.len() {
            let best = Tree::best(&costs, source).replied_ns(&costs, source);
            assert!(best <= Tree::unicast(&costs, source).replied_ns(&costs, source));
        }
    }
}

proptest! {
    /// For any measurements, each pair has a cost, and none is lower than the lowest measured or derived one.
    #[test]
    fn every_pair_of_cells_has_a_cost(
        measured in prop::collection::vec((0..20_i64, 0..20_i64, 50..5000_i64), 0..40)
    ) {
        let mut base = with_cells(TWO);
        base.learn(measured.iter().map(|(from, to, ns)| {
            let terms = ["two-sockets".into(), (*from).into(), (*to).into(), RING.into(), (*ns).into()];
            Fact::new("latency_ns", terms)
        }));
        let costs = Costs::of(&RouteCosts::of(&base), &[0, 1]);
        for latency in costs.latency_ns.iter().flatten() {
            prop_assert!((50..=5000 * 21 / 10).contains(latency), "{latency}");
        }
    }
}
