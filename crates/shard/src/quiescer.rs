//! Quiescer: pauses the whole VM. No vCPU runs, no device's thread works, and no I/O into guest memory is in
//! flight.
//!
//! Sharing and snapshots move guest memory without the guest's knowledge. Meanwhile nothing may write to it:
//! neither the guest, nor a device, nor the kernel on behalf of KVM. vCPUs are kicked out of the guest and
//! park; a device's thread finishes its current event. Devices stop first, so that a thread that waits for a
//! disk does not keep vCPUs parked. A pause that is not complete within [`PAUSE_LIMIT`] is abandoned, so it
//! cannot deadlock.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;

use crate::vcpu_stop::VcpuStop;

/// Time limit for all vCPUs to park.
const PAUSE_LIMIT: Duration = Duration::from_millis(20);
/// Interval at which a pause checks its time limit while a vCPU parks.
const PARK_INTERVAL: Duration = Duration::from_millis(5);

/// Interval at which a pause that waits for I/O retries.
const DRAIN_INTERVAL: Duration = Duration::from_micros(100);

/// Quiescer of one VM.
#[derive(Default)]
pub struct Quiescer {
    devices: RwLock<()>,
    /// Number of I/Os of the kernel into guest memory that are in flight without their device's thread.
    in_flight: AtomicUsize,
    /// Number of threads that wait for an instant without I/O: devices must start none meanwhile.
    draining: AtomicUsize,
    pausing: AtomicBool,
    /// Whether the VM is paused by an order, for long.
    held: AtomicBool,
    vcpus: Mutex<Vcpus>,
    changed: Condvar,
    /// Wakes vCPUs' threads that wait outside the guest, where a signal does not reach them.
    waker: OnceLock<Waker>,
}

/// Function that wakes threads.
type Waker = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Vcpus {
    parked: usize,
    threads: Vec<(libc::pthread_t, Arc<VcpuStop>)>,
    kick: Option<libc::c_int>,
}

/// Pause of the VM, which ends when this is dropped.
pub struct Pause<'a> {
    quiescer: &'a Quiescer,
    _devices: RwLockWriteGuard<'a, ()>,
}

/// Registration of a vCPU's thread. Created and dropped on that thread.
pub struct Participant<'a> {
    quiescer: &'a Quiescer,
    thread: libc::pthread_t,
}

impl Quiescer {
    /// Creates a quiescer whose VM runs.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns a guard, while which a device's thread may access guest memory.
    pub fn work(&self) -> RwLockReadGuard<'_, ()> {
        self.devices.read().ignore_poison()
    }

    /// Records the start of an I/O of the kernel into guest memory. The caller holds the guard of
    /// [`Quiescer::work`].
    pub fn io_started(&self) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
    }

    /// Records the completion of an I/O.
    pub fn io_done(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns whether a device's thread must defer new I/O, because a pause waits for the I/O in flight.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire) > 0
    }

    /// Waits, for about `limit` at most, for an instant at which no device's thread works and no I/O of the
    /// kernel into guest memory is in flight. Returns whether there was one. vCPUs run meanwhile. Nothing
    /// then has a pin on a page that was unmapped before. While an order holds the VM paused there is none.
    ///
    /// The caller holds no lock that a device's thread, or a thread for which that waits, may need.
    pub fn io_gap(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.draining.fetch_add(1, Ordering::AcqRel);
        let found = loop {
            if self.held.load(Ordering::Acquire) {
                break false;
            }
            let devices = self.devices.write().ignore_poison();
            let is_gap = self.in_flight.load(Ordering::Acquire) == 0;
            drop(devices);
            if is_gap || Instant::now() >= deadline {
                break is_gap;
            }
            std::thread::sleep(DRAIN_INTERVAL);
        };
        self.draining.fetch_sub(1, Ordering::AcqRel);
        found
    }

    /// Registers the calling vCPU's thread, before it first enters the guest. `kick` is the signal that makes
    /// it leave the guest, and that prevents its entry.
    ///
    /// While `stop` has the thread parked, a pause makes it park here instead.
    pub fn join(&self, kick: libc::c_int, stop: Arc<VcpuStop>) -> Participant<'_> {
        // SAFETY: the calling thread's own handle.
        let thread = unsafe { libc::pthread_self() };
        let mut vcpus = self.vcpus();
        vcpus.threads.push((thread, stop));
        vcpus.kick = Some(kick);
        Participant {
            quiescer: self,
            thread,
        }
    }

    /// Sets the function that wakes vCPUs' threads which wait outside the guest: of a VM that spans cells.
    /// The first call counts.
    pub fn set_waker(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.waker.set(Box::new(wake));
    }

    /// Pauses the VM. Returns `None` if I/O is in flight, a vCPU does not leave the kernel, or an order holds
    /// the VM paused.
    pub fn pause(&self) -> Option<Pause<'_>> {
        // The thread that carries out the order has its pause already; others would wait for as long as the
        // order holds.
        if self.held.load(Ordering::Acquire) {
            return None;
        }
        let devices = self.devices.write().ignore_poison();
        if self.in_flight.load(Ordering::Acquire) > 0 {
            return None;
        }
        let deadline = Instant::now() + PAUSE_LIMIT;
        let mut vcpus = self.vcpus();
        self.pausing.store(true, Ordering::SeqCst);
        let pause = Pause {
            quiescer: self,
            _devices: devices,
        };
        vcpus.kick_all();
        self.waker.get().into_iter().for_each(|wake| wake());
        while vcpus.parked < vcpus.threads.len() {
            if Instant::now() >= deadline {
                drop(vcpus);
                // Dropping the pause resumes all threads.
                return None;
            }
            vcpus = self.changed.wait_timeout(vcpus, PARK_INTERVAL).ignore_poison().0;
        }
        Some(pause)
    }

    /// Pauses the VM after its I/O in flight: devices start none meanwhile. Returns `None` after `limit`.
    pub fn pause_within(&self, limit: Duration) -> Option<Pause<'_>> {
        let deadline = Instant::now() + limit;
        self.draining.fetch_add(1, Ordering::AcqRel);
        let pause = loop {
            match self.pause() {
                None if Instant::now() < deadline => std::thread::sleep(DRAIN_INTERVAL),
                pause => break pause,
            }
        };
        self.draining.fetch_sub(1, Ordering::AcqRel);
        pause
    }

    /// Calls `work` while the VM is paused: by an order that holds it so, or by a pause of its own. Returns
    /// none if the VM can't be paused ([`Quiescer::pause`]).
    pub fn while_still<R>(&self, work: impl FnOnce() -> R) -> Option<R> {
        if let Some(pause) = self.pause() {
            let result = work();
            drop(pause);
            return Some(result);
        }
        // An order ends by a change of `held` and then, under this lock, of `pausing`: as long as the lock is
        // taken and the VM held, it stays paused.
        let vcpus = self.vcpus();
        let is_still = self.held.load(Ordering::Acquire) && self.pausing.load(Ordering::SeqCst);
        let result = is_still.then(work);
        drop(vcpus);
        result
    }

    /// Sets whether an order holds the VM paused. The caller holds a pause.
    pub fn set_held(&self, held: bool) {
        self.held.store(held, Ordering::Release);
    }

    fn vcpus(&self) -> MutexGuard<'_, Vcpus> {
        self.vcpus.lock().ignore_poison()
    }
}

