use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier};
use std::thread;

use super::*;

const KHZ: u32 = 2_000_000;
/// Longer than any thread of these tests stays inside.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// vCPUs exchange their readings through memory as fast as they can. No vCPU receives a larger value than it
/// reads itself, however many steps are made meanwhile.
#[test]
fn tsc_is_causal_across_vcpus_during_steps() {
    const VCPUS: usize = 4;
    const STEPS: u64 = 2_000;
    let barrier = Arc::new(TscStepBarrier::new(0, KHZ));
    let (latest, kicked) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let over = Arc::new(AtomicBool::new(false));
    // On a busy machine a thread may start after the last step.
    let all_started = Arc::new(Barrier::new(VCPUS + 1));
    let vcpus: Vec<_> = (0..VCPUS)
        .map(|_| {
            let (barrier, latest) = (barrier.clone(), latest.clone());
            let (kicked, over) = (kicked.clone(), over.clone());
            let all_started = all_started.clone();
            thread::spawn(move || {
                let mut entries = 0_u64;
                all_started.wait();
                while !over.load(Ordering::SeqCst) {
                    let Some(offset) = barrier.enter() else {
                        continue;
                    };
                    entries += 1;
                    // In the guest, until it is kicked or exits by itself.
                    for _ in 0..50 {
                        let before = latest.fetch_max(offset, Ordering::SeqCst);
                        assert!(before <= offset, "received {before}, reads {offset}");
                        if kicked.load(Ordering::SeqCst) {
                            break;
                        }
                    }
                    barrier.leave();
                }
                entries
            })
        })
        .collect();
    all_started.wait();
    for step in 1..=STEPS {
        let call = || kicked.store(true, Ordering::SeqCst);
        barrier
            .step(step * 100, TEST_TIMEOUT, call)
            .expect("it goes forward");
        kicked.store(false, Ordering::SeqCst);
        thread::yield_now();
    }
    over.store(true, Ordering::SeqCst);
    let entries = vcpus
        .into_iter()
        .map(|vcpu| vcpu.join().expect("no vCPU reads less than it received"));
    assert!(entries.sum::<u64>() > 0, "no vCPU entered");
    assert_eq!(barrier.offset(), STEPS * 100);
    assert_eq!(
        barrier.steps(),
        Steps {
            count: STEPS,
            late: 0
        }
    );
}

/// A step does not wait for a vCPU that the kernel keeps, which has the right offset on its next entry.
#[test]
fn vcpu_stuck_in_the_kernel_does_not_block_a_step() {
    let barrier = TscStepBarrier::new(5, KHZ);
    assert_eq!(barrier.enter(), Some(5));
    barrier.step(9, EXIT_TIMEOUT, || ()).expect("it goes forward");
    assert_eq!(barrier.enter(), Some(9));
    barrier.leave();
    barrier.leave();
    assert_eq!(barrier.enter(), Some(9));
    assert_eq!(barrier.steps(), Steps { count: 1, late: 1 });
}

#[test]
fn backward_or_oversized_step_is_refused() {
    let barrier = TscStepBarrier::new(10, KHZ);
    let step = |offset| barrier.step(offset, EXIT_TIMEOUT, || panic!("no vCPU is kicked"));
    assert_eq!(step(10), Ok(()));
    let back = step(9).expect_err("backwards");
    assert_eq!(
        back.to_string(),
        "a step of the guest's clock by -1 ticks goes backward or further than 20 s; the step is refused"
    );
    let ticks_max = 20 * 1_000 * u64::from(KHZ);
    assert_eq!(step(11 + ticks_max), Err(StepError::Far(ticks_max as i64 + 1)));
    assert_eq!(barrier.offset(), 10);
    // Offsets wrap.
    let barrier = TscStepBarrier::new(u64::MAX, KHZ);
    barrier.step(4, EXIT_TIMEOUT, || ()).expect("forward by five");
    barrier
        .step(4 + ticks_max, EXIT_TIMEOUT, || ())
        .expect("as far as it may");
    assert_eq!(barrier.offset(), 4 + ticks_max);
}
