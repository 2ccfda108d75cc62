//! Tests with fake threads of vCPUs, in real time.

mod ungated;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use locks::IgnorePoison;
use nix::sched::sched_getaffinity;
use nix::unistd::Pid;
use policy::cpu::message::Refusal;
use policy::cpu::windows::{FRAME, Follower, LEASE, Schedule, VmWindows, Window};
use registry::cluster::windows::SpanningVcpu;

use super::activity::ThreadTimes;
use super::gate::LEASE_MS;
use super::host_clock::monotonic;
use super::*;

/// A VM whose shard obeys at once. Its guest spins or is halted.
struct Fake {
    vcpus: Mutex<Vec<FakeVcpu>>,
}

#[derive(Default)]
struct FakeVcpu {
    /// Its CPU, once it has one.
    pinned_to: Option<usize>,
    /// Number of CPUs that it may use.
    cpus: usize,
    /// Halts in each second that it runs, beside the work.
    halts_per_s: u64,
    is_halted: bool,
    /// Deadline of its lease.
    stopped_until: Option<Instant>,
    /// Start of its present run.
    runs_since: Option<Instant>,
    /// Start and end of each run on a CPU.
    runs: Vec<(Instant, Instant)>,
    orders: u64,
}

impl FakeVcpu {
    /// Ends the lease that has run out, and a run that has ended.
    fn settle(&mut self, now: Instant) {
        if let Some(until) = self.stopped_until.take_if(|until| *until <= now) {
            self.runs_since = Some(until);
        }
        if self.is_halted || self.stopped_until.is_some() {
            self.runs.extend(self.runs_since.take().map(|since| (since, now)));
        }
    }

    fn ran(&self, now: Instant) -> Duration {
        let runs = self.runs.iter().map(|(from, to)| *to - *from);
        runs.sum::<Duration>() + self.runs_since.map_or(Duration::ZERO, |since| now - since)
    }
}

impl Fake {
    fn new(vcpus: u8) -> Arc<Self> {
        let spinning = |_| FakeVcpu {
            runs_since: Some(Instant::now()),
            ..FakeVcpu::default()
        };
        Arc::new(Self {
            vcpus: Mutex::new((0..vcpus).map(spinning).collect()),
        })
    }

    fn with<T>(&self, vcpu: u16, change: impl FnOnce(&mut FakeVcpu, Instant) -> T) -> T {
        let mut vcpus = self.vcpus.lock().ignore_poison();
        let (vcpu, now) = (&mut vcpus[usize::from(vcpu)], Instant::now());
        vcpu.settle(now);
        change(vcpu, now)
    }

    fn halt(&self) {
        for vcpu in 0..self.count() {
            self.with(vcpu, |vcpu, now| {
                vcpu.is_halted = true;
                vcpu.settle(now);
            });
        }
    }

    fn wake(&self) {
        for vcpu in 0..self.count() {
            self.with(vcpu, |vcpu, now| {
                vcpu.is_halted = false;
                vcpu.runs_since = vcpu.stopped_until.is_none().then_some(now);
            });
        }
    }

    fn count(&self) -> u16 {
        self.vcpus.lock().ignore_poison().len() as u16
    }

    /// Time for which its vCPUs ran since `from`, each.
    fn ran(&self, from: Instant) -> Vec<Duration> {
        let runs = (0..self.count()).map(|vcpu| self.runs(vcpu, from));
        runs.map(|runs| runs.iter().map(|(from, to)| *to - *from).sum())
            .collect()
    }

    /// The runs of a vCPU since `from`.
    fn runs(&self, vcpu: u16, from: Instant) -> Vec<(Instant, Instant)> {
        self.with(vcpu, |vcpu, now| {
            let present = vcpu.runs_since.map(|since| (since, now));
            let runs = vcpu.runs.iter().copied().chain(present);
            let since = runs.map(|(begin, end)| (begin.max(from), end));
            since.filter(|(begin, end)| begin < end).collect()
        })
    }

