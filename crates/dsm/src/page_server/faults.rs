//! Faults of this node's threads, and the prefetches that they cause.

use std::sync::atomic::Ordering;

use coherence::{Access, FaultOutcome, Page, Right};

use super::PageServer;
use crate::shutdown::End;
use crate::userfault::{FAULTS_MAX, Fault};

/// Pages claimed together if no node has used them.
const AROUND: u32 = 16;

impl PageServer {
    /// Handles pending faults. Returns whether there were any.
    pub(super) fn take_faults(&mut self) -> Result<bool, End> {
        let mut faults = [Fault::NONE; FAULTS_MAX];
        let count = self
            .driver
            .region
            .userfault(self.number)
            .read(&mut faults)
            .map_err(|error| End::Kernel(format!("userfaultfd can't be read: {error}")))?;
        self.faulted = count == FAULTS_MAX;
        for fault in &faults[..count] {
            let Some(page) = self.driver.region.page_at(fault.address) else {
                return Err(End::Kernel(format!(
                    "a fault at {:#x}, outside the region",
                    fault.address
                )));
            };
            let access = if fault.write { Access::Write } else { Access::Read };
            self.driver.add_waiter(page, access, fault);
            match self.driver.merging.as_ref() {
                // A page that is leaving is closed already.
                Some(merging)
                    if merging.merger.is_merged(Page(page))
                        && self.driver.region.mapped(page) != Right::None =>
                {
                    self.driver.retry_fault(page);
                    self.check()?;
                    continue;
                }
                // The thread resumes when the page is open to all, or the engine's again.
                Some(merging) if merging.taken.contains(&page) => continue,
                _ => {}
            }
            let striped = Page(self.driver.region.striped(page));
            self.driver.peers.gather();
            let faulted = self.run_event(|engine, effects| engine.fault(striped, access, effects));
            match access {
                _ if faulted != FaultOutcome::Pending => {}
                Access::Read => self.prefetch(page),
                Access::Write => self.prefetch_for_write(page),
            }
            self.driver.send_gathered();
            match faulted {
                FaultOutcome::Allowed => self.driver.retry_fault(page),
                FaultOutcome::Granted => self.claim_around(page),
                FaultOutcome::Pending => self.driver.waiters.note_ran(),
            }
            self.check()?;
        }
        Ok(count > 0)
    }

    /// Prefetches pages after one that was requested, if its stream goes on.
    fn prefetch(&mut self, page: u32) {
        if !self.driver.prefetches.load(Ordering::Relaxed) {
            return;
        }
        // The range is of this page server, and most probably of the same manager.
        let end = self.driver.region.block_of(page, u32::MAX).end;
        let region = &self.driver.region;
        let is_here = |page| region.mapped(page) != Right::None;
        for page in self.read_prefetcher.on_read_fault(page, end, is_here) {
            if !self.read_prefetcher.was_invalidated_lately(page) && self.driver.is_plain(page) {
                let striped = Page(self.driver.region.striped(page));
                self.run_event(|engine, effects| engine.prefetch(striped, effects));
            }
        }
    }

    /// Prefetches zero pages for writing after one that is about to be written, if its stream goes on. The
    /// protocol sees an ordinary fault whose page has been used as soon as it arrives.
    fn prefetch_for_write(&mut self, page: u32) {
        let region = &self.driver.region;
        if !self.driver.prefetches.load(Ordering::Relaxed) || region.mapped(page) != Right::None {
            return;
        }
        let end = region.block_of(page, u32::MAX).end;
        let more = (self.driver.write_prefetcher)
            .on_write_fault(page, end, |page| region.mapped(page) != Right::None);
        for page in more {
            let striped = Page(self.driver.region.striped(page));
            if self.driver.is_plain(page) && self.engine.is_absent(striped) {
                self.driver.write_prefetcher.on_request(page);
                self.run_event(|engine, effects| engine.fault(striped, Access::Write, effects));
            }
        }
    }

    /// Claims unused pages beside one that was used for the first time. A thread that fills memory that
    /// begins here goes on there, and would fault for each page.
    fn claim_around(&mut self, page: u32) {
        if !std::mem::take(&mut self.driver.was_fresh) {
            return;
        }
        let block = self.driver.region.block_of(page, AROUND);
        let mut end = page + 1;
        while end < block.end && self.engine.claim(Page(self.driver.region.striped(end))) {
            end += 1;
        }
        let mut start = page;
        while start > block.start && self.engine.claim(Page(self.driver.region.striped(start - 1))) {
            start -= 1;
        }
        self.driver.map_zero(start..page);
        self.driver.map_zero(page + 1..end);
    }
}
