//! Nodes that are processes, over TCP on this host.
//!
//! The other processes are this test program again, asked for the test `being_another_node` alone.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsm::work::kernels::{self, Kernel};
use dsm::work::litmus::{self, Test};
use dsm::work::{Answer, Job, Order, Touch};
use dsm::{End, Means, Peer, Security, Session, Settings, Shape};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

mod support;

use support::{LIMIT, shape, within, word};

/// Says that this process is another node; with keys, their folder and its name.
const ROLE: &str = "DSM_TEST_NODE";
/// The memory that it shares with the others, if it does.
const MEMORY: &str = "DSM_TEST_MEMORY";
/// The one CPU that it uses, its lanes at real-time priority, if that is said.
const CPU: &str = "DSM_TEST_CPU";
const LISTENS: &str = "listens at ";

#[test]
fn being_another_node() {
    let Ok(role) = std::env::var(ROLE) else { return };
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).unwrap();
    let listener = dsm::listen("127.0.0.1:0").unwrap();
    println!("\n{LISTENS}{}", listener.local_addr().unwrap());
    let lost = |end: &End| {
        println!("lost: {end}");
        std::process::exit(3);
    };
    let cpu = std::env::var(CPU).ok().map(|cpu| cpu.parse().unwrap());
    let settings = cpu.map_or_else(Settings::default, sharing);
    cpu.inspect(|cpu| keep_to(*cpu));
    let memory = std::env::var_os(MEMORY).map(PathBuf::from);
    let means = Means {
        security: &security(&role, "east"),
        memory: memory.as_deref(),
    };
    dsm::serve(&listener, means, &settings, lost, |_| {}).unwrap();
}

/// Of a node that shares a CPU with others, as `mirrorball dsm bench` has them if there are more nodes than CPUs.
fn sharing(cpu: usize) -> Settings {
    Settings {
        cpus: vec![cpu],
        realtime: true,
        ahead: true,
        ..Settings::default()
    }
}

/// This thread, and those that it starts.
fn keep_to(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &set).unwrap();
}

fn security(keys: &str, name: &str) -> Security {
    if keys.is_empty() {
        return Security::Plain;
    }
    let identity = urpc::tls::Identity::load(Path::new(keys), name).unwrap();
    Security::Tls(Box::new(identity))
}

/// Other processes, which are ended with this.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Others {
    fn start(count: u16, keys: &str) -> (Self, Vec<Peer>) {
        Self::start_on(&vec![None; usize::from(count)], keys, None)
    }

    /// Each on the CPU that is said for it.
    fn start_on(cpus: &[Option<usize>], keys: &str, memory: Option<&Path>) -> (Self, Vec<Peer>) {
        let mut others = Self(Vec::new());
        let mut peers = Vec::new();
        for cpu in cpus {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "being_another_node", "--nocapture", "--test-threads=1"])
                .env(ROLE, keys)
                .envs(cpu.map(|cpu| (CPU, cpu.to_string())))
                .envs(memory.map(|memory| (MEMORY, memory)))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut output = BufReader::new(child.stdout.take().unwrap());
            let mut line = String::new();
            while !line.starts_with(LISTENS) {
                line.clear();
                assert!(
                    output.read_line(&mut line).unwrap() > 0,
                    "the other process ended"
                );
            }
            child.stdout = Some(output.into_inner());
            let name = if keys.is_empty() { "" } else { "east@" };
            peers.push(format!("{name}{}", line[LISTENS.len()..].trim()).parse().unwrap());
            others.0.push(child);
        }
        (others, peers)
    }

    /// All end by themselves, and well.
    fn end(mut self) {
        for child in &mut self.0 {
            let end = Instant::now() + Duration::from_secs(20);
            while child.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "another process does not end");
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(child.wait().unwrap().success());
        }
    }
}

fn lead(shape: Shape, peers: &[Peer], security: &Security, lost: fn(&End)) -> Session {
    Session::lead(shape, peers, security, &Settings::default(), lost).unwrap()
}

fn unexpected(end: &End) {
    eprintln!("lost: {end}");
    std::process::exit(4);
}

/// One memory at a time: a fault among ten busy processes on two CPUs takes many milliseconds.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does something with a memory of so many processes.
fn with_memory(shape: Shape, work: impl FnOnce(&Session) + Send + 'static) {
    let _alone = alone();
    within(LIMIT, move || {
        let (others, peers) = Others::start(shape.nodes - 1, "");
        let session = lead(shape, &peers, &Security::Plain, unexpected);
        work(&session);
        session.part();
        others.end();
    });
}