    fn orders(&self) -> u64 {
        (0..self.count())
            .map(|vcpu| self.with(vcpu, |vcpu, _| vcpu.orders))
            .sum()
    }
}

impl VcpuThreads for Fake {
    fn pin(&self, vcpu: u16, cpus: &[usize]) -> io::Result<()> {
        self.with(vcpu, |vcpu, _| {
            vcpu.pinned_to = cpus.first().copied();
            vcpu.cpus = cpus.len();
        });
        Ok(())
    }

    fn stop(&self, vcpu: u16) {
        self.with(vcpu, |vcpu, now| {
            vcpu.orders += 1;
            vcpu.stopped_until = Some(now + Duration::from_millis(LEASE_MS.into()));
            vcpu.settle(now);
        });
    }

    fn go_on(&self, vcpu: u16) {
        self.with(vcpu, |vcpu, now| {
            vcpu.orders += 1;
            if vcpu.stopped_until.take().is_some() && !vcpu.is_halted {
                vcpu.runs_since = Some(now);
            }
        });
    }

    fn read(&self, vcpu: u16) -> Option<ThreadTimes> {
        self.with(vcpu, |vcpu, now| {
            let ran_ns = vcpu.ran(now).as_nanos() as u64;
            // One that halts is halted for two fifths of its time.
            let used_ns = if vcpu.halts_per_s > 0 {
                ran_ns / 5 * 3
            } else {
                ran_ns
            };
            Some(ThreadTimes {
                is_ready: vcpu.runs_since.is_some(),
                ready_ns: used_ns,
                ran_ns: used_ns,
                halts: Some(vcpu.ran(now).as_millis() as u64 * vcpu.halts_per_s / 1_000),
            })
        })
    }
}

/// Time that both lists of runs have in common.
fn common(one: &[(Instant, Instant)], other: &[(Instant, Instant)]) -> Duration {
    let pairs = one.iter().flat_map(|a| other.iter().map(move |b| (a, b)));
    pairs
        .map(|(a, b)| a.1.min(b.1).saturating_duration_since(a.0.max(b.0)))
        .sum()
}

/// Two drivers, on CPUs of this host.
fn drivers() -> VmTable {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let mut cpus: Vec<usize> = (0..nix::sched::CpuSet::count())
        .filter(|cpu| set.is_set(*cpu).unwrap())
        .collect();
    // On a host of one CPU both threads are on it.
    cpus.push(cpus[0]);
    cpus.truncate(2);
    let topology = topology(&cpus, &HostNodes::default());
    VmTable::start(Arc::new(Shared::new(cpus, topology, Tunables::default()))).unwrap()
}

/// Adds a VM that is driven from now on.
fn add(table: &mut VmTable, vm: u32, settings: VmSettings) -> Arc<Fake> {
    let fake = Fake::new(settings.vcpus);
    let known = KnownVm {
        handle: VmHandle::default(),
        tries: None,
        scheduled: None,
    };
    table.vms.insert(vm, known);
    table.schedule(vm, settings, fake.clone());
    assert!(table.vms[&vm].scheduled.is_some());
    fake
}

fn vcpus_of(count: u8) -> VmSettings {
    VmSettings {
        vcpus: count,
        ..VmSettings::default()
    }
}

#[test]
fn vm_whose_larger_reservation_has_no_room_is_placed_anew() {
    let mut table = drivers();
    let reserving = |reservation_permille| VmSettings {
        reservation_permille,
        ..vcpus_of(1)
    };
    for (vm, permille) in [(1, 800), (2, 0), (3, 0)] {
        add(&mut table, vm, reserving(permille));
    }
    let scheduled = table.vms.get_mut(&3).and_then(|vm| vm.scheduled.as_mut());
    let scheduled = scheduled.expect("it is driven");
    scheduled.settings = reserving(800);
    scheduled.facts = Arc::new(VmFacts {
        terms: scheduled.settings.terms(),
        ..VmFacts::clone(&scheduled.facts)
    });
    assert_eq!(table.cpu_use().reserved, [1_600, 0]);
    table.make_room(3);
    assert_eq!(table.cpu_use().reserved, [800, 800]);
    let before = table.vms[&3].scheduled.as_ref().map(|vm| vm.number);
    table.make_room(3);
    let after = table.vms[&3].scheduled.as_ref().map(|vm| vm.number);
    assert_eq!(before, after, "it has room, and stays");
}

