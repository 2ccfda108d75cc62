//! Nodes that are processes, over TCP on this host.
//!
//! The other processes are this test program again, which runs the test `being_another_node` alone.

use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dsm::{End, Settings, Shape};
use dsm_bench::work::kernels::{self, Kernel};
use dsm_bench::work::litmus::{self, Test};
use dsm_bench::work::{AccessOrder, Job, JobResult, Touch};
use dsm_bench::{Peer, Security, Session, StreamOptions};
use locks::IgnorePoison;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

mod ends;
mod pages;
mod programs;
#[path = "../../../dsm/tests/support/mod.rs"]
mod support;

use support::{LIMIT, shape, within, word};

/// Set in a process that is another node; with keys, their folder and its name.
const ROLE: &str = "DSM_TEST_NODE";
/// File of the memory that it shares with the others, if it does.
const MEMORY: &str = "DSM_TEST_MEMORY";
/// The CPU that it uses, with page servers at real-time priority, if set.
const CPU: &str = "DSM_TEST_CPU";
const LISTENS: &str = "listens at ";

#[test]
fn being_another_node() {
    let Ok(role) = std::env::var(ROLE) else { return };
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).unwrap();
    let listener = dsm_bench::listen("127.0.0.1:0").unwrap();
    println!("\n{LISTENS}{}", listener.local_addr().unwrap());
    let lost = |end: &End| {
        println!("lost: {end}");
        std::process::exit(3);
    };
    let cpu = std::env::var(CPU).ok().map(|cpu| cpu.parse().unwrap());
    let settings = cpu.map_or_else(Settings::default, sharing);
    cpu.inspect(|cpu| keep_to(*cpu));
    let memory = std::env::var_os(MEMORY).map(PathBuf::from);
    let options = StreamOptions {
        security: &security(&role, "east"),
        memory: memory.as_deref(),
    };
    dsm_bench::serve(&listener, options, &settings, lost, |_| {}).unwrap();
}

/// Settings of a node that shares a CPU with others, as `mirrorball dsm bench` has them if there are more
/// nodes than CPUs.
fn sharing(cpu: usize) -> Settings {
    Settings {
        cpus: vec![cpu],
        realtime: true,
        ahead: true,
        ..Settings::default()
    }
}

/// Pins this thread, and those that it starts.
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

/// Processes of other nodes. Dropping it ends them.
struct ChildNodes(Vec<Child>);

impl Drop for ChildNodes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl ChildNodes {
    fn start(count: u16, keys: &str) -> (Self, Vec<Peer>) {
        Self::start_on(&vec![None; usize::from(count)], keys, None)
    }

    /// Starts each node on its CPU, if it has one.
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

    /// Checks that all end by themselves without an error.
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
    Session::coordinate(shape, peers, security, &Settings::default(), lost).unwrap()
}

fn unexpected(end: &End) {
    eprintln!("lost: {end}");
    std::process::exit(4);
}

/// One memory at a time: a fault among ten busy processes on two CPUs takes many milliseconds.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().ignore_poison()
}

/// Runs `work` with a memory of several processes.
fn with_memory(shape: Shape, work: impl FnOnce(&Session) + Send + 'static) {
    let _alone = alone();
    within(LIMIT, move || {
        let (others, peers) = ChildNodes::start(shape.nodes - 1, "");
        let session = lead(shape, &peers, &Security::Plain, unexpected);
        work(&session);
        session.close();
        others.end();
    });
}

/// Each of three nodes adds to a word of a page for a while, and no addition is lost.
#[track_caller]
fn additions_count(session: &Session, page: u32, millis: u64) {
    let job = Job::Add { page, millis };
    let mut count = 0;
    for answer in session.run_all(&[job.clone(), job.clone(), job]).unwrap() {
        let JobResult::Count(more) = answer else {
            panic!("{answer:?}")
        };
        assert!(more > 0, "a node never got the page");
        count += more;
    }
    assert_eq!(word(session.node(), page, 0).load(SeqCst), count);
}
