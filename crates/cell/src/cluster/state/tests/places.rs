//! Placement of VMs, as `mirrorball knowledge place` predicts it.

use hostinfo::capacity;
use knowledge::{Base, Fact};
use policy::placement::place;
use proptest::prelude::*;

use super::*;

fn asserted(facts: &str) -> Base {
    let facts = knowledge::fact::parse(facts).expect("facts");
    facts.into_iter().collect()
}

impl World {
    /// Applies these facts in all cells.
    fn assert(&mut self, facts: &Base) {
        for state in self.cells.values_mut() {
            state.assert(capacity::assertions_in(facts));
        }
    }

    /// The cell that `knowledge place` names first, by a cell's report and the facts, computed as the command
    /// does.
    fn foreseen(&mut self, at: CellId, host: &AdmitVm, facts: &Base) -> Option<u16> {
        let status = self.status(at);
        let known = capacity::merge(facts, capacity::of_status(&status, |_| true));
        let want = policy::placement::Want {
            vcpus: host.share.vcpus,
            memory_bytes: host.share.memory_bytes,
        };
        place(&capacity::of_facts(&known), want)
    }
}

#[test]
fn one_asserted_fact_changes_the_cell_of_the_next_vm() {
    for (fact, cell) in [
        ("", 0),
        ("cell_cordoned(0)", 1),
        ("cell_vcpus(0, 1)", 1),
        ("cell_cpus(1, 3)\ncell_vcpus(1, 0)\ncell_vcpus(0, 1)", 1),
        ("cell_free_bytes(0, 1000000)", 1),
        // An assertion creates no memory.
        ("cell_free_bytes(1, 9000000000)", 0),
        ("cell_free_bytes(7, 9000000000)\ncell_runs(7)", 0),
    ] {
        let mut world = World::new(2);
        let facts = asserted(fact);
        world.assert(&facts);
        let host = vm("web", 64);
        assert_eq!(world.foreseen(id(0, 1), &host, &facts), Some(cell), "{fact}");
        world.host(1, host);
        let placed: [&[&str]; 2] = if cell == 0 {
            [&["web"], &[]]
        } else {
            [&[], &["web"]]
        };
        world.vms(&placed);
    }
}

#[test]
fn refusal_of_a_cell_that_a_fact_cordons_names_the_fact() {
    let mut world = World::new(2);
    world.assert(&asserted("cell_cordoned(1)"));
    let why = "cell 1 is cordoned and takes no new VM; name another cell, or remove `cell_cordoned(1)` from \
               asserted.facts";
    world.refused(id(0, 1), CellRequest::AdmitVm(in_cell(1, "a", 64)), why);
    world.assert(&asserted("cell_cordoned(0)\ncell_free_bytes(1, 1048576)"));
    let why =
        "no cell has 64 MiB for it: cell 0 is cordoned, cell 1 has 1 MiB; give it less, or end another VM";
    world.refused(id(0, 1), CellRequest::AdmitVm(vm("a", 64)), why);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// VMs come to any cells of a cluster, some of which are cordoned, lend memory, or are asserted to have
    /// other capacity than they have. `run` places each where `knowledge place` says.
    #[test]
    fn run_places_each_vm_where_knowledge_place_says(
        count in 1..5_u16,
        vms in prop::collection::vec((0..5_u16, 1..4_u32, 1..700_u64), 1..12),
        cordons in prop::collection::vec(any::<bool>(), 5),
        loan in prop::option::of((0..5_u16, 0..5_u16, 1..600_u64)),
        facts in prop::collection::vec((0..5_i64, 0..4_usize, 0..6_i64), 0..5),
    ) {
        let facts: Base = facts
            .into_iter()
            .map(|(cell, kind, value)| match kind {
                0 => Fact::new("cell_cpus", [cell.into(), value.into()]),
                1 => Fact::new("cell_vcpus", [cell.into(), value.into()]),
                2 => Fact::new("cell_free_bytes", [cell.into(), (value * (200 << 20)).into()]),
                _ => Fact::new("cell_cordoned", [cell.into()]),
            })
            .collect();
        let mut world = World::new(count);
        for number in (0..count).filter(|number| cordons[usize::from(*number)]) {
            world.ask(id(number, 1), 1, CellRequest::Cordon { cordoned: true });
        }
        if let Some((from, to, mib)) = loan
            && from != to
            && from < count
            && to < count
        {
            world.ask(id(from, 1), 2, lend(to, mib));
        }
        world.assert(&facts);
        for (client, (at, vcpus, mib)) in (10..).zip(vms) {
            let at = id(at % count, 1);
            let mut host = vm(&format!("vm{client}"), mib);
            host.share.vcpus = vcpus;
            let foreseen = world.foreseen(at, &host, &facts);
            match world.ask(at, client, CellRequest::AdmitVm(host.clone())) {
                CellResponse::Hosted(_) => prop_assert_eq!(foreseen, Some(at.number)),
                CellResponse::Elsewhere { cell } => {
                    prop_assert_eq!(foreseen, Some(cell));
                    let sent = AdmitVm { sent: true, ..host };
                    let taken = world.ask(id(cell, 1), client, CellRequest::AdmitVm(sent));
                    prop_assert!(matches!(taken, CellResponse::Hosted(_)), "{:?}", taken);
                }
                other => {
                    prop_assert!(matches!(other, CellResponse::Refused { .. }), "{:?}", other);
                    prop_assert_eq!(foreseen, None);
                }
            }
        }
    }
}
