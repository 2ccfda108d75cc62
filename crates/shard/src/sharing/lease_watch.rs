//! Gives leased files back: at once when a writer waits for one, and some time after their last use.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::background::{Background, PAUSE_MAX, REST_MIN, pieces};
use super::extents::ImageId;
use super::metrics::add;
use super::pages::Pages;
use crate::quiescer::Quiescer;

/// Interval in which the state of the leases is read. A writer on the host waits for it.
pub(super) const LEASE_INTERVAL: Duration = Duration::from_millis(50);
/// The VM runs at least this many times as long as it was paused, while a writer waits.
const PAUSE_REST_FACTOR: u32 = 2;

impl Background {
    /// Makes the pages of each file for which a writer waits plain memory, and gives the file back. A VM that
    /// can't be paused now is tried again at the next call. Returns whether files are leased.
    pub(super) fn watch_leases(&self, quiescer: &Quiescer) -> bool {
        let wanted = self.mapper.leases().wanted();
        for image in wanted {
            if self.unmap(quiescer, image) {
                self.mapper.leases().remove(image);
                add(&self.mapper.metrics.leases_broken, 1);
            }
        }
        self.mapper.leases().len() > 0
    }

    /// Gives back the files without pages in guest memory.
    pub(super) fn return_unused_leases(&self) {
        let mapper = &self.mapper;
        if mapper.leases().len() == 0 {
            return;
        }
        let used: BTreeSet<ImageId> = {
            let pages = mapper.pages();
            let copies = [&pages.fresh, &pages.copies, &pages.chosen, &pages.short];
            let runs = copies
                .into_iter()
                .chain([&pages.mapped])
                .flat_map(|runs| runs.iter());
            runs.map(|(_, run)| run.image).collect()
        };
        mapper.leases().end_round(&used);
    }

    /// Makes all pages of a file plain memory, and forgets copies of it. Returns false if the VM can't be
    /// paused now, or the host has no memory for them.
    fn unmap(&self, quiescer: &Quiescer, image: ImageId) -> bool {
        loop {
            let mut unmapped = Ok(Unmapped::Some);
            let still = quiescer.while_still(|| {
                let start = Instant::now();
                let mut pages = self.mapper.pages();
                unmapped = self.unmap_some(&mut pages, image, start + PAUSE_MAX);
                start.elapsed()
            });
            let Some(still) = still else {
                add(&self.mapper.metrics.pauses_missed, 1);
                return false;
            };
            self.mapper.metrics.paused(still);
            match unmapped {
                Ok(Unmapped::All) => return true,
                Ok(Unmapped::Some) => std::thread::sleep((still * PAUSE_REST_FACTOR).max(REST_MIN)),
                Err(_) => return false,
            }
        }
    }

    /// Makes pages of a file plain memory until the deadline.
    fn unmap_some(&self, pages: &mut Pages, image: ImageId, deadline: Instant) -> io::Result<Unmapped> {
        for copies in [
            &mut pages.fresh,
            &mut pages.copies,
            &mut pages.chosen,
            &mut pages.short,
        ] {
            for range in of_image(copies.iter(), image) {
                copies.remove(range);
            }
        }
        let mapped = of_image(pages.mapped.iter(), image);
        for piece in mapped.into_iter().flat_map(pieces) {
            if Instant::now() >= deadline {
                return Ok(Unmapped::Some);
            }
            match self.mapper.restore(pages, piece.clone()) {
                // The lease ended by itself, as this process was stopped, and the pages are no longer there.
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                    self.mapper.give_up(pages, piece)?;
                }
                restored => restored?,
            }
        }
        Ok(Unmapped::All)
    }
}

/// Which pages of a file became plain memory.
enum Unmapped {
    All,
    Some,
}

/// Returns the guest pages of the runs of one image.
fn of_image(runs: impl Iterator<Item = (u64, super::Run)>, image: ImageId) -> Vec<Range<u64>> {
    let runs = runs.filter(|(_, run)| run.image == image);
    runs.map(|(at, run)| at..at + run.pages).collect()
}
