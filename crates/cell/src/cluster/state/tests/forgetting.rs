//! Names of VMs of lost hosts.

use super::*;

fn claim(world: &mut World, at: CellId, client: Client, name: &str) -> CellResponse {
    world.ask(at, client, CellRequest::AdmitVm(in_cell(at.number, name, 64)))
}

#[test]
fn names_of_a_lost_host_are_free_in_all_cells_once_it_is_forgotten() {
    let mut world = World::new(4);
    for cell in [2, 3] {
        claim(&mut world, id(cell, 1), cell.into(), &format!("vm{cell}"));
    }
    let cells = vec![2, 3];
    world.refused(
        id(0, 1),
        CellRequest::Forget { cells: cells.clone() },
        "cell 2 runs, and so may its VMs",
    );
    world.die(id(2, 1));
    world.refused(
        id(0, 1),
        CellRequest::Forget { cells: cells.clone() },
        "cell 3 runs",
    );
    world.die(id(3, 1));
    let taken = claim(&mut world, id(1, 1), 10, "vm2");
    assert!(matches!(taken, CellResponse::Refused { .. }), "{taken:?}");
    assert_eq!(
        world.ask(id(0, 1), 11, CellRequest::Forget { cells }),
        CellResponse::Done
    );
    for (cell, name) in [(0, "vm2"), (1, "vm3")] {
        let free = claim(&mut world, id(cell, 1), 20 + u64::from(cell), name);
        assert!(matches!(free, CellResponse::Hosted(_)), "{free:?}");
    }
    // Its cells are not shown any more, until they come back.
    world.vms(&[&["vm2"], &["vm3"]]);
    world.start(id(2, 2));
    world.vms(&[&["vm2"], &["vm3"], &[]]);
    let none = CellRequest::Forget { cells: Vec::new() };
    assert_eq!(world.ask(id(0, 1), 12, none), CellResponse::Done);
}

#[test]
fn names_of_a_lapsed_cell_are_free_where_all_have_seen_it_lapse() {
    let mut world = World::new(3);
    claim(&mut world, id(2, 1), 1, "a");
    world.act(id(0, 1), |state| state.lapsed(2));
    world.die(id(2, 1));
    let refused = claim(&mut world, id(0, 1), 2, "a");
    assert!(
        matches!(refused, CellResponse::Refused { .. }),
        "one that lives does not lapse"
    );
    world.act(id(0, 1), |state| state.lapsed(2));
    let refused = claim(&mut world, id(0, 1), 3, "a");
    assert!(
        matches!(refused, CellResponse::Refused { .. }),
        "the other one votes against it"
    );
    world.act(id(1, 1), |state| state.lapsed(2));
    let free = claim(&mut world, id(0, 1), 4, "a");
    assert!(matches!(free, CellResponse::Hosted(_)), "{free:?}");
}

#[test]
fn cell_that_starts_gives_no_names_before_it_knows_those_of_all_cells_that_may_run() {
    let mut world = World::new(1);
    world.die(id(0, 1));
    let state = State::new(id(0, 2), 1, plan(0), None, []).expecting([1, 2]);
    world.cells.insert(id(0, 2), state);
    world.act(id(0, 2), |state| {
        state.handle_request(1, CellRequest::AdmitVm(vm("early", 64)))
    });
    world.act(id(0, 2), State::handle_all_linked);
    let why = "waits until all VMs of lost cells have ended (cell 1, 2)";
    assert!(
        matches!(&world.answers[&(0, 1)], CellResponse::Refused { why: told } if told.contains(why)),
        "{:?}",
        world.answers
    );
    world.start(id(1, 1));
    world.refused(id(0, 2), CellRequest::AdmitVm(in_cell(0, "a", 64)), "(cell 2)");
    world.act(id(0, 2), |state| state.lapsed(2));
    let free = claim(&mut world, id(0, 2), 3, "a");
    assert!(matches!(free, CellResponse::Hosted(_)), "{free:?}");
}

#[test]
fn cell_of_a_host_that_has_left_is_gone_when_it_is_dead_and_has_no_vm() {
    for (with_vm, cells) in [(false, 2), (true, 3)] {
        let mut world = World::new(3);
        if with_vm {
            claim(&mut world, id(2, 1), 1, "a");
        }
        for at in [0, 1] {
            world.act(id(at, 1), |state| state.departed(2));
        }
        assert_eq!(world.status(id(0, 1)).cells.len(), 3, "it lives");
        world.die(id(2, 1));
        assert_eq!(world.status(id(0, 1)).cells.len(), cells);
        if with_vm {
            let taken = claim(&mut world, id(0, 1), 2, "a");
            assert!(matches!(taken, CellResponse::Refused { .. }), "its VM may run on");
            let forget = CellRequest::Forget { cells: vec![2] };
            assert_eq!(world.ask(id(1, 1), 3, forget), CellResponse::Done);
            assert_eq!(world.status(id(0, 1)).cells.len(), 2);
        }
    }
}

#[test]
fn no_host_is_forgotten_while_a_cell_of_the_former_release_runs() {
    let mut world = World::new(3);
    world.die(id(2, 1));
    world.act(id(0, 1), |state| state.linked(id(1, 2), false));
    let forget = CellRequest::Forget { cells: vec![2] };
    world.refused(id(0, 1), forget, "a cell of the former release runs");
}
