//! Cells that fail, and the VMs that end with them.

use super::*;

/// A VM `name` over these cells; its home holds a place in each.
fn span(world: &mut World, client: Client, name: &str, cells: &[u16]) {
    for (part, cell) in cells.iter().enumerate() {
        let name = registry::cluster::interface::shard_name(name, part);
        let client = client + part as u64;
        let answer = world.ask(
            id(*cell, 1),
            client,
            CellRequest::AdmitVm(in_cell(*cell, &name, 64)),
        );
        assert!(matches!(answer, CellResponse::Hosted(_)), "{answer:?}");
    }
}

impl World {
    /// Ends the process of a cell, and reports its failure to each other cell.
    pub(super) fn fail(&mut self, cell: CellId) {
        self.die(cell);
        let survivors: Vec<CellId> = self.cells.keys().copied().collect();
        for at in survivors {
            self.act(at, |state| state.failed(cell.number));
        }
        self.settle();
    }

    fn bury(&mut self, cell: u16) {
        let survivors: Vec<CellId> = self.cells.keys().copied().collect();
        for at in survivors {
            self.act(at, |state| state.bury(cell));
        }
        self.settle();
    }

    /// The VMs that were ended since the last call, each with the cell that ended it.
    pub(super) fn ended(&mut self) -> Vec<(u16, String)> {
        let mut ended = std::mem::take(&mut self.ended);
        ended.sort();
        ended
    }
}

/// The ring of Cellular Disco's experiment (section 6): each VM depends on two cells, so a failure ends two.
#[test]
fn failed_cell_ends_exactly_the_vms_that_depend_on_it() {
    let mut world = World::new(4);
    for cell in 0..4 {
        let cells = [cell, (cell + 1) % 4];
        span(&mut world, u64::from(cell) * 10, &format!("ring{cell}"), &cells);
        world.ask(
            id(cell, 1),
            100 + u64::from(cell),
            CellRequest::AdmitVm(in_cell(cell, &format!("own{cell}"), 64)),
        );
    }
    assert_eq!(world.ask(id(2, 1), 1000, lend(3, 512)), CellResponse::Done);
    let borrows = world.ask(id(3, 1), 1001, CellRequest::AdmitVm(in_cell(3, "borrows", 1000)));
    assert!(matches!(borrows, CellResponse::Hosted(_)), "{borrows:?}");
    assert_eq!(world.ask(id(0, 1), 1002, lend(2, 100)), CellResponse::Done);

    world.fail(id(2, 1));
    let expected = [(0, "own2"), (0, "ring2"), (1, "ring1"), (3, "borrows")];
    let expected: Vec<(u16, String)> = expected.map(|(by, name)| (by, name.to_owned())).to_vec();
    assert_eq!(world.ended(), expected, "each by its own cell, or by the heir");
    // Until the host has none of them, their names and the cell's memory are not free.
    let status = world.status(id(0, 1));
    assert!(status.cells[2].failed && status.cells[2].life.is_none());
    assert_eq!(status.cells[0].lent, [part(2, 100)]);
    let again = world.ask(id(0, 1), 2000, CellRequest::AdmitVm(in_cell(0, "own2", 64)));
    assert!(matches!(again, CellResponse::Refused { .. }), "{again:?}");

    world.bury(2);
    let status = world.status(id(0, 1));
    assert!(status.cells[2].vms.is_empty() && status.cells[2].failed);
    assert!(status.cells[0].lent.is_empty(), "{:?}", status.cells[0].lent);
    let again = world.ask(id(0, 1), 2001, CellRequest::AdmitVm(in_cell(0, "own2", 64)));
    assert!(matches!(again, CellResponse::Hosted(_)), "{again:?}");
    assert_eq!(
        world.ask(id(3, 1), 2002, CellRequest::Recover { cell: 2 }),
        CellResponse::Done
    );
    world.refused(id(3, 1), CellRequest::Recover { cell: 0 }, "cell 0 runs");
    world.refused(id(3, 1), CellRequest::Recover { cell: 9 }, "no cell 9");
    world.refused(
        id(3, 1),
        CellRequest::AdmitVm(in_cell(2, "x", 1)),
        "there is no cell 2 that runs; there is 0, 1, 3",
    );
}

#[test]
fn next_heir_ends_the_vms_of_both_when_the_first_heir_fails_too() {
    let mut world = World::new(3);
    for cell in [0, 1, 2] {
        let host = in_cell(cell, &format!("own{cell}"), 64);
        world.ask(id(cell, 1), u64::from(cell), CellRequest::AdmitVm(host));
    }
    world.fail(id(1, 1));
    assert_eq!(world.ended(), [(0, "own1".to_owned())]);
    // It has failed before it could end that VM.
    world.fail(id(0, 1));
    let both = [(2, "own0".to_owned()), (2, "own1".to_owned())];
    assert_eq!(world.ended(), both);
    world.bury(0);
    world.bury(1);
    world.vms(&[&[], &[], &["own2"]]);
}

#[test]
fn client_that_asks_for_recovery_waits_until_the_vms_have_ended() {
    let mut world = World::new(2);
    world.ask(id(1, 1), 1, CellRequest::AdmitVm(in_cell(1, "a", 64)));
    world.fail(id(1, 1));
    world.act(id(0, 1), |state| {
        state.handle_request(7, CellRequest::Recover { cell: 1 })
    });
    world.act(id(0, 1), |state| {
        state.handle_request(8, CellRequest::Recover { cell: 1 })
    });
    assert_eq!(world.answers.get(&(0, 7)), None);
    world.bury(1);
    assert_eq!(world.answers.get(&(0, 7)), Some(&CellResponse::Done));
    assert_eq!(world.answers.get(&(0, 8)), Some(&CellResponse::Done));
    world.bury(1);
}
