//! Cells that take no new VM.

use super::*;

impl World {
    fn cordon(&mut self, at: CellId, client: Client, cordoned: bool) {
        assert_eq!(
            self.ask(at, client, CellRequest::Cordon { cordoned }),
            CellResponse::Done
        );
        match cordoned {
            true => self.cordoned.insert(at.number),
            false => self.cordoned.remove(&at.number),
        };
    }

    #[track_caller]
    fn cordoned_as_all_know(&mut self, expected: &[bool]) {
        for at in self.cells.keys().copied().collect::<Vec<_>>() {
            let status = self.status(at);
            let cordoned: Vec<bool> = status.cells.iter().map(|cell| cell.cordoned).collect();
            assert_eq!(cordoned, expected, "as {at} knows it");
        }
    }
}

#[test]
fn cordoned_cell_takes_no_vm_and_every_cell_places_around_it() {
    let mut world = World::new(3);
    world.ask(id(1, 1), 1, CellRequest::AdmitVm(in_cell(1, "runs", 64)));
    world.cordon(id(1, 1), 2, true);
    world.cordon(id(1, 1), 3, true);
    world.cordoned_as_all_know(&[false, true, false]);
    for at in [id(0, 1), id(1, 1), id(2, 1)] {
        for named in [
            in_cell(1, "a", 64),
            AdmitVm {
                sent: true,
                ..in_cell(1, "a", 64)
            },
        ] {
            world.refused(
                at,
                CellRequest::AdmitVm(named),
                "cell 1 is cordoned and takes no new VM",
            );
        }
    }
    for (client, name) in (10..).zip(["a", "b", "c", "d"]) {
        assert!(matches!(
            world.host(client, vm(name, 64)),
            CellResponse::Hosted(_)
        ));
    }
    world.vms(&[&["a", "c"], &["runs"], &["b", "d"]]);
    // A part of a spanning VM, and a VM that another cell sent before it had the cordon.
    world.refused(
        id(1, 1),
        CellRequest::AdmitVm(AdmitVm {
            own: true,
            ..in_cell(1, "x/1", 64)
        }),
        "cordoned",
    );
    let sent = AdmitVm {
        sent: true,
        ..vm("x", 64)
    };
    let answer = world.ask(id(1, 1), 20, CellRequest::AdmitVm(sent));
    assert!(
        matches!(answer, CellResponse::Elsewhere { cell: 0 | 2 }),
        "{answer:?}"
    );
    world.cordon(id(1, 1), 21, false);
    world.cordoned_as_all_know(&[false; 3]);
    assert!(matches!(
        world.ask(id(1, 1), 22, CellRequest::AdmitVm(in_cell(1, "e", 64))),
        CellResponse::Hosted(_)
    ));
}

#[test]
fn cordon_outlives_the_cells_process_and_its_vms_come_back_to_it() {
    let mut world = World::new(2);
    world.ask(id(1, 1), 1, CellRequest::AdmitVm(in_cell(1, "a", 64)));
    world.cordon(id(1, 1), 2, true);
    world.die(id(1, 1));
    world.start(id(1, 2));
    world.cordoned_as_all_know(&[false, true]);
    let back = AdmitVm {
        runs: true,
        ..in_cell(1, "a", 64)
    };
    assert!(matches!(
        world.ask(id(1, 2), 3, CellRequest::AdmitVm(back)),
        CellResponse::Hosted(_)
    ));
    world.refused(id(1, 2), CellRequest::AdmitVm(in_cell(1, "b", 64)), "cordoned");
    // A cell that starts anew elsewhere receives the cordon.
    world.die(id(0, 1));
    world.start(id(0, 2));
    world.cordoned_as_all_know(&[false, true]);
    world.vms(&[&[], &["a"]]);
}

#[test]
fn cordoned_cell_lends_and_says_so_when_nothing_else_has_room() {
    let mut world = World::new(2);
    world.cordon(id(1, 1), 1, true);
    assert_eq!(world.ask(id(1, 1), 2, lend(0, 512)), CellResponse::Done);
    world.cordoned_as_all_know(&[false, true]);
    assert!(matches!(
        world.host(3, vm("large", 1500)),
        CellResponse::Hosted(_)
    ));
    world.refused(
        id(0, 1),
        CellRequest::AdmitVm(vm("more", 100)),
        "cell 0 has 36 MiB, cell 1 is cordoned",
    );
    world.cordon(id(0, 1), 4, true);
    world.refused(
        id(0, 1),
        CellRequest::AdmitVm(vm("more", 1)),
        "cell 0 is cordoned, cell 1 is cordoned",
    );
}

#[test]
fn cordon_is_answered_when_all_cells_know() {
    let mut world = World::new(3);
    world.act(id(0, 1), |state| {
        state.handle_request(2, CellRequest::Cordon { cordoned: true })
    });
    assert_eq!(world.cells[&id(0, 1)].awaited(2).len(), 2);
    assert!(world.answers.is_empty());
    world.settle();
    assert_eq!(world.answers[&(0, 2)], CellResponse::Done);
}
