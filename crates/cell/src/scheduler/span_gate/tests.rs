use policy::cpu::windows::{FRAME, Follower, LEASE, Schedule, Window};

use super::*;

fn windows(from: Nanos, start: Nanos, length: Nanos) -> VmWindows {
    let mut follower = Follower::default();
    let window = Window { vm: 1, start, length };
    let schedule = Schedule {
        from,
        until: from + LEASE,
        windows: vec![window],
    };
    follower.take(from, schedule).unwrap();
    follower.windows_of(&1)
}

fn vm(starts: u64, windows: VmWindows) -> GatedVm {
    let vcpu = |shard| GatedVcpu {
        shard,
        // No process has this id.
        shard_pid: i32::MAX,
        cell: shard as u16,
        cpu: 0,
    };
    GatedVm {
        handle: VmHandle::default(),
        starts,
        vcpus: vec![vcpu(0), vcpu(1)],
        windows,
    }
}

fn named(vms: &[(&str, &GatedVm)]) -> BTreeMap<String, GatedVm> {
    vms.iter()
        .map(|(name, vm)| ((*name).to_owned(), (*vm).clone()))
        .collect()
}

#[test]
fn vcpus_in_all_cells_wait_while_the_window_is_closed_and_run_without_a_schedule() {
    let gated = vm(1, windows(10 * FRAME, 0, FRAME / 2));
    let states = |now| {
        let queue: Vec<_> = queue_of(VmId(3), &gated, now).collect();
        assert_eq!(queue.len(), 2);
        queue.iter().map(|queued| queued.entry.state).collect::<Vec<_>>()
    };
    assert_eq!(states(10 * FRAME), [VcpuState::Running; 2]);
    assert_eq!(states(10 * FRAME + FRAME / 2), [VcpuState::Waiting; 2]);
    assert_eq!(
        states(10 * FRAME + LEASE),
        [VcpuState::Running; 2],
        "it has run out"
    );
    assert_eq!(
        states(10 * FRAME - 1),
        [VcpuState::Running; 2],
        "it has not begun"
    );
}

#[test]
fn vm_that_reboots_gets_all_orders_again_and_one_that_leaves_none() {
    let mut thread = GateThread::default();
    assert_eq!(thread.wake_after(), None);
    let closed = windows(monotonic(), 0, 1);
    let first = vm(1, closed);
    thread.replace(named(&[("one", &first), ("two", &first)]));
    thread.apply();
    let number = |thread: &GateThread, name: &str| thread.vms[name].0;
    let [one, two] = ["one", "two"].map(|name| number(&thread, name));
    assert_ne!(one, two);
    let is_known = |thread: &GateThread, vm| thread.gate.knows(VcpuId { vm, index: 1 });
    assert!(is_known(&thread, one) && is_known(&thread, two));
    assert!(thread.wake_after().unwrap() <= IDLE_INTERVAL);
    thread.replace(named(&[("one", &first), ("two", &vm(2, closed))]));
    assert_eq!(number(&thread, "one"), one);
    let again = number(&thread, "two");
    assert!(again != two && !is_known(&thread, two) && !is_known(&thread, again));
    thread.replace(named(&[]));
    assert!(!is_known(&thread, one));
    assert_eq!(thread.wake_after(), None);
}

#[test]
fn orders_that_are_not_sent_are_given_again_within_a_millisecond_and_then_less_often() {
    let mut thread = GateThread::default();
    // The VM does not run, so that none of its shards takes an order.
    thread.replace(named(&[("one", &vm(1, windows(monotonic(), 0, 1)))]));
    let mut waits = Vec::new();
    for _ in 0..9 {
        thread.apply();
        waits.push(thread.resend_after.map(|after| after / MILLISECOND));
    }
    let doubled = [1, 2, 4, 8, 16, 32, 64, 64, 64].map(Some);
    assert_eq!(waits, doubled);
    assert!(thread.wake_after().unwrap() <= RESEND_MAX);
    let number = thread.vms["one"].0;
    for index in 0..2 {
        let stopped = thread.gate.is_stopped(VcpuId { vm: number, index });
        assert!(!stopped, "a stop that was not sent counts");
    }
    thread.replace(named(&[]));
    thread.apply();
    assert_eq!(thread.resend_after, None);
}

#[test]
fn end_leaves_the_vms_to_linux_and_later_ones_too() {
    let gate = SpanGate::start().unwrap();
    gate.set(named(&[("one", &vm(1, windows(monotonic(), 0, 1)))]));
    gate.end();
    // The thread has ended, and this does not wait for it.
    let begun = std::time::Instant::now();
    gate.set(named(&[]));
    assert!(begun.elapsed() < TAKE_LIMIT);
}