impl Vcpus {
    fn kick_all(&self) {
        let Some(signal) = self.kick else { return };
        for (thread, stop) in &self.threads {
            // SAFETY: a thread removes itself from the list before it ends. A parked one only wakes without
            // success.
            unsafe { libc::pthread_kill(*thread, signal) };
            stop.wake();
        }
    }
}

impl Participant<'_> {
    /// Returns whether [`Participant::check`] would park.
    pub fn wanted(&self) -> bool {
        self.quiescer.pausing.load(Ordering::SeqCst)
    }

    /// Parks while the VM is paused. Called between two entries into the guest.
    pub fn check(&self) {
        if !self.wanted() {
            return;
        }
        let mut vcpus = self.quiescer.vcpus();
        vcpus.parked += 1;
        self.quiescer.changed.notify_all();
        while self.wanted() {
            vcpus = self.quiescer.changed.wait(vcpus).ignore_poison();
        }
        vcpus.parked -= 1;
    }
}

impl Drop for Participant<'_> {
    fn drop(&mut self) {
        let thread = self.thread;
        self.quiescer
            .vcpus()
            .threads
            .retain(|(member, _)| *member != thread);
        self.quiescer.changed.notify_all();
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        // Changed under the lock, so that no vCPU misses the wake-up between its check and its wait.
        let vcpus = self.quiescer.vcpus();
        self.quiescer.pausing.store(false, Ordering::SeqCst);
        drop(vcpus);
        self.quiescer.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

    use super::*;

    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

    /// Threads in the roles of vCPUs and devices count while they run.
    #[test]
    fn vcpus_and_devices_stop_during_a_pause_and_resume_after() {
        register_signal_handler(SIGRTMIN(), ignore).unwrap();
        let quiescer = Quiescer::new();
        let (counter, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let mut threads = Vec::new();
        for kind in 0..4 {
            let (quiescer, counter, stop) = (quiescer.clone(), counter.clone(), stop.clone());
            threads.push(thread::spawn(move || {
                let vcpu = (kind % 2 == 0).then(|| quiescer.join(SIGRTMIN(), Arc::default()));
                while !stop.load(Ordering::Relaxed) {
                    let _working = match &vcpu {
                        Some(vcpu) => {
                            vcpu.check();
                            None
                        }
                        None => Some(quiescer.work()),
                    };
                    counter.fetch_add(1, Ordering::SeqCst);
                    thread::yield_now();
                }
            }));
        }
        let mut pauses = 0;
        let deadline = Instant::now() + Duration::from_secs(20);
        while pauses < 50 && Instant::now() < deadline {
            if let Some(pause) = quiescer.pause() {
                let before = counter.load(Ordering::SeqCst);
                thread::sleep(Duration::from_micros(300));
                assert_eq!(counter.load(Ordering::SeqCst), before);
                drop(pause);
                pauses += 1;
            }
            thread::sleep(Duration::from_micros(200));
        }
        let after = counter.load(Ordering::SeqCst);
        while counter.load(Ordering::SeqCst) == after && Instant::now() < deadline {
            thread::yield_now();
        }
        assert!(counter.load(Ordering::SeqCst) > after, "no thread resumed");
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(pauses, 50);
    }

    /// A signal does not end the wait of a thread for an event. Without the waker the thread would not park.
    #[test]
    fn vcpu_that_waits_outside_the_guest_is_woken_to_park() {
        register_signal_handler(SIGRTMIN(), ignore).unwrap();
        let quiescer = Quiescer::new();
        let (wake, woken) = std::sync::mpsc::channel();
        let other = quiescer.clone();
        let (joined, wait) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            let vcpu = other.join(SIGRTMIN(), Arc::default());
            joined.send(()).unwrap();
            while let Ok(true) = woken.recv() {
                vcpu.check();
            }
        });
        wait.recv().unwrap();
        assert!(quiescer.pause().is_none(), "nothing wakes the thread");
        let end = wake.clone();
        quiescer.set_waker(move || wake.send(true).unwrap());
        drop(quiescer.pause().expect("the thread parks"));
        drop(quiescer.pause().expect("the thread parks again"));
        end.send(false).unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn pause_is_refused_while_kernel_io_is_in_flight() {
        let quiescer = Quiescer::new();
        quiescer.io_started();
        assert!(quiescer.pause().is_none());
        quiescer.io_done();
        assert!(quiescer.pause().is_some());
    }

    #[test]
    fn instant_without_io_is_found_between_work_and_io_in_flight_only() {
        let quiescer = Quiescer::new();
        let limit = Duration::from_millis(1);
        assert!(quiescer.io_gap(limit));
        quiescer.io_started();
        assert!(!quiescer.io_gap(limit), "the kernel works");
        let (other, (begun, wait)) = (quiescer.clone(), std::sync::mpsc::channel());
        let device = thread::spawn(move || {
            let working = other.work();
            begun.send(()).unwrap();
            thread::sleep(Duration::from_millis(50));
            // Still within its work it has I/O completed.
            other.io_done();
            drop(working);
        });
        wait.recv().unwrap();
        assert!(quiescer.io_gap(Duration::ZERO), "a device's work is waited for");
        device.join().unwrap();
        quiescer.io_started();
        let other = quiescer.clone();
        let thread = thread::spawn(move || {
            // Devices start no I/O until the instant was found.
            while !other.draining() {
                thread::yield_now();
            }
            other.io_done();
        });
        assert!(quiescer.io_gap(Duration::from_secs(20)));
        thread.join().unwrap();
        assert!(!quiescer.draining());
        let pause = quiescer.pause();
        quiescer.set_held(true);
        assert!(!quiescer.io_gap(limit), "the VM is paused");
        drop(pause);
    }

    #[test]
    fn pause_fails_when_a_vcpu_does_not_park_and_the_vcpu_resumes() {
        register_signal_handler(SIGRTMIN(), ignore).unwrap();
        let quiescer = Quiescer::new();
        let other = quiescer.clone();
        let (joined, wait) = std::sync::mpsc::channel();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let vcpu = other.join(SIGRTMIN(), Arc::default());
            joined.send(()).unwrap();
            held.recv().unwrap();
            vcpu.check();
        });
        wait.recv().unwrap();
        assert!(quiescer.pause().is_none());
        release.send(()).unwrap();
        thread.join().unwrap();
        assert!(quiescer.pause().is_some());
    }

    #[test]
    fn stopped_vcpu_parks_for_a_pause_at_once_and_stays_stopped_after_it() {
        register_signal_handler(SIGRTMIN(), ignore).unwrap();
        let (quiescer, stop) = (Quiescer::new(), Arc::new(VcpuStop::default()));
        let (other, own) = (quiescer.clone(), stop.clone());
        let runs = Arc::new(AtomicU64::new(0));
        let (count, ended) = (runs.clone(), Arc::new(AtomicBool::new(false)));
        let end = ended.clone();
        let thread = thread::spawn(move || {
            let vcpu = other.join(SIGRTMIN(), own.clone());
            while !end.load(Ordering::SeqCst) {
                vcpu.check();
                if own.is_wanted() {
                    own.serve(true, || vcpu.wanted());
                    continue;
                }
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        while runs.load(Ordering::SeqCst) == 0 {
            thread::yield_now();
        }
        let length = Duration::from_millis(100);
        let mut pauses = 0;
        for _ in 0..50 {
            stop.stop(length).unwrap();
            let begun = Instant::now();
            if let Some(pause) = quiescer.pause() {
                pauses += u32::from(begun.elapsed() < length);
                drop(pause);
                stop.go_on();
            }
        }
        assert!(
            pauses > 0,
            "no pause was complete before the deadline of the stop"
        );
        ended.store(true, Ordering::SeqCst);
        stop.go_on();
        thread.join().unwrap();
    }
}
