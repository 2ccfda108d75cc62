//! Release of pages after their minimum residency.

use std::sync::atomic::Ordering;

use coherence::Page;

use super::PageServer;
use crate::clock::now_ns;
use crate::min_residency::{BOUND_NS, MinResidency, Thread, Verdict};
use crate::shutdown::End;

/// Number of residencies above which unwanted pages are scanned too.
const SCAN_ABOVE: usize = 64;

impl PageServer {
    /// Releases wanted pages that have been used. Returns when to check again, nanoseconds from now.
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
                // Another residency has moved to this index.
                Some(Verdict::Release) => continue,
                Some(Verdict::Keep(ns)) if wanted => next = Some(next.map_or(ns, |next| next.min(ns))),
                _ => {}
            }
            index += 1;
        }
        self.check()?;
        // Unwanted pages need one check only, by which the engine learns that they are used.
        let later = (!self.driver.residencies.is_empty()).then_some(BOUND_NS);
        Ok(next.or(later))
    }

    /// Releases a page if its residency is over.
    pub(super) fn release_or_keep(&mut self, index: usize, now: u64) -> Verdict {
        let hold = *self.driver.residencies.at(index);
        // A page past the bound is released without reading its thread's time, which takes a while.
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
                // A request that is still deferred, as a thread here waits to write, is wanted after that.
                self.driver.want(hold.page);
            }
            let page = Page(self.driver.region.striped(hold.page));
            self.run_event(|engine, effects| engine.used(page, effects));
        }
        verdict
    }
}
