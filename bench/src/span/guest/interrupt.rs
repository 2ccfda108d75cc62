//! Interrupts between CPUs, by `membarrier`: it interrupts every other CPU that runs a thread of this
//! process, and waits until each has answered.

use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::cpu::pin;
use nix::errno::Errno;

use crate::each_after_ns;

/// From linux/membarrier.h.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
/// Work of each CPU between two interrupts of a storm: they should hit running code.
const STORM_PAUSE: u32 = 200;

fn membarrier(command: libc::c_int) -> Outcome<()> {
    // SAFETY: takes numbers only.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    Errno::result(result)?;
    Ok(())
}

/// Time of an interrupt of `there` by `here` and its answer, nanoseconds. A thread that does not run is not
/// interrupted, so each time begins when the one on `there` has just been seen to run.
pub fn round_trip(here: usize, there: usize) -> Outcome<f64> {
    membarrier(REGISTER_PRIVATE_EXPEDITED)?;
    let (rounds, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let runner = scope.spawn(|| {
            let pinned = pin(there).map_err(|error| error.to_string());
            while !over.load(Ordering::Relaxed) {
                rounds.fetch_add(1, Ordering::Relaxed);
                std::hint::spin_loop();
            }
            pinned
        });
        let runs = || {
            let seen = rounds.load(Ordering::Relaxed);
            while rounds.load(Ordering::Relaxed) == seen {
                std::hint::spin_loop();
            }
        };
        let measured = pin(here).and_then(|()| each_after_ns(runs, || membarrier(PRIVATE_EXPEDITED)));
        over.store(true, Ordering::Relaxed);
        runner.join().map_err(|_| "a thread panicked")??;
        measured
    })
}

/// Has every CPU interrupt all others until standard input ends; returns the number of one CPU's interrupts.
pub fn storm(limit: Duration) -> Outcome<usize> {
    membarrier(REGISTER_PRIVATE_EXPEDITED)?;
    let (over, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    let blow = |cpu| {
        pin(cpu)?;
        let end = Instant::now() + limit;
        while !over.load(Ordering::Relaxed) && Instant::now() < end {
            membarrier(PRIVATE_EXPEDITED)?;
            sent.fetch_add(1, Ordering::Relaxed);
            (0..STORM_PAUSE).for_each(|_| std::hint::spin_loop());
        }
        Ok(())
    };
    let cpus = thread::available_parallelism()?.get();
    thread::scope(|scope| {
        let all: Vec<_> = (0..cpus)
            .map(|cpu| {
                scope.spawn(move || -> Result<(), String> {
                    blow(cpu).map_err(|error: Box<dyn std::error::Error>| error.to_string())
                })
            })
            .collect();
        println!("storm");
        // An end or an error: the other side is gone.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        over.store(true, Ordering::Relaxed);
        for one in all {
            one.join().map_err(|_| "a thread panicked")??;
        }
        Ok(sent.load(Ordering::Relaxed))
    })
}
