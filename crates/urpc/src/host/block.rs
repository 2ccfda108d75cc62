//! Blocking, and what it costs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ring::{ASLEEP, Side};

/// How a side waits when polling was for nothing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Block {
    /// On a futex in the ring, by which the other side wakes it: within a host.
    Futex,
    /// By looking now and then: between hosts that share memory and nothing else.
    Nap,
}

/// How long a nap is at first, and at most: what a message may be late by.
const NAP_US: u64 = 50;
const NAP_US_MAX: u64 = 1000;

impl Block {
    /// Waits until woken, until `deadline`, or for no reason at all. `round` counts the calls for one wait.
    pub(super) fn wait(self, side: &Side, round: u32, deadline: Option<Instant>) {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match self {
            Self::Futex => futex_wait(side.word(), ASLEEP, left),
            Self::Nap => {
                let nap = Duration::from_micros((NAP_US << round.min(5)).min(NAP_US_MAX));
                thread::sleep(left.map_or(nap, |left| left.min(nap)));
            }
        }
    }

    /// Wakes the other side.
    pub(super) fn wake(self, side: &Side) {
        if self == Self::Futex {
            futex_wake(side.word());
        }
    }
}

fn futex_wait(word: &AtomicU32, expected: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word and the time live through the call. Every way it ends is looked at by the caller, who checks what it
    // waits for.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, limit) };
}

fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word lives through the call, which does not even read it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
}

/// What it costs here to block and be woken, in nanoseconds: the time of a message to a blocked thread. The median of some
/// tries, about a millisecond in all.
pub fn measure_block_ns() -> u64 {
    const TRIES: usize = 15;
    let word = AtomicU32::new(0);
    let mut times = [0; TRIES];
    thread::scope(|scope| {
        let start = Instant::now();
        let word = &word;
        let sleeper = scope.spawn(move || {
            let mut woken = [0; TRIES];
            for (round, at) in woken.iter_mut().enumerate() {
                while word.load(Ordering::Acquire) as usize == round {
                    futex_wait(word, round as u32, Some(Duration::from_millis(100)));
                }
                *at = start.elapsed().as_nanos() as u64;
            }
            woken
        });
        let mut sent = [0; TRIES];
        for (round, at) in sent.iter_mut().enumerate() {
            // Until it is blocked.
            thread::sleep(Duration::from_micros(60));
            *at = start.elapsed().as_nanos() as u64;
            word.store(round as u32 + 1, Ordering::Release);
            futex_wake(word);
        }
        let woken = sleeper.join().expect("the sleeper does not panic");
        for ((time, sent), woken) in times.iter_mut().zip(sent).zip(woken) {
            *time = woken.saturating_sub(sent);
        }
    });
    times.sort_unstable();
    times[TRIES / 2].max(1)
}
