//! CPU time that cells reserve for their VMs. Each cell has two CPUs, of which 1.8 can be reserved.

use super::*;

/// A VM of two vCPUs with a reservation, for any cell.
fn reserving(name: &str, permille: u32) -> AdmitVm {
    let mut host = vm(name, 64);
    host.share.vcpus = 2;
    host.share.cpu_reservation_permille = permille;
    host
}

fn reserving_in(cell: u16, name: &str, permille: u32) -> AdmitVm {
    AdmitVm {
        only: Some(cell),
        ..reserving(name, permille)
    }
}

fn change(name: &str, permille: u32) -> CellRequest {
    CellRequest::ReserveCpu {
        vm: name.to_owned(),
        permille,
    }
}

impl World {
    #[track_caller]
    fn admit(&mut self, at: u16, client: Client, host: AdmitVm) {
        let answer = self.ask(id(at, 1), client, CellRequest::AdmitVm(host));
        assert!(matches!(answer, CellResponse::Hosted(_)), "{answer:?}");
    }
}

#[test]
fn reservations_of_a_cell_are_bounded_and_the_refusal_names_vm_reserved_and_left() {
    let mut world = World::new(2);
    world.admit(0, 1, reserving_in(0, "a", 1_000));
    world.admit(0, 2, reserving_in(0, "b", 500));
    let third = CellRequest::AdmitVm(reserving_in(0, "c", 400));
    world.refused(
        id(0, 1),
        third,
        "VM c reserves 0.400 CPUs, and cell 0: 1.500 CPUs are reserved for other VMs, and 0.300 are left; \
         reserve less, ",
    );
    world.admit(0, 3, reserving_in(0, "c", 300));
    // The CPU time is free when a VM has ended.
    world.ask(id(0, 1), 4, CellRequest::Leave { name: "a".to_owned() });
    world.admit(0, 5, reserving_in(0, "d", 1_000));
    let large = CellRequest::AdmitVm(reserving_in(1, "e", 1_801));
    world.refused(
        id(1, 1),
        large,
        "VM e reserves 1.801 CPUs, and cell 1: its vCPUs can use 1.800 CPUs",
    );
}

#[test]
fn vm_goes_to_a_cell_that_has_the_cpu_time_and_is_refused_where_none_has() {
    let mut world = World::new(2);
    world.admit(0, 1, reserving_in(0, "a", 1_000));
    // Cell 1 has more vCPUs then, and cell 0 less CPU time.
    world.admit(1, 2, in_cell(1, "b", 64));
    world.admit(1, 3, in_cell(1, "c", 64));
    world.admit(1, 4, in_cell(1, "d", 64));
    let answer = world.host(5, reserving("e", 1_500));
    assert!(
        matches!(&answer, CellResponse::Hosted(place) if place.plan.number == 1),
        "{answer:?}"
    );
    let sixth = CellRequest::AdmitVm(reserving("f", 900));
    world.refused(id(0, 1), sixth, "0.800 are left; cell 1: 1.500");
}

#[test]
fn claims_that_are_under_way_count() {
    let mut world = World::new(2);
    for (client, name) in [(1, "a"), (2, "b")] {
        let ask = CellRequest::AdmitVm(reserving_in(0, name, 1_000));
        world.act(id(0, 1), |state| state.handle_request(client, ask));
    }
    assert!(
        matches!(&world.answers[&(0, 2)], CellResponse::Refused { why } if why.contains("0.800 are left"))
    );
    world.settle();
    assert!(matches!(world.answers[&(0, 1)], CellResponse::Hosted(_)));
}

#[test]
fn reservation_changes_within_the_bound_and_survives_the_process() {
    let mut world = World::new(2);
    world.admit(0, 1, reserving_in(0, "a", 1_000));
    world.admit(0, 2, reserving_in(0, "b", 0));
    world.refused(
        id(0, 1),
        change("b", 900),
        "VM b reserves 0.900 CPUs, and 1.000 CPUs are reserved",
    );
    assert_eq!(world.ask(id(0, 1), 9, change("b", 800)), CellResponse::Done);
    world.refused(
        id(0, 1),
        change("a", 1_001),
        "0.800 CPUs are reserved for other VMs, and 1.000 are left",
    );
    assert_eq!(world.ask(id(0, 1), 9, change("a", 500)), CellResponse::Done);
    assert_eq!(world.ask(id(0, 1), 9, change("b", 1_300)), CellResponse::Done);
    world.refused(id(1, 1), change("a", 100), "VM a has no place in cell 1");
    // As the records have it.
    let running = |name: &str, permille| RunningVm {
        name: name.to_owned(),
        cell: 0,
        share: reserving(name, permille).share,
        borrowed: Vec::new(),
        cells: Vec::new(),
        borrowed_cpus: Vec::new(),
        regions: Vec::new(),
    };
    world.running = vec![running("a", 500), running("b", 1_300)];
    world.die(id(0, 1));
    world.start(id(0, 2));
    let third = CellRequest::AdmitVm(reserving_in(0, "c", 1));
    world.refused(
        id(0, 2),
        third,
        "1.800 CPUs are reserved for other VMs, and 0.000 are left",
    );
    // A VM that runs is never turned away.
    let back = AdmitVm {
        runs: true,
        ..reserving_in(0, "b", 1_300)
    };
    let answer = world.ask(id(0, 2), 7, CellRequest::AdmitVm(back));
    assert!(matches!(answer, CellResponse::Hosted(_)), "{answer:?}");
}

#[test]
fn cell_without_drivers_and_another_users_vm_reserve_nothing() {
    let mut world = World::new(1);
    // A cell without others has nobody to wait for.
    world.admit(0, 1, reserving_in(0, "alone", 100));
    assert_eq!(world.ask(id(0, 1), 2, change("alone", 200)), CellResponse::Done);
    let users = AdmitVm {
        name: registry::cluster::interface::owned_name(1001, "web"),
        ..reserving_in(0, "web", 100)
    };
    world.refused(id(0, 1), CellRequest::AdmitVm(users), "is another user's");
    let mut world = World::new(0);
    world.has_drivers = false;
    world.start(id(0, 1));
    let asked = CellRequest::AdmitVm(reserving_in(0, "a", 100));
    world.refused(
        id(0, 1),
        asked,
        "Linux divides the CPUs of this cluster; write `cpus = \"gangs\"`",
    );
    world.admit(0, 1, reserving_in(0, "a", 0));
    world.refused(id(0, 1), change("a", 100), "Linux divides the CPUs");
    assert_eq!(world.ask(id(0, 1), 2, change("a", 0)), CellResponse::Done);
}

#[test]
fn vm_with_a_reservation_stays_in_its_cell() {
    let mut world = World::new(2);
    world.admit(0, 1, reserving_in(0, "a", 100));
    let cpus = vec![BorrowedCpu {
        vcpu: 1,
        cell: 1,
        cpu: 3,
        is_automatic: false,
    }];
    let away = CellRequest::BorrowCpus {
        vm: "a".to_owned(),
        cpus,
    };
    world.refused(
        id(0, 1),
        away.clone(),
        "VM a reserves CPU time, which only its own cell gives",
    );
    assert_eq!(world.ask(id(0, 1), 2, change("a", 0)), CellResponse::Done);
    assert_eq!(world.ask(id(0, 1), 3, away), CellResponse::Done);
    world.refused(
        id(0, 1),
        change("a", 100),
        "vCPU 1 of VM a runs on a CPU of cell 1",
    );
}
