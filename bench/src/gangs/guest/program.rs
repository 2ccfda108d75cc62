//! The work of a round, and the wait for the other worker.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use crate::spin_barrier::SpinBarrier;

/// Number of workers, each on a CPU of its own.
pub const WORKERS: usize = 2;
/// Time of a round's work on a CPU without competition (ours).
const ROUND: Duration = Duration::from_micros(100);
/// Least time of a calibration, and number of its repetitions, of which the fastest counts: other VMs and
/// interrupts only make one slower.
const CALIBRATION: Duration = Duration::from_millis(20);
const CALIBRATIONS: usize = 9;

/// A program of two workers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    /// Computes between barriers that spin in user space. No lock of the guest's kernel is involved.
    Spin,
    /// Computes between barriers that sleep in the kernel (futex).
    Sleep,
    /// Takes one spin lock of the guest's kernel all the time, without barriers.
    Lock,
}

/// Memory that the workers have in common.
pub struct Common {
    spin: SpinBarrier,
    sleep: Barrier,
    /// Its value is never the one that is waited for, and both workers use its lock in the kernel.
    futex: AtomicU32,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            spin: SpinBarrier::new(WORKERS as u32),
            sleep: Barrier::new(WORKERS),
            futex: AtomicU32::new(0),
        }
    }
}

impl Program {
    /// The program of a name on the command line.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "spin" => Some(Self::Spin),
            "sleep" => Some(Self::Sleep),
            "lock" => Some(Self::Lock),
            _ => None,
        }
    }

    /// Runs a round of one worker.
    pub fn run_round(self, work: u64, common: &Common) {
        self.work(work, common);
        match self {
            Self::Spin => common.spin.wait(),
            Self::Sleep => {
                common.sleep.wait();
            }
            Self::Lock => {}
        }
    }

    fn work(self, amount: u64, common: &Common) {
        match self {
            Self::Spin | Self::Sleep => compute(amount),
            Self::Lock => (0..amount).for_each(|_| use_kernel_lock(&common.futex)),
        }
    }

    /// The amount of work that takes [`ROUND`] on a CPU without competition; at least 1.
    pub fn calibrate(self) -> u64 {
        let common = Common::default();
        let time = |amount: u64| {
            let start = Instant::now();
            self.work(amount, &common);
            start.elapsed()
        };
        let mut amount = 1;
        while time(amount) < CALIBRATION {
            amount *= 2;
        }
        let fastest = (0..CALIBRATIONS)
            .map(|_| time(amount))
            .min()
            .unwrap_or(CALIBRATION);
        ((amount as f64 * ROUND.as_secs_f64() / fastest.as_secs_f64()) as u64).max(1)
    }
}

fn compute(iterations: u64) {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..iterations {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    black_box(x);
}

/// Has the kernel take the spin lock of the futex's hash bucket: it compares the value under the lock, finds
/// another one, and returns at once.
fn use_kernel_lock(futex: &AtomicU32) {
    let other_value = 1;
    // SAFETY: the word lives as long as the call, which reads it only; no time limit is given.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            futex.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            other_value,
            std::ptr::null::<libc::timespec>(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_another_value_returns_at_once() {
        use_kernel_lock(&AtomicU32::new(0));
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
    }
}
