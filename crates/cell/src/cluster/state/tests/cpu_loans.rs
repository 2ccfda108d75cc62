//! CPUs that VMs use in other cells.

use super::*;

fn borrowed(vcpu: u8, cell: u16, cpu: usize) -> BorrowedCpu {
    BorrowedCpu {
        vcpu,
        cell,
        cpu,
        is_automatic: false,
    }
}

/// A VM of two vCPUs in cell 0.
fn web() -> AdmitVm {
    let mut host = in_cell(0, "web", 64);
    host.share.vcpus = 2;
    host
}

fn record(cpus: &[BorrowedCpu]) -> CellRequest {
    CellRequest::BorrowCpus {
        vm: "web".to_owned(),
        cpus: cpus.to_vec(),
    }
}

fn lend(cpu: usize, borrower: u16) -> CellRequest {
    CellRequest::LendCpu {
        cpu,
        borrower,
        is_automatic: false,
    }
}

impl World {
    /// The VM `web` in cell 0, whose vCPU 1 runs on a CPU of cell 1.
    fn lent() -> Self {
        let mut world = Self::new(3);
        let hosted = world.ask(id(0, 1), 1, CellRequest::AdmitVm(web()));
        assert!(matches!(hosted, CellResponse::Hosted(_)), "{hosted:?}");
        assert_eq!(world.ask(id(1, 1), 2, lend(3, 0)), CellResponse::Done);
        let recorded = world.ask(id(0, 1), 3, record(&[borrowed(1, 1, 3)]));
        assert_eq!(recorded, CellResponse::Done);
        world
    }

    /// The lent CPUs of each cell, which all cells know alike.
    #[track_caller]
    fn lent_cpus(&mut self) -> Vec<Vec<(usize, String, u8)>> {
        let cells: Vec<CellId> = self.cells.keys().copied().collect();
        let mut known = cells.into_iter().map(|at| {
            let lent = |cell: &registry::cluster::interface::CellStatus| {
                let lent = cell.lent_cpus.iter();
                lent.map(|lent| (lent.cpu, lent.vm.clone(), lent.vcpu)).collect()
            };
            self.status(at).cells.iter().map(lent).collect::<Vec<Vec<_>>>()
        });
        let first = known.next().expect("a cell");
        for other in known {
            assert_eq!(other, first);
        }
        first
    }
}

#[test]
fn use_of_a_cpu_is_known_to_all_cells_until_it_ends() {
    let mut world = World::lent();
    let one = (3, "web".to_owned(), 1);
    assert_eq!(world.lent_cpus(), [vec![], vec![one.clone()], vec![]]);
    world.start(id(3, 1));
    assert_eq!(world.lent_cpus()[1], [one]);
    assert_eq!(world.ask(id(0, 1), 4, record(&[])), CellResponse::Done);
    assert!(world.lent_cpus().iter().all(Vec::is_empty));
}

#[test]
fn cpu_is_lent_by_its_cell_only_and_not_by_a_cordoned_one() {
    let mut world = World::new(2);
    world.refused(id(1, 1), lend(9, 0), "cell 1 has no CPU 9; it has 2-3");
    world.refused(id(1, 1), lend(3, 1), "cell 1 is no other cell of this host");
    world.refused(id(1, 1), lend(3, 7), "cell 7 is no other cell of this host");
    world.act(id(1, 1), |state| {
        state.handle_request(1, CellRequest::Cordon { cordoned: true })
    });
    world.settle();
    world.refused(id(1, 1), lend(3, 0), "cell 1 is cordoned and takes no new VM");
}

#[test]
fn cell_records_no_use_that_can_not_be() {
    let mut world = World::lent();
    world.refused(
        id(1, 1),
        record(&[borrowed(0, 2, 4)]),
        "VM web has no place in cell 1",
    );
    for (cpus, why) in [
        (vec![borrowed(2, 1, 3)], "named twice, or the VM has none"),
        (vec![borrowed(1, 1, 3), borrowed(1, 2, 4)], "named twice"),
        (vec![borrowed(0, 0, 1)], "cell 0 is no other cell"),
        (vec![borrowed(0, 9, 1)], "cell 9 is no other cell"),
    ] {
        world.refused(id(0, 1), record(&cpus), why);
    }
    let bound = AdmitVm {
        cells: vec![0, 2],
        ..in_cell(0, "bound", 64)
    };
    world.ask(id(0, 1), 10, CellRequest::AdmitVm(bound));
    let request = |cell| CellRequest::BorrowCpus {
        vm: "bound".to_owned(),
        cpus: vec![borrowed(0, cell, 4)],
    };
    world.refused(id(0, 1), request(1), "may depend on cells 0, 2 only");
    assert_eq!(world.ask(id(0, 1), 11, request(2)), CellResponse::Done);
    // A use that goes on may be of a cell that is dead; a new one may not.
    world.die(id(1, 1));
    let both = [borrowed(0, 2, 4), borrowed(1, 1, 3)];
    assert_eq!(world.ask(id(0, 1), 12, record(&both)), CellResponse::Done);
    world.refused(id(0, 1), record(&[borrowed(0, 1, 3)]), "cell 1 does not run");
}

