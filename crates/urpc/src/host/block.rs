//! Blocking, and what it costs.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ring::{ASLEEP, Side};

/// How a side waits when polling was for nothing.
#[derive(Clone, Debug)]
pub enum Block {
    /// On a futex in the ring, by which the other side wakes it: within a host.
    Futex,
    /// On a bell in this process, which the other side has rung over a way of its own: between hosts, whose kernels share no
    /// futex.
    Bell(Arc<Bell>),
}

impl Block {
    /// Waits until woken, until `deadline`, or for no reason at all.
    pub(super) fn wait(&self, side: &Side, deadline: Option<Instant>) {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match self {
            Self::Futex => futex_wait(side.word(), ASLEEP, left),
            Self::Bell(bell) => bell.wait(side, left),
        }
    }

    /// Wakes the other side.
    pub(super) fn wake(&self, side: &Side) {
        match self {
            Self::Futex => futex_wake(side.word(), 1),
            Self::Bell(bell) => (bell.call)(),
        }
    }
}

/// What wakes both sides of the channels that one process has with one of another host.
pub struct Bell {
    /// How often it was rung; the futex of whoever waits.
    rung: AtomicU32,
    /// Has the other side's bell rung.
    call: Box<dyn Fn() + Send + Sync>,
}

impl Bell {
    /// `call` has the other side call [`Bell::ring`] of its own, soon. It may be called by any thread, and for nothing.
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            rung: AtomicU32::new(0),
            call: Box::new(call),
        }
    }

    /// The other side has called, or is gone.
    pub fn ring(&self) {
        self.rung.fetch_add(1, Ordering::Release);
        futex_wake(&self.rung, i32::MAX);
    }

    fn wait(&self, side: &Side, left: Option<Duration>) {
        let before = self.rung.load(Ordering::Acquire);
        // Who calls says first, in the ring, that this side is no longer asleep. So either that shows here, or the bell
        // rings after the look at it.
        if side.word().load(Ordering::Acquire) == ASLEEP {
            futex_wait(&self.rung, before, left);
        }
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Bell")
            .field("rung", &self.rung)
            .finish_non_exhaustive()
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

fn futex_wake(word: &AtomicU32, sleepers: i32) {
    // SAFETY: the word lives through the call, which does not even read it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, sleepers) };
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
            futex_wake(word, 1);
        }
        let woken = sleeper.join().expect("the sleeper does not panic");
        for ((time, sent), woken) in times.iter_mut().zip(sent).zip(woken) {
            *time = woken.saturating_sub(sent);
        }
    });
    times.sort_unstable();
    times[TRIES / 2].max(1)
}
