//! A VM that stands still by order, until another order lets it go on.

use std::ops::Deref;
use std::time::Duration;

use crate::machine::PlainVm;
use crate::quiescer::{Pause, Quiescer};

/// Time within which the VM stands still: its disks finish what is under way.
pub const STILL_LIMIT: Duration = Duration::from_secs(5);

/// Whether the VM stands still by order.
pub struct Hold<'a> {
    quiescer: &'a Quiescer,
    pause: Option<Pause<'a>>,
}

/// The VM stands still while this lives.
pub enum Still<'a> {
    /// By order: it still does afterwards.
    Held(&'a Pause<'a>),
    /// For this alone.
    Own(Pause<'a>),
}

impl<'a> Deref for Still<'a> {
    type Target = Pause<'a>;

    fn deref(&self) -> &Pause<'a> {
        match self {
            Self::Held(pause) => pause,
            Self::Own(pause) => pause,
        }
    }
}

impl<'a> Hold<'a> {
    /// The VM behind `quiescer` runs.
    pub fn new(quiescer: &'a Quiescer) -> Self {
        Self {
            quiescer,
            pause: None,
        }
    }

    /// Has the VM stand still until [`Hold::end`]. False if it does not within [`STILL_LIMIT`]; then it goes on.
    pub fn begin(&mut self) -> bool {
        if self.pause.is_none() {
            self.pause = self.quiescer.pause_within(STILL_LIMIT);
            self.quiescer.set_held(self.pause.is_some());
        }
        self.pause.is_some()
    }

    /// Lets the VM go on. Its guest is told that its clocks stood still, so that its watchdogs bear it.
    pub fn end(&mut self, plain: &PlainVm) {
        if let Some(pause) = self.pause.take() {
            plain.tell_of_pause();
            self.quiescer.set_held(false);
            drop(pause);
        }
    }

    /// Has the VM stand still for the caller; `None` if it does not within [`STILL_LIMIT`].
    pub fn still(&self) -> Option<Still<'_>> {
        match &self.pause {
            Some(pause) => Some(Still::Held(pause)),
            None => self.quiescer.pause_within(STILL_LIMIT).map(Still::Own),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Whether a device may work on the guest's memory now.
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
    fn held_vm_stands_still_for_others_too_and_after_them() {
        let quiescer = Quiescer::new();
        let mut hold = Hold::new(&quiescer);
        assert!(is_at_work(&quiescer));
        assert!(hold.begin());
        assert!(!is_at_work(&quiescer));
        assert!(matches!(hold.still(), Some(Still::Held(_))));
        assert!(!is_at_work(&quiescer), "what stood still for somebody goes on");
        assert!(
            quiescer.pause().is_none(),
            "it would wait for as long as the hold takes"
        );
        assert!(hold.begin(), "it stands still already");
        hold.end(&PlainVm {
            vcpus: Vec::new(),
            sharing: None,
        });
        assert!(is_at_work(&quiescer));
        drop(quiescer.pause().expect("it runs"));
        let still = hold.still();
        assert!(matches!(still, Some(Still::Own(_))));
        assert!(!is_at_work(&quiescer));
        drop(still);
        assert!(is_at_work(&quiescer));
    }

    #[test]
    fn vm_whose_io_does_not_end_is_not_held() {
        let quiescer = Quiescer::new();
        quiescer.io_started();
        let mut hold = Hold::new(&quiescer);
        let begin = Instant::now();
        assert!(!hold.begin());
        assert!((STILL_LIMIT..2 * STILL_LIMIT).contains(&begin.elapsed()));
        quiescer.io_done();
        assert!(hold.begin());
    }
}