#[test]
fn vm_ends_with_the_lender_of_a_cpu_as_long_as_it_uses_it() {
    let mut world = World::lent();
    world.ask(id(0, 1), 10, CellRequest::AdmitVm(in_cell(0, "own", 64)));
    world.fail(id(1, 1));
    assert_eq!(world.ended(), [(0, "web".to_owned())]);

    let mut world = World::lent();
    world.ask(id(0, 1), 4, record(&[borrowed(1, 2, 4)]));
    world.fail(id(1, 1));
    assert_eq!(world.ended(), [], "it has left the cell");
    world.fail(id(2, 1));
    assert_eq!(world.ended(), [(0, "web".to_owned())]);
}

#[test]
fn both_processes_may_die_and_the_next_ones_know_the_use() {
    let one = (3, "web".to_owned(), 1);
    let expected = [vec![], vec![one], vec![]];
    // As the VM's record has it when its cell starts again.
    let running = || RunningVm {
        name: "web".to_owned(),
        cell: 0,
        share: web().share,
        borrowed: Vec::new(),
        cells: Vec::new(),
        borrowed_cpus: vec![borrowed(1, 1, 3)],
        regions: Vec::new(),
    };
    for deaths in [&[0_u16][..], &[1], &[0, 1], &[1, 0], &[0, 1, 2]] {
        let mut world = World::lent();
        world.running = vec![running()];
        for cell in deaths {
            world.die(id(*cell, 1));
        }
        for cell in deaths {
            world.start(id(*cell, 2));
        }
        assert_eq!(world.lent_cpus(), expected, "{deaths:?}");
    }
    // The record had the use, and the tables had not: the process died between both.
    let mut world = World::new(3);
    world.ask(id(0, 1), 1, CellRequest::AdmitVm(web()));
    world.running = vec![running()];
    world.die(id(0, 1));
    world.start(id(0, 2));
    assert_eq!(world.lent_cpus(), expected);
}

#[test]
fn vm_that_comes_back_to_a_cell_without_its_entry_brings_its_borrowed_cpus() {
    let mut world = World::new(2);
    let back = AdmitVm {
        runs: true,
        borrowed_cpus: vec![borrowed(1, 1, 3)],
        ..web()
    };
    world.ask(id(0, 1), 1, CellRequest::AdmitVm(back));
    assert_eq!(world.lent_cpus()[1], [(3, "web".to_owned(), 1)]);
}

#[test]
fn cpu_is_lent_by_decision_while_the_cell_has_an_idle_one_and_promises_count_until_the_next_measure() {
    let automatic = |borrower| CellRequest::LendCpu {
        cpu: 3,
        borrower,
        is_automatic: true,
    };
    let mut world = World::new(3);
    let lender = id(1, 1);
    world.refused(lender, automatic(0), "lends no CPU by itself (`lend_cpus`");
    world.refused(lender, CellRequest::CpuLoad, "lends no CPU by itself");
    let measure = |world: &mut World, busy: &[(usize, u32)]| {
        let state = world.cells.get_mut(&id(1, 1)).expect("lives");
        state.set_busy_cpus(busy.iter().copied().collect())
    };
    let state = world.cells.remove(&lender).expect("lives");
    world.cells.insert(lender, state.with_automatic_cpu_loans(true));
    world.refused(lender, automatic(0), "has not measured its load yet");
    assert_eq!(measure(&mut world, &[(2, 1)]), []);
    let load = |world: &mut World| match world.ask(id(1, 1), 9, CellRequest::CpuLoad) {
        CellResponse::CpuLoad(load) => (load.cpus, load.busy, load.lent, load.cpu),
        other => panic!("{other:?}"),
    };
    assert_eq!(load(&mut world), (2, 1, 0, 3));
    assert_eq!(world.ask(lender, 1, automatic(0)), CellResponse::Done);
    assert_eq!(load(&mut world), (2, 1, 1, 3));
    world.refused(lender, automatic(2), "cell 1 has no idle CPU");
    // The borrower gave up, or its use is in the table by now.
    measure(&mut world, &[]);
    world.ask(id(0, 1), 1, CellRequest::AdmitVm(web()));
    assert_eq!(world.ask(lender, 1, automatic(0)), CellResponse::Done);
    let taken = BorrowedCpu {
        is_automatic: true,
        ..borrowed(1, 1, 3)
    };
    world.ask(id(0, 1), 2, record(&[taken]));
    let lent = measure(&mut world, &[]);
    assert_eq!((lent.len(), lent[0].cpu, lent[0].is_automatic), (1, 3, true));
    assert_eq!(load(&mut world), (2, 0, 1, 2));
    // A command needs no idle CPU.
    measure(&mut world, &[(2, 1), (3, 1)]);
    world.refused(lender, automatic(2), "has no idle CPU");
    assert_eq!(world.ask(lender, 1, lend(3, 2)), CellResponse::Done);
}
