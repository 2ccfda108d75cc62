//! Pause of a VM by an order, until another order resumes it.

use std::ops::Deref;
use std::time::Duration;

use crate::machine::PlainVm;
use crate::quiescer::{Pause, Quiescer};

/// Time limit for the VM to pause, within which its disks finish their I/O in flight.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for the vCPUs of a shard without devices to pause. One that waits for a page, or for a device
/// of the home, must have it first.
pub const PARK_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause of the VM by an order, if any.
pub struct Hold<'a> {
    quiescer: &'a Quiescer,
    pause: Option<Pause<'a>>,
}

/// Pause of the VM for one caller.
pub enum CallerPause<'a> {
    /// Pause by an order, which outlasts the caller.
    Held(&'a Pause<'a>),
    /// Pause for the caller alone, which ends when this is dropped.
    Own(Pause<'a>),
}

impl<'a> Deref for CallerPause<'a> {
    type Target = Pause<'a>;

    fn deref(&self) -> &Pause<'a> {
        match self {
            Self::Held(pause) => pause,
            Self::Own(pause) => pause,
        }
    }
}

impl<'a> Hold<'a> {
    /// Creates the state of a VM that runs.
    pub fn new(quiescer: &'a Quiescer) -> Self {
        Self {
            quiescer,
            pause: None,
        }
    }

    /// Pauses the VM until [`Hold::end`]. Returns false, and the VM runs on, if it does not pause within
    /// `limit`.
    pub fn begin(&mut self, limit: Duration) -> bool {
        if self.pause.is_none() {
            self.pause = self.quiescer.pause_within(limit);
            self.quiescer.set_held(self.pause.is_some());
        }
        self.pause.is_some()
    }

    /// Returns whether an order holds the VM paused.
    pub fn is_held(&self) -> bool {
        self.pause.is_some()
    }

    /// Resumes the VM. KVM reports the pause to the guest of a plain VM, so that the guest's watchdogs accept
    /// it. Other guests have no paravirtual clock, which has the report.
    pub fn end(&mut self, plain: Option<&PlainVm>) {
        if let Some(pause) = self.pause.take() {
            plain.into_iter().for_each(PlainVm::report_pause);
            self.quiescer.set_held(false);
            drop(pause);
        }
    }

    /// Pauses the VM for the caller. Returns `None` if it does not pause within [`DRAIN_TIMEOUT`].
    pub fn pause_for_caller(&self) -> Option<CallerPause<'_>> {
        match &self.pause {
            Some(pause) => Some(CallerPause::Held(pause)),
            None => self.quiescer.pause_within(DRAIN_TIMEOUT).map(CallerPause::Own),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Returns whether a device may access guest memory now.
    fn is_at_work(quiescer: &std::sync::Arc<Quiescer>) -> bool {
        let (sender, worked) = std::sync::mpsc::channel();
        let quiescer = quiescer.clone();
        std::thread::spawn(move || {
            drop(quiescer.work());
            // The caller may have waited long enough.
            let _ = sender.send(());
        });
        worked.recv_timeout(Duration::from_millis(100)).is_ok()
    }

    #[test]
    fn held_vm_stays_paused_during_and_after_other_pauses() {
        let quiescer = Quiescer::new();
        let mut hold = Hold::new(&quiescer);
        assert!(is_at_work(&quiescer) && !hold.is_held());
        assert!(hold.begin(DRAIN_TIMEOUT));
        assert!(hold.is_held());
        assert!(!is_at_work(&quiescer));
        assert!(matches!(hold.pause_for_caller(), Some(CallerPause::Held(_))));
        assert!(!is_at_work(&quiescer), "a device ran while the VM was paused");
        assert!(
            quiescer.pause().is_none(),
            "a second pause would wait for the whole hold"
        );
        assert!(hold.begin(DRAIN_TIMEOUT), "the VM is paused already");
        hold.end(Some(&PlainVm {
            vcpus: Vec::new(),
            memory: crate::kind::PlainMemory::Whole,
        }));
        assert!(is_at_work(&quiescer));
        drop(quiescer.pause().expect("it runs"));
        let pause_for_caller = hold.pause_for_caller();
        assert!(matches!(pause_for_caller, Some(CallerPause::Own(_))));
        assert!(!is_at_work(&quiescer));
        drop(pause_for_caller);
        assert!(is_at_work(&quiescer));
    }

    #[test]
    fn vm_whose_io_does_not_end_is_not_held() {
        let quiescer = Quiescer::new();
        quiescer.io_started();
        let mut hold = Hold::new(&quiescer);
        let begin = Instant::now();
        assert!(!hold.begin(DRAIN_TIMEOUT));
        assert!((DRAIN_TIMEOUT..2 * DRAIN_TIMEOUT).contains(&begin.elapsed()));
        quiescer.io_done();
        assert!(hold.begin(DRAIN_TIMEOUT));
    }
}
