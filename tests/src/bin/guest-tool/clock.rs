//! Checks that time does not go back from one CPU to another.
//!
//! Threads, one on each CPU, hand a baton round in random order. Its holder reads the time stamp and the
//! clock, and neither may be less than the values that the previous holder read just before it let go.

use std::arch::x86_64::{_mm_lfence, _rdtsc};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;

use guest_tests::pattern::Numbers;

use crate::Fault;
use crate::pinned::{alarm_after, pin, sleep_while, wake};

/// Turns of a look at the baton before its thread sleeps: others may need this CPU, in a lab host for
/// instance.
const LOOKS: u32 = 2000;
/// Time limit of the program, which a lost baton would exceed.
const LIMIT_S: u64 = 120;

/// The state that the threads hand on. The last hand-over ends all of them.
struct Baton {
    /// For each CPU, how often it was given the baton.
    given: Vec<AtomicU32>,
    tsc: AtomicU64,
    clock_ns: AtomicU64,
    left: AtomicU64,
}

/// Counts of a thread.
#[derive(Default)]
struct Seen {
    tsc_back: u64,
    clock_back: u64,
    pairs: BTreeSet<(usize, usize)>,
}

/// Makes `count` hand-overs between CPUs 0 to `cpus` - 1.
pub fn hand_over(cpus: usize, count: u64) -> Result<String, Fault> {
    alarm_after(LIMIT_S);
    if cpus < 2 {
        return Err("one CPU has no other to hand over to".into());
    }
    let baton = Baton {
        given: (0..cpus).map(|_| AtomicU32::new(0)).collect(),
        tsc: AtomicU64::new(0),
        clock_ns: AtomicU64::new(0),
        left: AtomicU64::new(count),
    };
    baton.given[0].store(1, Ordering::Release);
    let seen: Vec<Seen> = thread::scope(|scope| {
        let baton = &baton;
        let threads: Vec<_> = (0..cpus)
            .map(|cpu| scope.spawn(move || carry(baton, cpu)))
            .collect();
        let results = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
        results.collect::<Result<_, String>>()
    })?;
    let sum = |of: fn(&Seen) -> u64| seen.iter().map(of).sum::<u64>();
    let pairs: BTreeSet<_> = seen.iter().flat_map(|seen| &seen.pairs).collect();
    let (tsc_back, clock_back) = (sum(|seen| seen.tsc_back), sum(|seen| seen.clock_back));
    let said = format!(
        "handovers={count} pairs={} tsc_back={tsc_back} clock_back={clock_back}",
        pairs.len()
    );
    if tsc_back + clock_back > 0 {
        return Err(said.into());
    }
    Ok(said)
}

fn carry(baton: &Baton, me: usize) -> Result<Seen, String> {
    pin(me)?;
    let mut seen = Seen::default();
    let mut numbers = Numbers::new(me as u64);
    for turn in 1.. {
        let given = &baton.given[me];
        let mut looks = 0;
        while given.load(Ordering::Acquire) < turn {
            looks += 1;
            if looks > LOOKS {
                sleep_while(given, turn - 1);
            }
            std::hint::spin_loop();
        }
        let (tsc, clock_ns) = (tsc(), clock_ns());
        seen.tsc_back += u64::from(tsc < baton.tsc.load(Ordering::Relaxed));
        seen.clock_back += u64::from(clock_ns < baton.clock_ns.load(Ordering::Relaxed));
        let left = baton.left.load(Ordering::Relaxed);
        if left == 0 {
            // Passes the end on to a thread that has not received it.
            let next = (me + 1) % baton.given.len();
            give(baton, next);
            return Ok(seen);
        }
        baton.left.store(left - 1, Ordering::Relaxed);
        let next = (me + 1 + numbers.below(baton.given.len() as u64 - 1) as usize) % baton.given.len();
        seen.pairs.insert((me, next));
        give(baton, next);
    }
    Ok(seen)
}

fn give(baton: &Baton, next: usize) {
    baton.clock_ns.store(clock_ns(), Ordering::Relaxed);
    baton.tsc.store(tsc(), Ordering::Relaxed);
    baton.given[next].fetch_add(1, Ordering::Release);
    wake(&baton.given[next]);
}

fn tsc() -> u64 {
    // SAFETY: reads a counter, after all earlier reads.
    unsafe {
        _mm_lfence();
        _rdtsc()
    }
}

fn clock_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec. Every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