/// Time that drivers have to agree, and over which runs are compared.
const SETTLING: Duration = Duration::from_millis(300);
const MEASURED: Duration = Duration::from_millis(1_200);

#[test]
fn vms_that_spin_run_in_turns_with_both_vcpus_at_once() {
    let mut table = drivers();
    let vms = [1, 2].map(|vm| add(&mut table, vm, vcpus_of(2)));
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(MEASURED);
    let runs = vms.each_ref().map(|vm| [0, 1].map(|vcpu| vm.runs(vcpu, from)));
    let ran = vms.each_ref().map(|vm| vm.ran(from).iter().sum::<Duration>());
    let total: Duration = ran.iter().sum();
    for (ran, [first, second]) in ran.iter().zip(&runs) {
        assert!(*ran * 4 > total, "{ran:?} of {total:?}");
        // Half of it by a gang, a quarter by independent CPUs. The threads may wait for a busy host.
        assert!(common(first, second) * 20 > *ran * 6, "{first:?} {second:?}");
    }
    let queues = table.queues();
    let figures = |queue: &CpuQueue| (queue.load, queue.waiting, queue.moved_ordered);
    assert_eq!(queues.iter().map(figures).collect::<Vec<_>>(), [(2, 1, 0); 2]);
    assert_eq!(queues[0].cpu, table.shared.host_cpus[0]);
    // CPUs are in use, and by one of them.
    assert!(total > MEASURED, "{total:?}");
    let cpu_of = |vm: &Fake, vcpu| vm.with(vcpu, |vcpu, _| vcpu.pinned_to).unwrap();
    for vcpu in 0..2_u16 {
        let rival = u16::from(cpu_of(&vms[0], vcpu) != cpu_of(&vms[1], vcpu)) ^ vcpu;
        let both = common(&runs[0][usize::from(vcpu)], &runs[1][usize::from(rival)]);
        assert!(both * 4 < MEASURED, "{both:?}");
    }
    table.end();
}

#[test]
fn halted_vm_leaves_the_cpus_to_the_other_and_gets_its_part_when_it_wakes() {
    let mut table = drivers();
    let vms = [1, 2].map(|vm| add(&mut table, vm, vcpus_of(2)));
    vms[0].halt();
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(SETTLING);
    let alone: Duration = vms[1].ran(from).iter().sum();
    assert!(alone > from.elapsed() * 13 / 10, "{alone:?}");
    vms[0].wake();
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(MEASURED);
    let woken: Duration = vms[0].ran(from).iter().sum();
    assert!(woken > MEASURED / 4 && woken < MEASURED * 7 / 4, "{woken:?}");
    table.end();
}

#[test]
fn vm_of_a_greater_weight_runs_longer_and_one_at_its_cap_stands_still() {
    let mut table = drivers();
    let heavy = VmSettings {
        weight: Some(300),
        ..vcpus_of(2)
    };
    let vms = [add(&mut table, 1, heavy), add(&mut table, 2, vcpus_of(2))];
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(2 * MEASURED);
    let [heavy, light] = vms.map(|vm| vm.ran(from).iter().sum::<Duration>());
    assert!(heavy * 2 > light * 3, "{heavy:?} {light:?}");
    table.remove(1);
    table.remove(2);
    let capped = VmSettings {
        limit: Some(0.5),
        ..vcpus_of(2)
    };
    // Without a rival.
    let capped = add(&mut table, 3, capped);
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(MEASURED);
    let ran: Duration = capped.ran(from).iter().sum();
    assert!(ran > MEASURED / 4 && ran < MEASURED, "{ran:?}");
    table.end();
}

