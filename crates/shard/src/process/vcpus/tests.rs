//! Tests of orders to single vCPUs, with threads in the roles of vCPUs of a VM that spans cells.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::sandbox::ThreadKind;

const LIMIT: Duration = Duration::from_secs(20);
/// The shard of each vCPU; the tests' own is 0.
const SHARDS: [u8; 3] = [0, 0, 1];

/// The threads of one shard, whose vCPUs are halted.
struct HaltedShard {
    router: Arc<Router>,
    vcpus: VcpuThreads,
    ending: Arc<AtomicBool>,
}

impl HaltedShard {
    fn new(statistics: impl Fn(usize) -> io::Result<OwnedFd>) -> Self {
        kick::catch().unwrap();
        let router = Arc::new(Router::new(0, &SHARDS, vec![None, None], None));
        let ending = Arc::<AtomicBool>::default();
        let vcpu = |number: usize| {
            let stop = Arc::<VcpuStop>::default();
            let (router, ending, own) = (router.clone(), ending.clone(), stop.clone());
            let run = move |_: &_| {
                let vcpu = number as u8;
                let slot = router.event_slot(vcpu).unwrap();
                slot.attach();
                while !ending.load(Ordering::SeqCst) {
                    if own.is_wanted() {
                        let is_here = router.is_here(vcpu) == Some(true);
                        own.serve(is_here, || ending.load(Ordering::SeqCst));
                    } else {
                        slot.wait(None);
                    }
                }
                slot.detach();
            };
            VcpuThread {
                kind: ThreadKind::SpanVcpu,
                counters: Arc::default(),
                stop,
                statistics: statistics(number),
                run: Box::new(run),
            }
        };
        let threads = Threads::open();
        let vcpus = (0..SHARDS.len()).map(vcpu).collect();
        let vcpus = VcpuThreads::start(&threads, vcpus).unwrap();
        threads.seal_first().unwrap();
        Self {
            router,
            vcpus,
            ending,
        }
    }

    fn of_idle() -> Self {
        Self::new(|_| Err(io::ErrorKind::Unsupported.into()))
    }

    fn stop(&self, vcpu: u8, for_ms: u16) -> Answer {
        self.vcpus.obey_stop(vcpu, for_ms, Some(&self.router))
    }

    /// Waits until the stop of a vCPU has ended after its thread was parked.
    fn expect_stopped(&self, vcpu: usize) {
        let (stop, deadline) = (&self.vcpus.stops[vcpu], Instant::now() + LIMIT);
        while stop.is_wanted() || stop.stopped_ns() == 0 {
            assert!(Instant::now() < deadline, "vCPU {vcpu} is not parked: {stop:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for HaltedShard {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        self.router.end();
        self.vcpus.stop();
    }
}

fn refused(answer: Answer) -> String {
    match answer {
        Answer::Refused { why } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn halted_vcpu_of_a_spanning_vm_parks_and_goes_on_at_the_deadline() {
    let shard = HaltedShard::of_idle();
    for round in 1..=3 {
        assert_eq!(shard.stop(1, 20), Answer::Done);
        shard.expect_stopped(1);
        assert_eq!(shard.vcpus.stops[1].stops(), round);
    }
    assert_eq!(shard.vcpus.stops[0].stops(), 0, "the other vCPU");
}

#[test]
fn order_to_go_on_ends_the_stop_of_a_vcpu_of_a_spanning_vm() {
    let shard = HaltedShard::of_idle();
    // A vCPU may be late to park, but not to go on: then the stop is over before.
    assert_eq!(shard.stop(0, 100), Answer::Done);
    assert_eq!(shard.vcpus.obey_continue(0, Some(&shard.router)), Answer::Done);
    shard.expect_stopped(0);
    assert!(
        shard.vcpus.stops[0].stopped_ns() < 100_000_000,
        "{:?}",
        shard.vcpus.stops[0]
    );
}

#[test]
fn shard_refuses_to_stop_a_vcpu_that_it_does_not_have_and_changes_nothing() {
    let shard = HaltedShard::of_idle();
    let why = "vCPU 2 is not in this shard";
    assert_eq!(refused(shard.stop(2, 20)), why);
    assert_eq!(refused(shard.vcpus.obey_continue(2, Some(&shard.router))), why);
    for vcpu in [3, u8::MAX] {
        assert_eq!(
            refused(shard.stop(vcpu, 20)),
            format!("the VM has no vCPU {vcpu}")
        );
    }
    assert!(shard.vcpus.stops.iter().all(|stop| stop.stops() == 0));
    // The limits are those of a plain VM.
    assert!(refused(shard.stop(0, 101)).contains("1 to 100 ms at a time"));
    assert!(refused(shard.stop(0, 0)).contains("1 to 100 ms at a time"));
}

#[test]
fn files_of_statistics_are_passed_from_the_requested_vcpu_on_and_all_or_none() {
    let file = || Ok(OwnedFd::from(File::open("/dev/null").unwrap()));
    let passed = |shard: &HaltedShard, first| match shard.vcpus.pass_statistics(first) {
        Outcome::AnswerWithFiles(Answer::VcpuStatistics { files: named }, files) => {
            assert_eq!(usize::from(named), files.len());
            named
        }
        _ => panic!("no files"),
    };
    let shard = HaltedShard::new(|_| file());
    assert_eq!([0, 1, 3, 255].map(|first| passed(&shard, first)), [3, 2, 0, 0]);
    let shard = HaltedShard::new(|number| match number {
        1 => Err(io::ErrorKind::Unsupported.into()),
        _ => file(),
    });
    assert_eq!(passed(&shard, 0), 0);
}
