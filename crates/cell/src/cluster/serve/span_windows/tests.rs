use policy::cpu::windows::{FRAME, LEAD, WindowState};

use super::*;
use crate::handle::SpanThread;

fn thread(cell: u16, shard: usize, thread_id: i32) -> SpanThread {
    SpanThread {
        cell,
        shard,
        shard_pid: 100 + shard as i32,
        thread_id,
        wanted_ms: 0,
    }
}

fn plan(number: u16, cpus: &[usize]) -> CellPlan {
    CellPlan {
        number,
        host: None,
        cpus: cpus.to_vec(),
        nodes: vec![0],
        memory_bytes: 1 << 30,
    }
}

#[test]
fn each_vcpu_of_a_vm_has_a_cpu_of_its_cell_and_a_vm_with_too_many_is_left_to_linux() {
    let cells = [plan(0, &[4, 5]), plan(1, &[6])];
    let mut threads = SpanThreads {
        starts: 1,
        threads: vec![thread(0, 0, 7), thread(1, 1, 8), thread(0, 0, 9)],
    };
    let vm = spanning_vm("db".to_owned(), 100, &threads, &cells).unwrap();
    let places: Vec<_> = vm
        .vcpus
        .iter()
        .map(|vcpu| (vcpu.vcpu, vcpu.cell, vcpu.cpu))
        .collect();
    assert_eq!(places, [(0, 0, 4), (1, 1, 6), (2, 0, 5)]);
    threads.threads.push(thread(1, 1, 10));
    assert_eq!(spanning_vm("db".to_owned(), 100, &threads, &cells), None);
    threads.threads[3].cell = 7;
    assert_eq!(spanning_vm("db".to_owned(), 100, &threads, &cells), None);
}

#[test]
fn arbiter_gives_cells_one_schedule_and_refuses_reports_of_no_cell() {
    let cells = [plan(0, &[4]), plan(1, &[6])];
    let threads = |id| SpanThreads {
        starts: 1,
        threads: vec![thread(0, 0, id), thread(1, 1, id + 1)],
    };
    let vm = |name: &str, id| spanning_vm(name.to_owned(), 100, &threads(id), &cells).unwrap();
    let (one, two) = (vm("one", 10), vm("two", 20));
    let arbiter = WindowArbiter {
        cells: Arc::new([0, 1].into()),
        arbiter: Arc::default(),
    };
    let report = |cell, vms: &[&wire::SpanningVm]| wire::CellReport {
        cell,
        local_weight: 0,
        limits: Vec::new(),
        vms: vms.iter().map(|vm| (*vm).clone()).collect(),
    };
    let begin = 100 * FRAME;
    arbiter.take(begin, report(1, &[&two])).unwrap();
    let now = begin + policy::cpu::windows::PERIOD;
    let schedule = arbiter.take(now, report(0, &[&one])).unwrap();
    assert_eq!(arbiter.take(now + 1, report(1, &[&two])).unwrap(), schedule);
    let mut follower = Follower::default();
    follower.take(now, from_wire(schedule)).unwrap();
    let at = (now + LEAD).next_multiple_of(FRAME);
    let states = [one, two].map(|vm| follower.windows_of(&vm).state(at));
    assert_eq!(states, [WindowState::Open, WindowState::Closed]);

    assert!(arbiter.take(now, report(2, &[])).unwrap_err().contains("cell 2"));
    let many = wire::CellReport {
        vms: (0..=VMS_MAX).map(|_| vm("x", 1)).collect(),
        ..report(0, &[])
    };
    assert!(arbiter.take(now, many).is_err());
}

#[test]
fn limit_of_a_vm_without_a_rival_is_a_window_in_all_its_cells() {
    let cells = [plan(0, &[4]), plan(1, &[6])];
    let threads = SpanThreads {
        starts: 1,
        threads: vec![thread(0, 0, 10), thread(1, 1, 11)],
    };
    let vm = spanning_vm("one".to_owned(), 100, &threads, &cells).unwrap();
    let report = |most_permille: &[u32]| wire::CellReport {
        cell: 0,
        local_weight: 0,
        vms: vec![vm.clone()],
        limits: most_permille
            .iter()
            .map(|most_permille| wire::VmLimit {
                vm: "one".to_owned(),
                most_permille: *most_permille,
            })
            .collect(),
    };
    let windows = |most_permille: &[u32]| {
        let arbiter = WindowArbiter {
            cells: Arc::new([0, 1].into()),
            arbiter: Arc::default(),
        };
        arbiter
            .take(100 * FRAME, report(most_permille))
            .map(|schedule| schedule.windows)
    };
    assert_eq!(windows(&[]), Ok(vec![]));
    let limited = windows(&[250]).unwrap();
    assert_eq!((limited.len(), limited[0].length_ns), (1, FRAME / 4));
    assert!(
        windows(&[250; VMS_MAX + 1]).is_err(),
        "as many limits as VMs at most"
    );
}

#[test]
fn vm_is_busy_while_one_of_its_threads_wants_a_fiftieth_of_the_time() {
    let begun = Instant::now();
    let mut measures = Measures::default();
    let mut busy_at = |s: u64, one: &[(i32, u64)]| {
        let vms = [("one".to_owned(), one.to_vec()), ("two".to_owned(), vec![(9, 5)])];
        measures.note(&vms, begun + Duration::from_secs(s));
        measures.busy.iter().cloned().collect::<Vec<_>>()
    };
    assert!(
        busy_at(0, &[(1, 900), (2, 0)]).is_empty(),
        "nothing to compare with"
    );
    assert_eq!(busy_at(10, &[(1, 900), (2, 200)]), ["one"]);
    assert!(busy_at(20, &[(1, 900), (2, 399)]).is_empty());
    assert!(busy_at(30, &[(3, 5_000)]).is_empty(), "a thread of another boot");
    assert_eq!(busy_at(40, &[(3, 10_000)]), ["one"]);
    assert_eq!(measures.wanted_permille["one"], [500]);
    assert_eq!(measures.wanted_permille["two"], [0]);
}