#[test]
fn vcpus_without_a_rival_get_no_orders_and_those_of_a_vm_that_is_gone_neither() {
    let mut table = drivers();
    let alone = add(&mut table, 1, vcpus_of(2));
    std::thread::sleep(SETTLING);
    assert_eq!(alone.orders(), 2, "to go on, once each");
    let pinned: Vec<_> = (0..2)
        .map(|vcpu| alone.with(vcpu, |vcpu, _| vcpu.pinned_to))
        .collect();
    assert!(pinned.iter().all(Option::is_some), "{pinned:?}");
    let rival = add(&mut table, 2, vcpus_of(2));
    std::thread::sleep(SETTLING);
    assert!(rival.orders() > 2 && alone.orders() > 2);
    table.remove(2);
    std::thread::sleep(SETTLING);
    let (orders, from) = ([alone.orders(), rival.orders()], Instant::now());
    std::thread::sleep(SETTLING);
    assert_eq!([alone.orders(), rival.orders()], orders);
    // Its leases have run out, and the other one runs nearly all the time.
    let most = from.elapsed() * 17 / 10;
    for vm in [&alone, &rival] {
        assert!(vm.ran(from).iter().sum::<Duration>() > most);
    }
    table.end();
}

#[test]
fn thread_of_a_cpu_without_competition_sleeps_for_half_a_second() {
    let shared = Arc::new(Shared::new(
        vec![0, 0],
        Topology::regular(1, 1, 2),
        Tunables::default(),
    ));
    let (sender, _inputs) = mpsc::channel();
    let peers = vec![sender.clone(), sender];
    let mut thread = CpuThread::new(CpuId(0), Arc::clone(&shared), peers);
    let mut add = |vm: u16| {
        let facts = VmFacts {
            terms: vcpus_of(1).terms(),
            cpus: vcpus_of(1).cpus(&shared.host_cpus),
            entries: [Published::default()].into_iter().collect(),
            threads: Fake::new(1),
            windows: None,
        };
        thread.take(Input::Vm(VmId(vm), Some(Arc::new(facts))));
        let vcpu = policy::cpu::VcpuId {
            vm: VmId(vm),
            index: 0,
        };
        let is_awake = true;
        thread.take(Input::Event(Event::Add { vcpu, is_awake }));
        thread.look();
        thread.apply_gate();
        let sleeps = thread.wake_at().saturating_sub(shared.now());
        (Duration::from_nanos(sleeps), thread.runs(1))
    };
    let (sleeps, runs) = add(1);
    assert!(runs && sleeps > Duration::from_millis(400), "{sleeps:?}");
    let (sleeps, _) = add(2);
    assert!(sleeps <= Duration::from_millis(10), "{sleeps:?}");
}

/// Orders a vCPU of a VM to a CPU of the host.
fn order(table: &VmTable, vm: u32, vcpu: u8, cpu: usize) -> Outcome {
    let (tell, told) = mpsc::channel();
    table.order(vm, vcpu, cpu, tell);
    told.recv_timeout(Duration::from_secs(10)).expect("an outcome")
}

