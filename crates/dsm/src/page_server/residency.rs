//! How long a page that has come stays.

use std::sync::atomic::Ordering;

use coherence::Page;

use super::PageServer;
use crate::clock::now_ns;
use crate::shutdown::End;
use crate::min_residency::{BOUND_NS, MinResidency, Thread, Verdict};

/// Pages that stay before those that nobody wants are looked through.
const SCAN_ABOVE: usize = 64;

impl PageServer {
    /// Lets pages go that were wanted, and have been used by now; when to look again, nanoseconds from now.
    pub(super) fn release_wanted(&mut self) -> Result<Option<u64>, End> {
        if self.driver.residencies.is_empty() {
            return Ok(None);
        }
        let now = now_ns();
        let every = self.driver.residencies.len() > SCAN_ABOVE;
        let mut next: Option<u64> = None;
        let mut index = 0;
        while index < self.driver.residencies.len() {
            let MinResidency { wanted, since_ns, .. } = *self.driver.residencies.at(index);
            let overdue = now.saturating_sub(since_ns) >= BOUND_NS;
            match (wanted || every || overdue).then(|| self.release_or_keep(index, now)) {
                // Another one is at this place now.
                Some(Verdict::Release) => continue,
                Some(Verdict::Keep(ns)) if wanted => next = Some(next.map_or(ns, |next| next.min(ns))),
                _ => {}
            }
            index += 1;
        }
        self.check()?;
        // Those that nobody wants need not be looked at often, but once: the engine is to know that they are used.
        let later = (!self.driver.residencies.is_empty()).then_some(BOUND_NS);
        Ok(next.or(later))
    }

    /// Lets a page go if it may.
    pub(super) fn release_or_keep(&mut self, index: usize, now: u64) -> Verdict {
        let hold = *self.driver.residencies.at(index);
        // One that came long ago goes whatever its thread does, which takes time to ask.
        let thread = match now.saturating_sub(hold.since_ns) {
            BOUND_NS.. => Thread::Unknown,
            _ => self.driver.thread_of(&hold),
        };
        let enough_ns = self.enough_ns.load(Ordering::Relaxed);
        let verdict = hold.evaluate(now, thread, enough_ns);
        if verdict == Verdict::Release {
            let ran = matches!(thread, Thread::Ran(ran) | Thread::Elsewhere(ran)
                if ran.saturating_sub(hold.ran_ns) >= enough_ns);
            self.driver.meter.overdue += u64::from(hold.wanted && !ran && thread != Thread::Unknown);
            self.driver.residencies.end(index);
            if hold.wanted {
                // What could not be answered yet, as a thread here waits to write, is wanted after that.
                self.driver.want(hold.page);
            }
            let page = Page(self.driver.region.striped(hold.page));
            self.run_event(|engine, effects| engine.used(page, effects));
        }
        verdict
    }
}
