//! Blocking, and the measurement of its cost.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::ring::{ASLEEP, Side};

/// How a side blocks after polling without success.
#[derive(Clone, Debug)]
pub enum Block {
    /// Waits on a futex in the ring: within a host.
    Futex,
    /// Waits on a doorbell in this process, which the other side rings over its own transport: between hosts,
    /// whose kernels share no futex.
    Doorbell(Arc<Doorbell>),
}

impl Block {
    /// Waits until woken or until `deadline`; may also return spuriously.
    pub(super) fn wait(&self, side: &Side, deadline: Option<Instant>) {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match self {
            Self::Futex => futex_wait(side.word(), ASLEEP, left),
            Self::Doorbell(doorbell) => doorbell.wait(side, left),
        }
    }

    /// Wakes the other side.
    pub(super) fn wake(&self, side: &Side) {
        match self {
            Self::Futex => futex_wake(side.word(), 1),
            Self::Doorbell(doorbell) => (doorbell.call)(),
        }
    }
}

/// Doorbell that wakes both sides of all channels between this process and one of another host.
pub struct Doorbell {
    /// Number of rings; the futex of the waiters.
    rung: AtomicU32,
    /// Rings the other side's doorbell.
    call: Box<dyn Fn() + Send + Sync>,
}

impl Doorbell {
    /// Creates a doorbell. `call` makes the other side call its own [`Doorbell::ring`] soon. Any thread may
    /// call it, also spuriously.
    pub fn new(call: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            rung: AtomicU32::new(0),
            call: Box::new(call),
        }
    }

    /// Wakes all waiters: the other side has rung, or is gone.
    pub fn ring(&self) {
        self.rung.fetch_add(1, Ordering::Release);
        futex_wake(&self.rung, i32::MAX);
    }

    fn wait(&self, side: &Side, left: Option<Duration>) {
        let before = self.rung.load(Ordering::Acquire);
        // The caller first clears this side's sleep flag in the ring. So either the flag is clear here, or
        // the doorbell rings after this check.
        if side.word().load(Ordering::Acquire) == ASLEEP {
            futex_wait(&self.rung, before, left);
        }
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Doorbell")
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
    // SAFETY: the word and the time live through the call. Every way it ends is looked at by the caller, who
    // checks what it waits for.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, limit) };
}

fn futex_wake(word: &AtomicU32, sleepers: i32) {
    // SAFETY: the word lives through the call, which does not even read it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, sleepers) };
}

/// Measures the cost of blocking and being woken on this host, in nanoseconds: the time of a message to a
/// blocked thread on another CPU. The result is the lower quartile of 15 tries, since other load only adds
/// time. Takes a few milliseconds.
///
/// Unpinned threads would yield another figure: the scheduler wakes a thread on the waker's CPU, which is
/// about to sleep itself. In a virtual machine this costs a twentieth of a wake-up on another CPU, as
/// messages between cells need. Two peers that poll for so short a time always block before the other's reply
/// arrives.
pub fn measure_block_ns() -> u64 {
    const TRIES: usize = 15;
    let [sleeping_on, waking_on] = far_cpus();
    let word = AtomicU32::new(0);
    let mut times = thread::scope(|scope| {
        let start = Instant::now();
        let word = &word;
        let sleeper = scope.spawn(move || {
            keep_to(sleeping_on);
            let mut woken = [0; TRIES];
            for (round, at) in (0..).zip(&mut woken) {
                while word.load(Ordering::Acquire) == round {
                    futex_wait(word, round, Some(Duration::from_millis(100)));
                }
                *at = start.elapsed().as_nanos() as u64;
            }
            woken
        });
        // A separate thread, since the caller's CPU affinity must not change.
        let waker = scope.spawn(move || {
            keep_to(waking_on);
            let mut sent = [0; TRIES];
            for (round, at) in (0..).zip(&mut sent) {
                // Until it is blocked.
                thread::sleep(Duration::from_micros(60));
                *at = start.elapsed().as_nanos() as u64;
                word.store(round + 1, Ordering::Release);
                futex_wake(word, 1);
            }
            sent
        });
        let mut times = sleeper.join().expect("the sleeper does not panic");
        let sent: [u64; TRIES] = waker.join().expect("the waker does not panic");
        for (time, sent) in times.iter_mut().zip(sent) {
            *time = time.saturating_sub(sent);
        }
        times
    });
    times.sort_unstable();
    times[TRIES / 4].max(1)
}

/// Returns the first and the last CPU that the caller may use, which are seldom of one core; `None` if it may
/// use only one.
fn far_cpus() -> [Option<usize>; 2] {
    let mine = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let mut usable = (0..CpuSet::count()).filter(|cpu| mine.is_set(*cpu).unwrap_or(false));
    usable
        .next()
        .zip(usable.next_back())
        .map_or([None; 2], |(first, last)| [Some(first), Some(last)])
}

/// Pins the calling thread to a CPU. On failure the measurement is only less certain.
fn keep_to(cpu: Option<usize>) {
    let Some(cpu) = cpu else { return };
    let mut one = CpuSet::new();
    if one.set(cpu).is_ok() {
        let _ = sched_setaffinity(Pid::from_raw(0), &one);
    }
}