/// Each of three nodes adds to a word of a page for so long, and none of that is lost.
#[track_caller]
fn additions_count(session: &Session, page: u32, millis: u64) {
    let job = Job::Add { page, millis };
    let mut count = 0;
    for answer in session.all(&[job.clone(), job.clone(), job]).unwrap() {
        let Answer::Count(more) = answer else {
            panic!("{answer:?}")
        };
        assert!(more > 0, "a node never got the page");
        count += more;
    }
    assert_eq!(word(session.node(), page, 0).load(SeqCst), count);
}

#[test]
fn additions_of_all_processes_count() {
    with_memory(
        Shape {
            lanes: 2,
            ..shape(3, 64)
        },
        |session| {
            additions_count(session, 40, 100);
        },
    );
}

#[test]
fn each_kind_of_fault_sends_the_least() {
    const PAGES: u32 = 64;
    with_memory(shape(2, 2 * PAGES), |session| {
        // Node 1 manages the second half. Node, write, messages and pages sent for each page.
        for (step, (node, write, messages, pages)) in [
            (1, true, 0, 0),
            (0, false, 2, 1),
            (1, true, 2, 0),
            (0, true, 2, 1),
            (1, true, 2, 1),
            (0, false, 2, 1),
            (0, true, 2, 0),
            (0, true, 0, 0),
            (1, false, 2, 1),
        ]
        .into_iter()
        .enumerate()
        {
            let before = session.meter().unwrap();
            let touch = Touch {
                pages: PAGES..2 * PAGES,
                write,
                threads: 1,
                order: Order::Ascending,
            };
            session.one(node, Job::Touch(touch)).unwrap();
            let sent = session.meter().unwrap() - before;
            let all = u64::from(PAGES);
            assert_eq!(
                (sent.messages, sent.pages),
                (messages * all, pages * all),
                "step {step}"
            );
            assert_eq!(sent.bytes, (16 * messages + 4096 * pages) * all, "step {step}");
            let landed = if pages == 1 { all } else { 0 };
            assert_eq!(
                sent.landed, landed,
                "step {step}: bytes did not come straight to their place"
            );
        }
    });
}

/// As long as reads go on, a thread waits for the first page of each window, and for others that have been asked for already. What they cost
/// is the same.
#[test]
fn a_thread_that_reads_page_after_page_waits_for_few_of_them() {
    const PAGES: u32 = 1024;
    with_memory(shape(2, 2 * PAGES), |session| {
        let sum = (u64::from(PAGES)..2 * u64::from(PAGES)).sum::<u64>();
        for ahead in [false, true, false, true] {
            session.all(&vec![Job::Ahead(ahead); 2]).unwrap();
            let write = Touch {
                pages: PAGES..2 * PAGES,
                write: true,
                threads: 1,
                order: Order::Ascending,
            };
            session.one(1, Job::Touch(write.clone())).unwrap();
            let before = session.meter().unwrap();
            let answer = session.one(0, Job::Scan(PAGES..2 * PAGES)).unwrap();
            let sent = session.meter().unwrap() - before;
            assert!(
                matches!(answer, Answer::Scanned { sum: scanned, .. } if scanned == sum),
                "{answer:?}"
            );
            let all = u64::from(PAGES);
            // On a busy host a page may not have been used yet where it was written: who does not wait gets none.
            assert_eq!(
                (sent.messages, sent.pages),
                (2 * (all + sent.declined), all),
                "ahead {ahead}"
            );
            assert!(sent.declined <= all / 16, "ahead {ahead}: {sent:?}");
            let waits = sent.reads.count - sent.joined;
            assert_eq!(waits + sent.ahead, all, "ahead {ahead}: {sent:?}");
            let expected = if ahead { 1..=all / 8 } else { all..=all };
            assert!(expected.contains(&waits), "ahead {ahead}: {waits} waits");
            // Pages that came so go as any other.
            let before = session.meter().unwrap();
            session.one(1, Job::Touch(write)).unwrap();
            let sent = session.meter().unwrap() - before;
            assert_eq!((sent.messages, sent.invalidated), (2 * all, all), "ahead {ahead}");
        }
    });
}

