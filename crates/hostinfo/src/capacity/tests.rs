use config::cluster::CellPlan;
use knowledge::fact::parse;
use policy::placement::place;
use proptest::prelude::*;
use registry::cluster::interface::{CellStatus, LentMemory};

use super::*;

fn base(text: &str) -> Base {
    parse(text).expect("facts").into_iter().collect()
}

fn status(number: u16, life: Option<u32>) -> CellStatus {
    CellStatus {
        plan: CellPlan {
            number,
            host: None,
            cpus: vec![0, 1],
            nodes: vec![0],
            memory_bytes: 1 << 30,
        },
        pid: 1,
        life,
        failed: false,
        cordoned: number == 2,
        given_bytes: 1 << 29,
        lent: Vec::new(),
        borrowed: Vec::new(),
        vcpus: 3,
        vms: Vec::new(),
        regions: Vec::new(),
        lent_on_request: Vec::new(),
        lent_cpus: Vec::new(),
    }
}

#[test]
fn stopped_cell_has_no_capacity_and_its_loans_do_not_count() {
    let part = |cell| LentMemory { cell, bytes: 1 << 20 };
    let mut cells = vec![status(0, Some(1)), status(1, None), status(2, Some(1))];
    cells[0].borrowed = vec![part(1), part(2)];
    cells[2].lent = vec![part(0)];
    let capacities = of_status(&Status { cells, ready: true }, |number| number == 0);
    let facts: Vec<String> = facts(&capacities).iter().map(Fact::to_string).collect();
    let expected = [
        "cell_runs(0)",
        "cell_cpus(0, 2)",
        "cell_vcpus(0, 3)",
        "cell_free_bytes(0, 537919488)",
        "cell_runs(2)",
        "cell_cpus(2, 2)",
        "cell_vcpus(2, 3)",
        "cell_free_bytes(2, 535822336)",
        "cell_cordoned(2)",
    ];
    assert_eq!(facts, expected);
    assert_eq!(
        capacities.iter().map(|room| room.is_here).collect::<Vec<_>>(),
        [true, false]
    );
}

#[test]
fn recorded_cells_have_the_capacity_of_their_facts() {
    let facts = "host(\"a\")\ncell(0, \"a\")\ncell_cpu(0, 4)\ncell_cpu(0, 5)\ncell(1, \"b\")\n\
        cell_runs(0)\ncell_runs(1)\n\
        cell_runs(2)\ncell_free_bytes(0, 100)\ncell_free_bytes(1, 900)\ncell_cpus(1, 8)\ncell_vcpus(1, 4)\n\
        cell_runs(-1)";
    let capacities = of_facts(&base(facts));
    let said: Vec<_> = capacities
        .iter()
        .map(|room| (room.cell, room.cpus, room.vcpus, room.free_bytes, room.is_here))
        .collect();
    let expected = [(0, 2, 0, 100, true), (1, 8, 4, 900, false), (2, 0, 0, 0, true)];
    assert_eq!(said, expected);
}

#[test]
fn queries_return_the_decision_and_its_reasons_as_facts() {
    let facts = "cell_runs(0)\ncell_cpus(0, 2)\ncell_vcpus(0, 1)\ncell_free_bytes(0, 100)\n\
        cell_runs(1)\ncell_cpus(1, 2)\ncell_free_bytes(1, 100)\ncell_runs(2)\ncell_cpus(2, 2)\n\
        cell_free_bytes(2, 900)\n\
        cell_cordoned(2)\n";
    let said = |more: &str| -> Vec<String> {
        let known = base(&format!("{facts}{more}"));
        conclusions(&known).iter().map(Fact::to_string).collect()
    };
    assert!(said("").is_empty(), "nobody wants anything");
    let expected = [
        "has_room(1, 500)",
        "place(1)",
        "has_room(0, 1000)",
        "no_room(2, \"is cordoned\")",
    ];
    assert_eq!(said("wants(1, 100)"), expected);
    assert_eq!(said("wants(1, 101)")[0], "no_room(0, \"has 0 MiB\")");
}

#[test]
fn assertion_gives_a_stopped_cell_no_capacity() {
    let asserted = base("cell_runs(7)\ncell_cpus(7, 64)\ncell_free_bytes(7, 9000000000)\ncell_cordoned(0)");
    let cells = vec![status(0, Some(1)), status(1, Some(1))];
    let merged = merge(&asserted, of_status(&Status { cells, ready: true }, |_| true));
    let capacities = of_facts(&merged);
    assert_eq!(
        capacities
            .iter()
            .map(|room| (room.cell, room.is_cordoned))
            .collect::<Vec<_>>(),
        [(0, true), (1, false)]
    );
}

#[test]
fn file_change_is_reported_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("asserted.facts");
    let mut watch = AssertionWatch {
        file: Some(file.clone()),
        seen: None,
    };
    assert!(!watch.has_changed());
    for text in ["# one", "# other"] {
        std::fs::write(&file, text).expect("written");
        assert!(watch.has_changed());
        assert!(!watch.has_changed());
    }
    std::fs::remove_file(&file).expect("removed");
    assert!(watch.has_changed() && !watch.has_changed());
}

fn any_rooms() -> impl Strategy<Value = Vec<CellCapacity>> {
    let any = (0..5_u32, 0..9_u32, 0..4_u64, any::<bool>(), any::<bool>());
    prop::collection::vec(any, 0..6).prop_map(|all| {
        let capacities = all.into_iter().zip(0..);
        let room = |((cpus, vcpus, free, is_cordoned, is_here), cell)| CellCapacity {
            cell,
            cpus,
            vcpus,
            free_bytes: free << 20,
            is_cordoned,
            is_here,
        };
        capacities.map(room).collect()
    })
}

/// Facts of the hosts of cells.
fn hosts(capacities: &[CellCapacity]) -> Vec<Fact> {
    let of = |room: &CellCapacity| {
        let host = if room.is_here { "here" } else { "forward" };
        Fact::new("cell", [i64::from(room.cell).into(), host.into()])
    };
    let here = Fact::new("host", ["here".into()]);
    capacities.iter().map(of).chain([here]).collect()
}

proptest! {
    /// Assertions on a live cluster select the same cell through the facts as by the capacities with the
    /// assertions applied.
    #[test]
    fn placement_by_facts_equals_placement_by_capacities(
        mut capacities in any_rooms(),
        asserted in any_rooms(),
        vcpus in 0..4_u32,
        mib in 0..4_u64,
    ) {
        let want = Want { vcpus, memory_bytes: mib << 20 };
        let mut known: Base = hosts(&capacities).into_iter().collect();
        known.learn(facts(&asserted));
        known.learn([Fact::new("wants", [i64::from(vcpus).into(), (mib as i64 * (1 << 20)).into()])]);
        let merged = merge(&known, capacities.clone());
        assertions_in(&known).apply(&mut capacities);
        prop_assert_eq!(of_facts(&merged), capacities.clone());
        let chosen = place(&capacities, want);
        let facts = conclusions(&merged);
        let mut placed = facts.iter().filter(|fact| fact.name == "place").map(|fact| fact.number(0));
        prop_assert_eq!(placed.next().flatten(), chosen.map(i64::from));
        prop_assert_eq!(placed.next(), None);
        // Each cell has one verdict.
        prop_assert_eq!(facts.iter().filter(|fact| fact.name != "place").count(), capacities.len());
    }
}
