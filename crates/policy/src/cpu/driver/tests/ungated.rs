use super::super::super::entitlement::Class;
use super::super::super::halt_rate::Sample;
use super::*;

/// A quiet machine where VM 9 has a reservation and VM 8 a cap.
struct Reserving;

impl View for Reserving {
    fn word(&self, cpu: CpuId) -> Word {
        Quiet { vcpus: 1 }.word(cpu)
    }
    fn vcpu(&self, _: VcpuId) -> VcpuEntry {
        VcpuEntry::default()
    }
    fn queued(&self, _: CpuId, _: usize) -> Option<VcpuId> {
        None
    }
    fn load(&self, _: CpuId, _: usize) -> u32 {
        0
    }
    fn terms(&self, vm: VmId) -> Terms {
        Terms {
            reservation_permille: if vm == VmId(9) { 500 } else { 0 },
            cap_permille: (vm == VmId(8)).then_some(900),
            ..Terms::default()
        }
    }
    fn may_run(&self, _: VcpuId, _: CpuId) -> bool {
        true
    }
    fn depends_on(&self, _: VcpuId, _: u16) -> bool {
        false
    }
}

/// A driver with a vCPU of each of these VMs.
fn with_vms(vms: &[u16]) -> Driver {
    let mut driver = driver();
    for vm in vms {
        driver.handle(NOW, add(*vm, 0), &Reserving, &mut Vec::new());
    }
    driver
}

/// Sample of a tick in which a vCPU runs for a time and halts.
fn sample(vm: u16, ran_us: u64, halts: u64) -> Event {
    let sample = Sample {
        length: 10 * MILLISECOND,
        ran: ran_us * 1_000,
        ready: 7 * MILLISECOND,
        halts,
    };
    Event::Vcpu {
        vcpu: vcpu(vm, 0),
        change: Change::Sample(sample),
    }
}

/// Has vCPUs do the same in each of these ticks.
fn run(driver: &mut Driver, ticks: std::ops::Range<u64>, events: &[Event]) {
    for tick in ticks {
        for event in events {
            let now = NOW + tick * 10 * MILLISECOND;
            driver.handle(now, *event, &Reserving, &mut Vec::new());
        }
    }
}

fn state(driver: &Driver, vm: u16) -> VcpuState {
    driver.queue.find(vcpu(vm, 0)).expect("it is queued").entry.state
}

fn running(driver: &Driver) -> Option<u16> {
    driver.running().map(|(vcpu, _)| vcpu.vm.0)
}

#[test]
fn vcpus_that_halt_often_are_all_left_to_linux_and_are_driven_again_when_they_spin() {
    let mut driver = with_vms(&[1, 2]);
    let often = [sample(1, 4_000, 10), sample(2, 4_000, 10)];
    run(&mut driver, 0..9, &often);
    assert_eq!(driver.counters().gate_changes, 0);
    run(&mut driver, 9..12, &often);
    assert_eq!([1, 2].map(|vm| state(&driver, vm)), [VcpuState::Ungated; 2]);
    assert_eq!(running(&driver), None);
    // One alone that spins has no rival among gangs.
    run(&mut driver, 12..35, &[sample(1, 9_000, 0), sample(2, 4_000, 10)]);
    assert_eq!(running(&driver), Some(1));
    run(&mut driver, 35..60, &[sample(1, 9_000, 0), sample(2, 9_000, 0)]);
    let states = [1, 2].map(|vm| state(&driver, vm));
    assert!(states.iter().all(|state| state.is_gated()), "{states:?}");
}

#[test]
fn vcpu_that_halts_often_and_uses_much_time_takes_turns_with_a_gang() {
    let mut driver = with_vms(&[1, 2]);
    let mut turns = [0, 0];
    for tick in 0..300 {
        run(&mut driver, tick..tick + 1, &[sample(1, 5_000, 10)]);
        let one = running(&driver).expect("a vCPU is chosen");
        turns[usize::from(one - 1)] += 1;
    }
    assert!(turns.iter().all(|turns| (100..=200).contains(turns)), "{turns:?}");
}

#[test]
fn vcpu_that_halts_often_and_uses_little_time_runs_beside_a_gang() {
    let mut driver = with_vms(&[1, 2]);
    run(&mut driver, 0..60, &[sample(1, 300, 10)]);
    assert_eq!(state(&driver, 1), VcpuState::Ungated);
    assert_eq!(running(&driver), Some(2));
    let changes = driver.counters().gate_changes;
    run(&mut driver, 60..160, &[sample(1, 300, 10)]);
    assert_eq!(driver.counters().gate_changes, changes, "it goes in and out");
}

#[test]
fn slice_of_a_vcpu_that_halts_often_is_open_to_others_of_its_kind_and_closed_to_gangs() {
    let mut driver = with_vms(&[1, 2, 3]);
    let often = [sample(1, 4_000, 10), sample(2, 4_000, 10)];
    let (mut open, mut closed) = (0, 0);
    for tick in 0..300 {
        run(&mut driver, tick..tick + 1, &often);
        if tick < 30 {
            continue;
        }
        match running(&driver) {
            Some(3) => {
                closed += 1;
                assert_eq!([1, 2].map(|vm| state(&driver, vm)), [VcpuState::Waiting; 2]);
            }
            Some(one) => {
                open += u32::from(state(&driver, 3 - one) == VcpuState::Ungated);
                assert_eq!(state(&driver, 3), VcpuState::Waiting);
            }
            None => panic!("a gang waits for an idle CPU"),
        }
    }
    assert!(open > 60 && closed > 60, "{open} {closed}");
}

#[test]
fn vm_with_a_reservation_or_a_cap_stays_in_the_order_and_a_reservation_has_the_whole_cpu() {
    let mut driver = with_vms(&[8, 9]);
    run(&mut driver, 0..60, &[sample(8, 300, 10), sample(9, 300, 10)]);
    for vm in [8, 9] {
        assert!(state(&driver, vm).is_gated(), "{vm}");
    }
    let mut driver = with_vms(&[1, 2]);
    run(&mut driver, 0..60, &[sample(1, 300, 10)]);
    assert_eq!(state(&driver, 1), VcpuState::Ungated);
    let now = NOW + 600 * MILLISECOND;
    driver.handle(now, add(9, 0), &Reserving, &mut Vec::new());
    assert_eq!((running(&driver), driver.word.class), (Some(9), Class::Reserved));
    run(&mut driver, 61..62, &[sample(1, 300, 10)]);
    assert_eq!(
        (running(&driver), state(&driver, 1)),
        (Some(9), VcpuState::Waiting)
    );
}

#[test]
fn vcpu_that_halts_often_keeps_its_slice_through_its_halts() {
    let mut driver = with_vms(&[1, 2]);
    let mut tick = 0;
    while tick < 20 || running(&driver) != Some(1) {
        run(&mut driver, tick..tick + 1, &[sample(1, 5_000, 10)]);
        tick += 1;
    }
    let now = NOW + (tick - 1) * 10 * MILLISECOND;
    let mut at = |us: u64, change| {
        let event = Event::Vcpu {
            vcpu: vcpu(1, 0),
            change,
        };
        driver.handle(now + us * 1_000, event, &Reserving, &mut Vec::new());
        running(&driver)
    };
    assert_eq!(at(100, Change::Halt), Some(1));
    assert_eq!(at(5_000, Change::Halt), Some(1), "5 ms, not 200 us");
    assert_eq!(at(5_001, Change::Wake), Some(1));
    assert_eq!(at(5_002, Change::Halt), Some(1));
    assert_eq!(at(25_003, Change::Halt), Some(2), "it sleeps");
}