/// Beyond what was written there is nothing to fetch: no copy is made of a page that nobody has written.
#[test]
fn what_nobody_has_written_is_not_fetched_ahead() {
    const PAGES: u32 = 256;
    with_memory(shape(2, 2 * PAGES), |session| {
        session.all(&vec![Job::Ahead(true); 2]).unwrap();
        let touch = |pages, write| Touch {
            pages,
            write,
            threads: 1,
            order: Order::Ascending,
        };
        // The manager's first writes take whole runs of pages along.
        session
            .one(1, Job::Touch(touch(PAGES..PAGES + 96, true)))
            .unwrap();
        session.one(0, Job::Scan(PAGES..PAGES + 96)).unwrap();
        let sent = session.meter().unwrap();
        assert_eq!(sent.pages, 96, "only what was written");
        assert!(sent.declined > 0, "{sent:?}");
        // So the manager still has them for itself, and without a message.
        session
            .one(1, Job::Touch(touch(PAGES + 96..2 * PAGES, true)))
            .unwrap();
        assert_eq!(session.meter().unwrap().messages, sent.messages);
    });
}

#[test]
fn memory_that_is_given_back_is_the_hosts_again_in_all_processes() {
    const PAGES: u32 = 1024;
    const BYTES: u64 = PAGES as u64 * 4096;
    let count = |answer: &Answer| match answer {
        Answer::Count(count) => *count,
        _ => panic!("{answer:?}"),
    };
    with_memory(shape(2, PAGES), move |session| {
        let touch = |node, write| {
            let touch = Touch {
                pages: 0..PAGES,
                write,
                threads: 1,
                order: Order::Ascending,
            };
            session.one(node, Job::Touch(touch)).unwrap();
        };
        // Both have memory for all of it, and node 1 owns it.
        touch(0, true);
        touch(1, true);
        let resident = || -> Vec<u64> {
            let answers = session.all(&[Job::Memory, Job::Memory]).unwrap();
            answers.iter().map(count).collect()
        };
        assert!(resident().iter().all(|bytes| *bytes >= BYTES), "{:?}", resident());
        for giver in [0, 1] {
            let before = session.meter().unwrap();
            let freed = session.one(giver, Job::Discard(0..PAGES)).unwrap();
            assert_eq!(count(&freed), u64::from(PAGES));
            let end = Instant::now() + Duration::from_secs(10);
            while resident().iter().any(|bytes| *bytes > 0) {
                assert!(Instant::now() < end, "{:?} bytes", resident());
                std::thread::sleep(Duration::from_millis(5));
            }
            let sent = session.meter().unwrap() - before;
            assert_eq!((sent.pages, sent.discarded), (0, u64::from(PAGES)));
            // Half are managed by who owns them. At first node 1 owns the other half, then node 0 has copies: two messages each.
            assert_eq!(sent.messages, u64::from(PAGES));
            // Zeroes, which are not sent either.
            touch(0, false);
            assert_eq!((session.meter().unwrap() - before).pages, 0);
            assert_eq!(word(session.node(), 5, 0).load(SeqCst), 0);
        }
    });
}

#[test]
fn memory_order_is_that_of_x86() {
    for (nodes, lanes) in [(2, 1), (3, 2)] {
        with_memory(
            Shape {
                lanes,
                ..shape(nodes, 256)
            },
            move |session| {
                let second = (0..256)
                    .find(|page| session.node().home(*page) == nodes - 1)
                    .unwrap();
                let ahead = Job::Ahead(lanes == 2);
                session.all(&vec![ahead; usize::from(nodes)]).unwrap();
                let mut batch = 1;
                for test in Test::ALL {
                    let run = litmus::Run {
                        test,
                        millis: 100,
                        first: 0,
                        second,
                        batch,
                        nodes,
                    };
                    let answers = session.all(&vec![Job::Litmus(run); usize::from(nodes)]).unwrap();
                    let Answer::Litmus(tally) = answers[0] else {
                        panic!("{answers:?}")
                    };
                    assert_eq!(tally.forbidden, 0, "{test:?} {tally:?}");
                    assert!(tally.ordinary > 0, "{test:?} {tally:?}");
                    batch = tally.batches;
                }
            },
        );
    }
}

