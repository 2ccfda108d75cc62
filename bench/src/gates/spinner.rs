//! A thread that computes without end on one CPU, as a vCPU does in its guest, and that can be stopped.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Once};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::{Pid, gettid};

/// Signal that interrupts a spinner, as a kick does a vCPU in `KVM_RUN`.
const KICK: i32 = libc::SIGUSR1;

/// State that the spinner and its owner have in common.
#[derive(Debug, Default)]
struct Shared {
    /// Iterations so far: they show that it runs.
    progress: AtomicU64,
    /// Whether it has to stop: a futex word, 1 while it has.
    gate: AtomicU32,
    is_over: AtomicBool,
    tid: AtomicI32,
}

/// A computing thread.
#[derive(Debug)]
pub struct Spinner {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Spinner {
    /// Starts a thread that computes on CPU `cpu` only.
    ///
    /// # Errors
    /// If the host starts no thread, or the CPU may not be used.
    pub fn start(cpu: usize) -> io::Result<Self> {
        catch_kicks();
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().spawn(move || compute(&of_thread))?;
        while shared.tid.load(Relaxed) == 0 {
            std::thread::yield_now();
        }
        let mut set = CpuSet::new();
        set.set(cpu)?;
        sched_setaffinity(Pid::from_raw(shared.tid.load(Relaxed)), &set)?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Iterations so far.
    pub fn progress(&self) -> u64 {
        self.shared.progress.load(Relaxed)
    }

    /// The thread's id.
    pub fn tid(&self) -> i32 {
        self.shared.tid.load(Relaxed)
    }

    /// The CPU time of the thread so far.
    ///
    /// # Errors
    /// If the kernel has no clock for it.
    pub fn cpu_time(&self) -> io::Result<Duration> {
        // The clock of a thread: the complement of its id, shifted by three, with the bits "thread" (4) and
        // "scheduled time" (2), as in the kernel's `include/linux/posix-timers.h`.
        let clock = (!self.tid() << 3) | 6;
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the time is ours and has the right type.
        nix::Error::result(unsafe { libc::clock_gettime(clock, &raw mut time) })?;
        Ok(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32))
    }

    /// Stops the thread: it waits at its next check, for which a signal interrupts it.
    pub fn close_gate(&self) {
        self.shared.gate.store(1, Relaxed);
        // SAFETY: sends a signal that this program catches to a thread of this process.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), self.tid(), KICK) };
    }

    /// Has the thread go on.
    pub fn open_gate(&self) {
        self.shared.gate.store(0, Relaxed);
        // SAFETY: wakes threads that wait for this word.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.shared.gate.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                1,
            )
        };
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Relaxed);
        self.open_gate();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn compute(shared: &Shared) {
    shared.tid.store(gettid().as_raw(), Relaxed);
    while !shared.is_over.load(Relaxed) {
        shared.progress.fetch_add(1, Relaxed);
        while shared.gate.load(Relaxed) == 1 && !shared.is_over.load(Relaxed) {
            // SAFETY: waits for the word as long as it is 1.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    shared.gate.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    1,
                    std::ptr::null::<libc::timespec>(),
                )
            };
        }
    }
}

/// Has the kick do nothing but interrupt.
fn catch_kicks() {
    extern "C" fn nothing(_: i32) {}
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(KICK, nothing as extern "C" fn(i32) as usize) };
    });
}