#[test]
fn ordered_vcpu_comes_to_its_cpu_and_stays_there_by_another_order() {
    let mut table = drivers();
    let cpus = table.shared.host_cpus.clone();
    let vm = add(&mut table, 1, vcpus_of(1));
    let pinned_to = || vm.with(0, |vcpu, _| vcpu.pinned_to);
    for cpu in [cpus[1], cpus[0], cpus[0]] {
        assert_eq!(order(&table, 1, 0, cpu), Outcome::Moved);
        let deadline = Instant::now() + Duration::from_secs(10);
        while pinned_to() != Some(cpu) {
            assert!(Instant::now() < deadline, "{:?} is not {cpu}", pinned_to());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let ordered: u64 = table.queues().iter().map(|queue| queue.moved_ordered).sum();
    assert!(ordered >= 1, "{ordered}");
    table.end();
}

#[test]
fn order_that_no_driver_can_carry_out_is_refused_with_the_reason() {
    let mut table = drivers();
    let cpus = table.shared.host_cpus.clone();
    add(&mut table, 1, vcpus_of(2));
    let pinned = VmSettings {
        pins: BTreeMap::from([(0, vec![cpus[0]])]),
        ..vcpus_of(1)
    };
    add(&mut table, 2, pinned);
    let loads = |table: &VmTable| table.cpu_use().loads;
    let before = loads(&table);
    for cpu in [cpus[0], cpus[1]] {
        let outcomes = [0, 1].map(|vcpu| order(&table, 1, vcpu, cpu));
        // One of both vCPUs is there already.
        assert!(
            outcomes.contains(&Outcome::Refused(Refusal::SameVm)),
            "{outcomes:?}"
        );
    }
    let outcome = order(&table, 2, 0, cpus[1]);
    assert_eq!(outcome, Outcome::Refused(Refusal::NotAllowed));
    assert_eq!(order(&table, 2, 0, usize::MAX), Outcome::NoCpu);
    assert_eq!(order(&table, 3, 0, cpus[0]), Outcome::NotDriven);
    assert_eq!(loads(&table), before);
    table.end();
}

#[test]
fn vm_with_a_vcpu_on_another_cells_cpu_is_left_to_linux() {
    let mut table = drivers();
    let cpu = table.shared.host_cpus[0];
    let vm = add(&mut table, 1, vcpus_of(2));
    let rival = add(&mut table, 2, vcpus_of(2));
    std::thread::sleep(SETTLING);
    assert!(vm.orders() > 2);
    assert!(table.release(1));
    let orders = vm.orders();
    std::thread::sleep(SETTLING);
    assert_eq!(vm.orders(), orders, "no driver acts on its threads");
    assert_eq!(order(&table, 1, 0, cpu), Outcome::NotDriven);
    assert_eq!(order(&table, 2, 0, cpu_of(&rival, 0)), Outcome::Moved);

    // The record of the second one has such a vCPU now.
    let directory = tempfile::tempdir().unwrap();
    let registry = registry::vms::Registry::at(directory.path()).unwrap();
    let spec = config::parse("vm.toml", "image = \"x\"\ncpus = 2\n").unwrap();
    let mut record = registry::vms::Record::new("two".to_owned(), spec, 3);
    record.borrowed_cpus = vec![registry::cluster::interface::BorrowedCpu {
        vcpu: 0,
        cell: 1,
        cpu: 9,
        is_automatic: false,
    }];
    let handle = table.vms[&2].handle.clone();
    let recording = handle.recorder().begin(registry.claim("two").unwrap(), record);
    assert!(settings_of(&handle).unwrap().is_away);
    table.update(2);
    assert_eq!(order(&table, 2, 0, cpu), Outcome::NotDriven);
    drop(recording);
    table.end();
}

/// The CPU of a vCPU's thread.
fn cpu_of(vm: &Fake, vcpu: u16) -> usize {
    vm.with(vcpu, |vcpu, _| vcpu.pinned_to).unwrap()
}

/// Half of each frame from now on, until [`LEASE`] is over.
fn half_of_each_frame() -> VmWindows {
    let now = monotonic();
    let window = Window {
        vm: 1,
        start: 0,
        length: FRAME / 2,
    };
    let schedule = Schedule {
        from: now,
        until: now + LEASE,
        windows: vec![window],
    };
    let mut follower = Follower::default();
    follower.take(now, schedule).unwrap();
    follower.windows_of(&1)
}

/// Two drivers: two vCPUs of a part do not share a CPU.
fn drivers_on_two_cpus() -> VmTable {
    let table = drivers();
    let [first, second] = table.shared.host_cpus[..] else {
        panic!("two drivers");
    };
    assert_ne!(first, second, "the test needs a host of two CPUs");
    table
}

/// Adds the part of a VM that spans cells, with a vCPU on each CPU.
fn add_part(table: &mut VmTable, windows: VmWindows) -> Arc<Fake> {
    let vcpu = |(vcpu, cpu): (u8, &usize)| SpanningVcpu {
        vcpu,
        cell: 0,
        cpu: *cpu,
        shard_pid: 0,
        thread_id: 0,
    };
    let vcpus = (0..).zip(&table.shared.host_cpus).map(vcpu).collect();
    let fake = Fake::new(2);
    table.add_part("span".to_owned(), parts::Part { vcpus, windows }, fake.clone());
    fake
}

#[test]
fn part_of_a_spanning_vm_runs_in_its_windows_alone_and_a_gang_between_them() {
    let mut table = drivers_on_two_cpus();
    let local = add(&mut table, 1, vcpus_of(2));
    let part = add_part(&mut table, half_of_each_frame());
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(MEASURED);
    let ran = |vm: &Fake| vm.ran(from).iter().sum::<Duration>();
    let (part_ran, local_ran) = (ran(&part), ran(&local));
    // Half of the time on two CPUs each, less what a busy host takes.
    assert!(
        part_ran > MEASURED * 7 / 10 && part_ran < MEASURED * 13 / 10,
        "{part_ran:?}"
    );
    assert!(
        local_ran > MEASURED * 7 / 10 && local_ran < MEASURED * 13 / 10,
        "{local_ran:?}"
    );
    let both = common(&part.runs(0, from), &part.runs(1, from));
    assert!(both * 10 > part_ran * 4, "{both:?} of {part_ran:?}");
    let queues = table.queues();
    assert!(queues.iter().all(|queue| queue.load == 2), "{queues:?}");
    let gangs: Vec<_> = queues.iter().filter_map(|queue| queue.gang.as_deref()).collect();
    assert!(
        gangs.iter().all(|gang| *gang == "span"),
        "the other VM has no name: {gangs:?}"
    );

    // New windows of the same part are taken as they come; without any it is not chosen.
    let known = table.parts["span"].part.clone();
    table.set_parts(
        [(
            "span".to_owned(),
            parts::Part {
                windows: VmWindows::default(),
                ..known
            },
        )]
        .into(),
    );
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(SETTLING);
    let alone = local.ran(from).iter().sum::<Duration>();
    assert!(alone > from.elapsed() * 13 / 10, "{alone:?}");
    assert!(part.ran(from).iter().sum::<Duration>() < SETTLING / 4);
    table.set_parts(BTreeMap::new());
    assert!(table.parts.is_empty());
    table.end();
}

#[test]
fn idle_vcpus_of_a_part_leave_its_windows_to_others() {
    let mut table = drivers_on_two_cpus();
    let local = add(&mut table, 1, vcpus_of(2));
    let part = add_part(&mut table, half_of_each_frame());
    part.halt();
    std::thread::sleep(SETTLING);
    let from = Instant::now();
    std::thread::sleep(MEASURED);
    let alone: Duration = local.ran(from).iter().sum();
    assert!(alone > from.elapsed() * 17 / 10, "{alone:?}");
    table.end();
}

#[test]
fn part_on_cpus_of_no_driver_is_left_to_linux() {
    let mut table = drivers();
    let cpu = table.shared.host_cpus[0];
    for cpus in [[cpu, cpu], [cpu, usize::MAX]] {
        let vcpu = |(vcpu, cpu): (u8, usize)| SpanningVcpu {
            vcpu,
            cell: 0,
            cpu,
            shard_pid: 0,
            thread_id: 0,
        };
        let vcpus = (0..).zip(cpus).map(vcpu).collect();
        let windows = half_of_each_frame();
        table.add_part("span".to_owned(), parts::Part { vcpus, windows }, Fake::new(2));
        assert!(table.parts.is_empty(), "{cpus:?}");
    }
    table.end();
}