#[test]
fn programs_give_on_two_nodes_what_they_give_on_one() {
    let sizes = [
        (Kernel::Sor, 96),
        (Kernel::Sort, 64),
        (Kernel::Matrix, 96),
        (Kernel::Tsp, 9),
    ];
    let pages: u32 = sizes.iter().map(|(kernel, size)| 2 * kernel.pages(*size)).sum();
    with_memory(
        Shape {
            migratory: true,
            ..shape(2, pages)
        },
        move |session| {
            session.all(&vec![Job::Ahead(true); 2]).unwrap();
            let mut first = 0;
            for (kernel, size) in sizes {
                let sums = [1, 2].map(|nodes| {
                    let run = kernels::Run {
                        kernel,
                        size,
                        nodes,
                        first,
                        phases: false,
                    };
                    first += kernel.pages(size);
                    let answers = session.all(&vec![Job::Kernel(run); 2]).unwrap();
                    let Answer::Kernel { sum, .. } = answers[0] else {
                        panic!("{answers:?}")
                    };
                    sum
                });
                assert_eq!(sums[0], sums[1], "{kernel:?}");
                assert_ne!(sums[0], 0, "{kernel:?}");
            }
        },
    );
}

/// Lanes at real-time priority on a CPU that they share must leave it to the threads whose pages they hold. While they looked at these each 5 us,
/// this took half a minute or more, and larger programs did not end within minutes; it takes 2 s. Where real-time priority is refused it shows nothing.
#[test]
fn four_nodes_on_two_cpus_end() {
    const NODES: u16 = 4;
    const PROGRAMS: [(Kernel, u32); 4] = [
        (Kernel::Sor, 256),
        (Kernel::Sort, 256),
        (Kernel::Matrix, 128),
        (Kernel::Tsp, 9),
    ];
    let _alone = alone();
    within(Duration::from_secs(20), || {
        let usable = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let usable: Vec<usize> = (0..CpuSet::count())
            .filter(|cpu| usable.is_set(*cpu).unwrap())
            .take(2)
            .collect();
        let share = |node: u16| usable[usize::from(node) % usable.len()];
        keep_to(share(0));
        let cpus: Vec<_> = (1..NODES).map(|node| Some(share(node))).collect();
        let (others, peers) = Others::start_on(&cpus, "", None);
        let pages = PROGRAMS.map(|(kernel, size)| kernel.pages(size));
        let pages = pages.into_iter().max().unwrap();
        let security = Security::Plain;
        let session = Session::lead(
            shape(NODES, pages),
            &peers,
            &security,
            &sharing(share(0)),
            unexpected,
        )
        .unwrap();
        for (kernel, size) in PROGRAMS {
            let sums = [1, NODES].map(|nodes| {
                let run = kernels::Run {
                    kernel,
                    size,
                    nodes,
                    first: 0,
                    phases: false,
                };
                let answers = session.all(&vec![Job::Kernel(run); usize::from(nodes)]).unwrap();
                let Answer::Kernel { sum, .. } = answers[0] else {
                    panic!("{answers:?}")
                };
                sum
            });
            assert_eq!(sums[0], sums[1], "{kernel:?}");
            assert_ne!(sums[0], 0, "{kernel:?}");
        }
        session.part();
        others.end();
    });
}

#[test]
fn programs_tell_what_each_node_waited_for_in_each_phase() {
    let (size, sort_size) = (96, 64);
    let pages = Kernel::Sor.pages(size).max(Kernel::Sort.pages(sort_size));
    with_memory(shape(2, pages), move |session| {
        let run = |kernel, size, nodes| {
            let run = kernels::Run {
                kernel,
                size,
                nodes,
                first: 0,
                phases: true,
            };
            let answers = session.all(&vec![Job::Kernel(run); usize::from(nodes)]).unwrap();
            let figures = answers.into_iter().map(|answer| match answer {
                Answer::Kernel { figures, .. } => figures,
                answer => panic!("{answer:?}"),
            });
            figures.collect::<Vec<_>>()
        };
        let waits = |part: &kernels::Part| part.reads + part.writes + part.upgrades;
        // On one node nobody waits: what a program starts from is where it is used.
        let alone = run(Kernel::Sor, size, 1).remove(0);
        assert!(
            alone.phases.iter().all(|phase| waits(&phase.together) == 0),
            "{alone:?}"
        );
        assert!(
            alone.phases.iter().any(|phase| phase.together.cpu_ns > 0),
            "{alone:?}"
        );
        // Each half turn of 40 needs the other's row, and they meet after it.
        for figures in run(Kernel::Sor, size, 2) {
            assert_eq!(figures.phases.len(), 40, "{figures:?}");
            let told: u64 = figures.phases.iter().map(|phase| waits(&phase.together)).sum();
            let meter = figures.meter;
            let counted = meter.reads.count + meter.writes.count + meter.upgrades.count;
            assert!((40..=counted).contains(&told), "{figures:?}");
        }
        // The table's 32 pages go from one to the other in each of ten turns, and whoever has the lock waits for them. The last may
        // have them still.
        let turns: u64 = run(Kernel::Sort, sort_size, 2)
            .iter()
            .flat_map(|figures| &figures.phases)
            .map(|phase| waits(&phase.in_turn))
            .sum();
        assert!(turns > 5 * 32, "{turns}");
    });
}

