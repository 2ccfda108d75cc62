//! Moves of a shared region's memory between cells.

use registry::cluster::interface::RegionMoved;

use super::regions::{LIMITS, member, runs, spec};
use super::*;

const CLIENT: Client = 60;

impl World {
    /// Orders a move of the region; returns the actions of its home and the answer, if there is one.
    fn order_move(&mut self, to: u16) -> (Vec<Action>, Option<CellResponse>) {
        let region = "table".to_owned();
        self.act(id(0, 1), |state| {
            state.handle_request(CLIENT, CellRequest::MoveRegion { region, to })
        });
        self.so_far()
    }

    fn so_far(&mut self) -> (Vec<Action>, Option<CellResponse>) {
        self.settle();
        let answer = self.answers.remove(&(0, CLIENT));
        (std::mem::take(&mut self.region_acts), answer)
    }

    #[track_caller]
    fn move_refused(&mut self, to: u16) -> String {
        match self.order_move(to) {
            (acts, Some(CellResponse::Refused { why })) if acts.is_empty() => why,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// Reports which members have not recorded the cells.
    fn recorded(&mut self, number: u64, failed: &[&str]) -> (Vec<Action>, Option<CellResponse>) {
        let failed = failed.iter().map(|vm| ((*vm).to_owned(), "it hangs".to_owned()));
        let failed = failed.collect();
        self.act(id(0, 1), |state| state.lenders_recorded("table", number, failed));
        self.so_far()
    }

    fn moved(&mut self, number: u64, moved: PagesMoved) -> (Vec<Action>, Option<CellResponse>) {
        self.act(id(0, 1), |state| state.region_pages_moved("table", number, moved));
        self.so_far()
    }

    /// The region's lenders in the home's entry, as another cell has it.
    fn lenders(&mut self) -> Vec<LentMemory> {
        self.status(id(1, 1)).cells[0].regions[0].borrowed.clone()
    }

    /// Two cells, of which the second has lent 100 MiB, and a region of 64 MiB with the members `w` and `r`.
    fn with_region() -> Self {
        let mut world = Self::sharing(64);
        assert_eq!(world.ask(id(1, 1), 8, lend(0, 100)), CellResponse::Done);
        world.host_member(1, member(0, "w"));
        world.host_member(2, member(1, "r"));
        world.take(id(0, 1), "w");
        world.take(id(0, 1), "r");
        world
    }
}

fn record(number: u64, borrowed: &[LentMemory]) -> Action {
    Action::RecordLenders {
        name: "table".to_owned(),
        number,
        borrowed: borrowed.to_vec(),
    }
}

fn pages(number: u64, nodes: &[u32], former: &[u32]) -> Action {
    Action::MoveRegionPages {
        name: "table".to_owned(),
        number,
        bytes: 64 << 20,
        nodes: nodes.to_vec(),
        former: former.to_vec(),
    }
}

fn all(mib: u64) -> PagesMoved {
    PagesMoved::All {
        moved_bytes: mib << 20,
    }
}

fn done(mib: u64, not_recorded: &[&str]) -> CellResponse {
    let not_recorded = not_recorded
        .iter()
        .map(|vm| ((*vm).to_owned(), "it hangs".to_owned()));
    CellResponse::RegionMoved(RegionMoved {
        moved_bytes: mib << 20,
        not_recorded: not_recorded.collect(),
    })
}

#[test]
fn region_has_the_memory_of_both_cells_from_before_the_first_page_moves_until_after_the_last() {
    let mut world = World::with_region();
    let both = [part(0, 64), part(1, 64)];
    // All cells have the entry with the new cell before any member records it, and these before pages move.
    let region = "table".to_owned();
    world.act(id(0, 1), |state| {
        state.handle_request(CLIENT, CellRequest::MoveRegion { region, to: 1 })
    });
    assert_eq!(
        world.region_acts,
        [],
        "the other cell has not confirmed the entry"
    );
    assert_eq!(world.so_far(), (vec![record(1, &both)], None));
    assert_eq!(world.lenders(), [part(1, 64)]);
    // The home counts both: of 1024 MiB, w and the region have 128.
    let state = &world.cells[&id(0, 1)];
    assert_eq!(state.ledger.own_free() >> 20, 896);
    assert_eq!(world.recorded(1, &[]), (vec![pages(1, &[1], &[0])], None));
    // A member that joins meanwhile depends on both.
    world.host_member(3, member(1, "w2"));
    let (acts, _) = world.take(id(0, 1), "w2");
    assert!(
        matches!(&acts[..], [Action::SendRegion { borrowed, .. }] if *borrowed == both),
        "{acts:?}"
    );
    assert!(world.move_refused(0).contains("is moving"));
    assert_eq!(world.moved(1, all(7)), (vec![record(1, &[part(1, 64)])], None));
    assert_eq!(world.recorded(1, &["r"]), (vec![], Some(done(7, &["r"]))));
    assert_eq!(world.lenders(), [part(1, 64)]);
    assert_eq!(world.cells[&id(0, 1)].ledger.own_free() >> 20, 960);

    // Back: the loan is free again, and the lender can reclaim it.
    let reclaim = |mib: u64| CellRequest::Reclaim {
        from: 0,
        bytes: mib << 20,
    };
    match world.ask(id(1, 1), 8, reclaim(100)) {
        CellResponse::Refused { why } => {
            assert!(why.contains("`mirrorball move --region table --cell 0`"), "{why}");
        }
        other => panic!("the loan is in use: {other:?}"),
    }
    assert_eq!(world.order_move(0), (vec![record(2, &both)], None));
    assert_eq!(world.recorded(2, &[]), (vec![pages(2, &[0], &[1])], None));
    assert_eq!(world.moved(2, all(64)), (vec![record(2, &[])], None));
    assert_eq!(world.recorded(2, &[]), (vec![], Some(done(64, &[]))));
    assert_eq!(world.lenders(), []);
    assert_eq!(world.ask(id(1, 1), 8, reclaim(100)), CellResponse::Done);
}

#[test]
fn region_whose_pages_or_members_do_not_follow_keeps_its_memory() {
    let mut world = World::with_region();
    let both = [part(0, 64), part(1, 64)];
    let why = |answer: Option<CellResponse>| match answer {
        Some(CellResponse::Refused { why }) => why,
        other => panic!("{other:?}"),
    };
    // A member hangs.
    world.order_move(1);
    assert_eq!(world.recorded(1, &["r"]), (vec![record(1, &[])], None));
    let (acts, answer) = world.recorded(1, &[]);
    assert!(acts.is_empty());
    let refused = why(answer);
    assert!(
        refused.contains("VM r does not record") && refused.contains("it hangs"),
        "{refused}"
    );
    assert_eq!(world.lenders(), []);
    assert_eq!(world.cells[&id(0, 1)].free_of_cell(1) >> 20, 100);
    // The pages are where they were.
    world.order_move(1);
    world.recorded(2, &[]);
    let none = PagesMoved::None {
        why: "pinned".to_owned(),
    };
    assert_eq!(world.moved(2, none), (vec![record(2, &[])], None));
    assert_eq!(why(world.recorded(2, &[]).1), "pinned");
    assert_eq!(world.lenders(), []);
    // Some are here and some are there: the region has both, and the order can be repeated.
    world.order_move(1);
    world.recorded(3, &[]);
    let some = PagesMoved::Some {
        why: "pinned".to_owned(),
    };
    let (acts, answer) = world.moved(3, some);
    assert_eq!((acts, why(answer)), (vec![], "pinned".to_owned()));
    assert_eq!(world.lenders(), [part(1, 64)]);
    assert_eq!(world.order_move(1), (vec![record(4, &both)], None));
    // Reports of an earlier move change nothing.
    assert_eq!(world.recorded(1, &["r"]), (vec![], None));
    assert_eq!(world.moved(3, all(1)), (vec![], None));
    assert_eq!(world.recorded(4, &[]), (vec![pages(4, &[1], &[0, 1])], None));
    world.moved(4, all(0));
    assert_eq!(world.recorded(4, &[]).1, Some(done(0, &[])));
    assert_eq!(world.lenders(), [part(1, 64)]);
}

#[test]
fn move_that_cannot_be_is_refused_with_the_reason() {
    let mut world = World::sharing(64);
    assert!(
        world
            .move_refused(1)
            .contains("no VM has the shared region table of cell 0")
    );
    world.host_member(1, member(0, "w"));
    world.take(id(0, 1), "w");
    assert!(world.move_refused(7).contains("no cell 7 on this host"));
    let short = world.move_refused(1);
    assert!(
        short.contains("cell 0 has 0 MiB free of cell 1's memory") && short.contains("cluster lend"),
        "{short}"
    );
    world.ask(id(1, 1), 8, lend(0, 63));
    assert!(
        world.move_refused(1).contains("has 63 MiB free"),
        "a part is not enough"
    );
    world.ask(id(1, 1), 8, lend(0, 1));
    let choosy = AdmitVm {
        cells: vec![0],
        ..member(0, "w2")
    };
    world.host_member(2, choosy);
    assert!(
        world
            .move_refused(1)
            .contains("VM w2 has the shared region table, and may not depend on cell 1")
    );
    world.leave(id(0, 1), "w2");
    assert_eq!(world.order_move(1).0, [record(1, &[part(0, 64), part(1, 64)])]);
    world.recorded(1, &[]);
    world.moved(1, all(64));
    world.recorded(1, &[]);
    // Another VM has the home's memory.
    world.host_member(3, in_cell(0, "large", 940));
    let short = world.move_refused(0);
    assert!(
        short.contains("cell 0 has 20 MiB free, and shared region table needs 64 MiB there"),
        "{short}"
    );
    world.die(id(1, 1));
    world.act(id(0, 1), |state| state.failed(1));
    assert!(world.move_refused(1).contains("cell 1 has failed"));
}

#[test]
fn move_requests_the_memory_that_is_missing_and_its_former_lender_has_its_own_back() {
    let mut world = World::new(0);
    world.limits = Some(LIMITS);
    world.specs = vec![spec("table", 64)];
    (0..2).for_each(|number| world.start(id(number, 1)));
    world.host_member(1, member(0, "w"));
    world.take(id(0, 1), "w");
    assert_eq!(world.order_move(1).0, [record(1, &[part(0, 64), part(1, 64)])]);
    assert_eq!(
        world.status(id(0, 1)).cells[1].lent,
        [part(0, 64)],
        "exactly what is missing"
    );
    world.recorded(1, &[]);
    world.moved(1, all(64));
    assert_eq!(world.recorded(1, &[]).1, Some(done(64, &[])));
    world.act(id(0, 1), State::pass);
    world.settle();
    assert_eq!(world.status(id(0, 1)).cells[1].lent, [part(0, 64)], "in use");
    world.order_move(0);
    world.recorded(2, &[]);
    world.moved(2, all(64));
    world.recorded(2, &[]);
    world.act(id(0, 1), State::pass);
    world.settle();
    assert_eq!(
        world.status(id(0, 1)).cells[1].lent,
        [],
        "it is returned by itself"
    );
}

/// The members' records decide, each of which may be of before or after a step.
#[test]
fn next_process_of_the_home_counts_all_memory_that_a_move_may_have_left() {
    let (both, new) = ([part(0, 64), part(1, 64)], [part(1, 64)]);
    for (w, r, expected) in [
        (&[][..], &[][..], vec![]),
        (&both[..], &[][..], vec![part(0, 64), part(1, 64)]),
        (&[][..], &both[..], vec![part(0, 64), part(1, 64)]),
        (&both[..], &new[..], vec![part(0, 64), part(1, 64)]),
        (&new[..], &both[..], vec![part(0, 64), part(1, 64)]),
        (&new[..], &[][..], vec![part(1, 64)]),
    ] {
        let mut world = World::with_region();
        world.die(id(0, 1));
        let mut writer = member(0, "w");
        writer.runs = true;
        world.running = vec![runs(&writer, w), runs(&member(1, "r"), r)];
        world.start(id(0, 2));
        let home = &world.cells[&id(0, 2)];
        assert_eq!(
            home.region_lenders("table", 64 << 20),
            expected,
            "{w:?} and {r:?}"
        );
        let own = if expected.first() == Some(&part(1, 64)) {
            0
        } else {
            64
        };
        assert_eq!(home.ledger.own_free() >> 20, 1024 - 64 - own, "{w:?} and {r:?}");
        let used = super::super::loans::used(&world.running, 1);
        let of_lender = if expected.is_empty() {
            Amounts::new()
        } else {
            [(0, 64 << 20)].into()
        };
        assert_eq!(used, of_lender, "{w:?} and {r:?}");
        assert_eq!(super::super::loans::used(&world.running, 0), Amounts::new());
    }
}

#[test]
fn members_depend_on_the_cells_that_have_the_memory_now() {
    // The member's entry names cell 1, as its record did when its process started. The region has moved.
    let mut world = World::with_region();
    world.die(id(1, 1));
    world.running = vec![runs(&member(0, "w"), &[]), runs(&member(1, "r"), &[part(1, 64)])];
    world.start(id(1, 2));
    let state = &world.cells[&id(1, 2)];
    let reader = state.vms().find(|vm| vm.name == "r").expect("r runs");
    assert!(state.has_region_of(&reader, 0), "the home");
    assert!(!state.has_region_of(&reader, 1), "the home's entry has no lender");

    // A lender that fails while the region moves ends all members.
    let mut world = World::with_region();
    world.order_move(1);
    world.recorded(1, &[]);
    world.die(id(1, 1));
    world.act(id(0, 1), |state| state.failed(1));
    let ended: BTreeSet<&str> = world.ended.iter().map(|(_, name)| &name[..]).collect();
    assert_eq!(ended, ["r", "w"].into());
    world.leave(id(0, 1), "w");
    world.act(id(0, 1), |state| state.bury(1));
    world.probes(id(0, 1));
    let (_, acts) = world.probed(id(0, 1), false);
    assert_eq!(acts, [Action::CloseRegion("table".to_owned())]);
    match world.answers.remove(&(0, CLIENT)) {
        Some(CellResponse::Refused { why }) => assert!(why.contains("any more"), "{why}"),
        other => panic!("the client waits for a region that is gone: {other:?}"),
    }
    assert_eq!(world.moved(1, all(1)), (vec![], None), "the thread ends later");
}

#[test]
fn cell_that_fails_before_the_pages_move_gets_none() {
    let mut world = World::with_region();
    world.order_move(1);
    world.die(id(1, 1));
    world.act(id(0, 1), |state| state.failed(1));
    let (acts, _) = world.recorded(1, &[]);
    assert_eq!(acts, [record(1, &[])]);
    let (_, answer) = world.recorded(1, &[]);
    assert!(
        matches!(&answer, Some(CellResponse::Refused { why }) if why.contains("failed meanwhile")),
        "{answer:?}"
    );
}

#[test]
fn next_process_of_the_home_seeks_the_file_before_it_moves_it() {
    let mut world = World::with_region();
    world.running = vec![runs(&member(1, "r"), &[])];
    world.die(id(0, 1));
    world.start(id(0, 2));
    let order = |world: &mut World| {
        let region = "table".to_owned();
        world.act(id(0, 2), |state| {
            state.handle_request(CLIENT, CellRequest::MoveRegion { region, to: 1 })
        });
        world.so_far()
    };
    let search = Action::SearchRegion {
        name: "table".to_owned(),
        bytes: 64 << 20,
        without: Vec::new(),
    };
    let (acts, answer) = order(&mut world);
    assert_eq!(acts, [search]);
    assert!(matches!(answer, Some(CellResponse::Later { .. })), "{answer:?}");
    let (acts, answer) = order(&mut world);
    assert!(
        acts.is_empty() && matches!(answer, Some(CellResponse::Later { .. })),
        "{answer:?}"
    );
    let state = world.cells.get_mut(&id(0, 2)).expect("it runs");
    assert!(state.region_sought("table", protocol::region::Found::File).0);
    let (acts, _) = order(&mut world);
    assert_eq!(acts, [record(1, &[part(0, 64), part(1, 64)])]);
}
