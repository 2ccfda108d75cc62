//! Cells that lend one another memory, and VMs that have it.

use protocol::multicast::Packet;
use registry::cluster::interface::VmPlacement;

use super::*;

fn reclaim(from: u16, mib: u64) -> CellRequest {
    CellRequest::Reclaim {
        from,
        bytes: mib << 20,
    }
}

impl World {
    #[track_caller]
    pub(super) fn refused(&mut self, at: CellId, ask: CellRequest, expected: &str) {
        match self.ask(at, 50, ask) {
            CellResponse::Refused { why } => assert!(why.contains(expected), "{why}"),
            other => panic!("not refused: {other:?}"),
        }
    }

    /// Checks the amount that cell 0 has lent cell 1, in the tables of all live cells.
    #[track_caller]
    fn lent_mib(&mut self, expected: u64) {
        let cells: Vec<CellId> = self.cells.keys().copied().collect();
        for at in cells {
            let cells = self.status(at).cells;
            let parts = |parts: &[LentMemory]| parts.iter().map(|part| part.bytes >> 20).sum::<u64>();
            let known = (parts(&cells[0].lent), parts(&cells[1].borrowed));
            assert_eq!(known, (expected, expected), "as {at} knows it");
        }
    }

    fn host_borrowing(&mut self) -> VmPlacement {
        assert_eq!(self.ask(id(0, 1), 1, lend(1, 512)), CellResponse::Done);
        match self.host(2, in_cell(1, "a", 1200)) {
            CellResponse::Hosted(place) => place,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_vm_that_needs_a_loan_has_it_from_the_lenders_nodes() {
    let mut world = World::new(3);
    assert!(matches!(
        world.host(1, in_cell(1, "a", 1200)),
        CellResponse::Refused { .. }
    ));
    let place = world.host_borrowing();
    assert_eq!(place.plan.nodes, [0, 1]);
    assert_eq!(place.borrowed, [part(0, 176)]);
    world.lent_mib(512);
    // Lent memory is free for no VM of the lender, and memory that a VM uses is not given back.
    world.refused(
        id(0, 1),
        CellRequest::AdmitVm(in_cell(0, "b", 600)),
        "cell 0 has 512 MiB",
    );
    world.refused(
        id(0, 1),
        reclaim(1, 400),
        "cell 1 cannot give 400 MiB back: of cell 0's memory it has 512 MiB, of which a uses 176 MiB",
    );
    world.lent_mib(512);
    assert_eq!(world.ask(id(0, 1), 3, reclaim(1, 300)), CellResponse::Done);
    world.lent_mib(212);
    world.act(id(1, 1), |state| state.handle_disconnect(2));
    world.settle();
    assert_eq!(world.ask(id(0, 1), 4, reclaim(1, 212)), CellResponse::Done);
    world.lent_mib(0);
    assert!(matches!(
        world.host(5, in_cell(0, "b", 1024)),
        CellResponse::Hosted(_)
    ));
}

#[test]
fn vm_that_fits_its_own_cell_takes_no_borrowed_memory() {
    let mut world = World::new(2);
    assert_eq!(world.ask(id(0, 1), 1, lend(1, 512)), CellResponse::Done);
    let CellResponse::Hosted(place) = world.host(2, in_cell(1, "a", 1024)) else {
        panic!("it fits");
    };
    assert_eq!((place.plan.nodes, place.borrowed), (vec![1], vec![]));
    assert_eq!(world.ask(id(0, 1), 3, reclaim(1, 512)), CellResponse::Done);
}

#[test]
fn impossible_loan_is_refused_with_what_is_possible() {
    let mut world = World::new(2);
    let other = CellPlan {
        host: Some("beta".to_owned()),
        ..plan(2)
    };
    world
        .cells
        .insert(id(2, 1), State::new(id(2, 1), 1, other, None, []));
    for at in [id(0, 1), id(1, 1)] {
        world.act(id(2, 1), |state| state.linked(at, true));
        world.act(at, |state| state.linked(id(2, 1), true));
    }
    world.settle();
    let home = id(0, 1);
    world.refused(home, lend(1, 1100), "cell 0 has only 1024 MiB that no VM uses");
    world.refused(home, lend(0, 1), "has its own memory already");
    world.refused(home, lend(7, 1), "there is no cell 7; there is 0, 1, 2");
    world.refused(home, lend(2, 1), "on different hosts");
    world.refused(home, lend(1, 0), "name an amount");
    world.refused(home, reclaim(1, 1), "cell 1 has only 0 MiB of cell 0's memory");
    world.die(id(1, 1));
    world.refused(home, lend(1, 1), "cell 1 does not run");
    let mut alone = State::new(home, 1, plan(0), None, []);
    let acts = alone.handle_request(1, lend(1, 1));
    let [Action::Answer(1, CellResponse::Refused { why })] = &acts[..] else {
        panic!("{acts:?}");
    };
    assert!(why.contains("only starting"), "{why}");
}

#[test]
fn client_that_waits_for_a_cell_that_dies_receives_an_error() {
    let mut world = World::new(2);
    world.act(id(0, 1), |state| state.handle_request(1, lend(1, 100)));
    let awaited = world.cells[&id(0, 1)].awaited(1);
    assert_eq!(awaited.keys().collect::<Vec<_>>(), [&id(1, 1)]);
    world.links.clear();
    world.die(id(1, 1));
    let Some(CellResponse::Refused { why }) = world.answers.remove(&(0, 1)) else {
        panic!("no answer");
    };
    assert!(why.contains("cell 1 died before it answered"), "{why}");
    // The loan was on record: the next incarnation has it.
    world.start(id(1, 2));
    world.lent_mib(100);
    assert_eq!(world.ask(id(0, 1), 2, reclaim(1, 100)), CellResponse::Done);
    world.lent_mib(0);
}

/// Whichever cell dies, alone or with the other: the loan and the VM's memory stay as they were.
#[test]
fn a_loan_and_its_vm_outlive_both_cells() {
    for dead in [vec![0], vec![1], vec![0, 1], vec![1, 0]] {
        let mut world = World::new(2);
        let place = world.host_borrowing();
        world.running = vec![RunningVm {
            name: "a".to_owned(),
            cell: 1,
            share: vm("a", 1200).share,
            borrowed: place.borrowed.clone(),
            cells: Vec::new(),
            borrowed_cpus: Vec::new(),
            regions: Vec::new(),
        }];
        dead.iter().for_each(|number| world.die(id(*number, 1)));
        dead.iter().for_each(|number| world.start(id(*number, 2)));
        let life = |number| 1 + u32::from(dead.contains(&number));
        let (home, holder) = (id(0, life(0)), id(1, life(1)));
        world.lent_mib(512);
        if life(1) == 2 {
            let back = AdmitVm {
                runs: true,
                borrowed: place.borrowed.clone(),
                ..vm("a", 1200)
            };
            let CellResponse::Hosted(again) = world.ask(holder, 2, CellRequest::AdmitVm(back)) else {
                panic!("it runs here");
            };
            assert_eq!(again, place);
        }
        world.refused(home, reclaim(1, 512), "of which a uses 176 MiB");
        world.refused(home, lend(1, 513), "has only 512 MiB");
        world.act(holder, |state| state.handle_disconnect(2));
        world.settle();
        assert_eq!(world.ask(home, 3, reclaim(1, 512)), CellResponse::Done);
        assert!(matches!(
            world.host(4, in_cell(0, "b", 1024)),
            CellResponse::Hosted(_)
        ));
        assert!(matches!(
            world.host(5, in_cell(1, "c", 1024)),
            CellResponse::Hosted(_)
        ));
    }
}

/// A cluster that comes up under VMs that were left has lent the memory that they use.
#[test]
fn memory_that_vms_use_of_other_cells_is_lent_by_a_new_cluster() {
    let mut world = World::new(0);
    world.running = vec![RunningVm {
        name: "a".to_owned(),
        cell: 1,
        share: vm("a", 1200).share,
        borrowed: vec![part(0, 176)],
        cells: Vec::new(),
        borrowed_cpus: Vec::new(),
        regions: Vec::new(),
    }];
    (0..2).for_each(|number| world.start(id(number, 1)));
    world.lent_mib(176);
    world.refused(id(0, 1), reclaim(1, 176), "of which a uses 176 MiB");
    world.act(id(1, 1), State::give_up_orphans);
    world.settle();
    assert_eq!(world.ask(id(0, 1), 1, reclaim(1, 176)), CellResponse::Done);
}

/// A VM with the name of one that runs takes nothing from it, and leaves nothing behind.
#[test]
fn a_name_that_is_taken_costs_no_memory() {
    let mut world = World::new(2);
    assert!(matches!(
        world.host(1, in_cell(1, "a", 512)),
        CellResponse::Hosted(_)
    ));
    for cell in [0, 1] {
        for round in 0..3 {
            let answer = world.host(2 + round, in_cell(cell, "a", 400));
            assert!(matches!(answer, CellResponse::Refused { .. }), "{answer:?}");
        }
    }
    assert!(matches!(
        world.host(9, in_cell(0, "b", 1024)),
        CellResponse::Hosted(_)
    ));
    assert!(matches!(
        world.host(9, in_cell(1, "c", 512)),
        CellResponse::Hosted(_)
    ));
}

/// The host's registry may have no record of a VM that was about to start.
#[test]
fn vm_that_others_report_in_a_cell_takes_its_memory() {
    let mut world = World::new(2);
    world.host_borrowing();
    world.die(id(1, 1));
    world.start(id(1, 2));
    world.refused(id(0, 1), reclaim(1, 512), "of which a uses 176 MiB");
    assert_eq!(world.ask(id(0, 1), 3, reclaim(1, 336)), CellResponse::Done);
    world.refused(
        id(0, 1),
        CellRequest::AdmitVm(in_cell(1, "b", 1)),
        "cell 1 has 0 MiB",
    );
}

#[test]
fn loan_is_used_when_it_has_arrived_and_not_when_it_is_announced() {
    let mut world = World::new(2);
    world.act(id(0, 1), |state| state.handle_request(1, lend(1, 512)));
    let (from, to, message) = world.links.pop_front().expect("told");
    assert!(
        matches!(
            message,
            Packet::Direct {
                body: CellPayload::Table(_),
                ..
            }
        ),
        "{message:?}"
    );
    world.act(to, |state| state.handle_message(from, message));
    world.act(id(1, 1), |state| {
        state.handle_request(2, CellRequest::AdmitVm(in_cell(1, "a", 1200)))
    });
    let Some(CellResponse::Refused { why }) = world.answers.remove(&(1, 2)) else {
        panic!("it has no loan yet");
    };
    assert!(why.contains("cell 1 has 1024 MiB"), "{why}");
    world.settle();
    assert!(matches!(
        world.host(3, in_cell(1, "a", 1200)),
        CellResponse::Hosted(_)
    ));
}