#[test]
fn with_keys_everything_goes_by_tls_and_strangers_are_refused() {
    let _alone = alone();
    within(LIMIT, || {
        let folder = tempfile::tempdir().unwrap();
        let keys = folder.path().join("keys");
        urpc::tls::make(&keys, ["west", "east"]).unwrap();
        let keys = keys.to_str().unwrap().to_owned();
        let (others, peers) = Others::start(1, &keys);
        // Without a key nobody is let in, and the one with a key still is.
        let stranger = Peer {
            name: None,
            ..peers[0].clone()
        };
        assert!(
            Session::lead(
                shape(2, 8),
                &[stranger],
                &Security::Plain,
                &Settings::default(),
                unexpected
            )
            .is_err()
        );
        let session = lead(shape(2, 8), &peers, &security(&keys, "west"), unexpected);
        let job = Job::Add { page: 7, millis: 50 };
        let answers = session.all(&[job.clone(), job]).unwrap();
        let counts = answers.iter().map(|answer| match answer {
            Answer::Count(count) => *count,
            _ => panic!("{answer:?}"),
        });
        assert_eq!(word(session.node(), 7, 0).load(SeqCst), counts.sum::<u64>());
        session.part();
        others.end();
    });
}

#[test]
fn a_node_that_dies_is_named_by_all_others() {
    static LOST: Mutex<Option<String>> = Mutex::new(None);
    let _alone = alone();
    within(LIMIT, || {
        let (mut others, peers) = Others::start(2, "");
        let dead = format!("node 1 ({}) is gone", peers[0].address);
        let session = lead(shape(3, 16), &peers, &Security::Plain, |end| {
            *LOST.lock().unwrap() = Some(end.to_string());
        });
        others.0[0].kill().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while LOST.lock().unwrap().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reason = LOST.lock().unwrap().clone().expect("node 0 noticed nothing");
        assert!(reason.starts_with(&dead), "{reason}");
        // Node 2 ends too, and says why.
        let mut said = String::new();
        others.0[1]
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        assert!(said.contains(&format!("lost: {dead}")), "{said}");
        assert_eq!(others.0[1].wait().unwrap().code(), Some(3));
        drop(session);
    });
}

/// Three processes whose lanes poll a while and then sleep.
#[test]
fn additions_of_all_processes_count_by_shared_memory_until_one_of_them_dies() {
    static LOST: Mutex<Option<String>> = Mutex::new(None);
    let _alone = alone();
    within(LIMIT, || {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = folder.path().join("memory");
        let (mut others, peers) = Others::start_on(&[None; 2], "", Some(&memory));
        let means = Means {
            security: &Security::Plain,
            memory: Some(&memory),
        };
        let shape = Shape {
            lanes: 2,
            ..shape(3, 64)
        };
        let lost = |end: &End| *LOST.lock().unwrap() = Some(end.to_string());
        let session = Session::lead(shape, &peers, means, &Settings::default(), lost).unwrap();
        for page in [40, 3] {
            additions_count(&session, page, 300);
        }
        others.0[1].kill().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while LOST.lock().unwrap().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let reason = LOST.lock().unwrap().clone().expect("node 0 noticed nothing");
        assert!(
            reason.starts_with(&format!("node 2 ({}) is gone", peers[1].address)),
            "{reason}"
        );
        drop(session);
    });
}

#[test]
fn memory_that_is_not_all_nodes_is_refused() {
    let _alone = alone();
    within(LIMIT, || {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let [memory, other] = ["memory", "other"].map(|name| folder.path().join(name));
        for theirs in [None, Some(&other)] {
            let (_others, peers) = Others::start_on(&[None], "", theirs.map(PathBuf::as_path));
            let means = Means {
                security: &Security::Plain,
                memory: Some(&memory),
            };
            let met = Session::lead(shape(2, 8), &peers, means, &Settings::default(), unexpected);
            assert!(met.is_err(), "{theirs:?}");
        }
    });
}

#[test]
fn a_node_that_does_not_exist_is_an_error() {
    let nobody: Peer = "127.0.0.1:1".parse().unwrap();
    let error = Session::lead(
        shape(2, 8),
        &[nobody],
        &Security::Plain,
        &Settings::default(),
        unexpected,
    )
    .unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}
