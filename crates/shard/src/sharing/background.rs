//! The background thread of sharing: it replaces unchanged copies by mappings, turns written mappings back
//! into plain memory, and watches the images.
//!
//! It works in small steps with rests between them. One step chooses copies that equal the image while the VM
//! runs. The following steps pause the VM for at most about [`PAUSE_MAX`] each, compare the chosen copies
//! again, and map them. A step is followed by a rest of [`PAUSE_REST_FACTOR`] times the pause, and of
//! [`WORK_REST_FACTOR`] times the whole step.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use policy::sharing::trims;

use super::extents::{ImageId, Run};
use super::fates::Fate;
use super::lease_watch::LEASE_INTERVAL;
use super::leases::LEASED_FIRST;
use super::mapper::{MapTime, Mapped, Mapper};
use super::metrics::add;
use super::page_cache::read_cached;
use super::pagemap;
use super::pages::{PAGE_BYTES, Pages};
use super::pressure_monitor::PressureMonitor;
use crate::launch::Share;
use crate::quiescer::Quiescer;

/// Longest pause of the VM by one step.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(2);
/// The VM runs at least this many times as long as it was paused.
const PAUSE_REST_FACTOR: u32 = 20;
/// The thread rests this many times as long as it worked.
const WORK_REST_FACTOR: u32 = 2;
/// The shortest rest.
pub(super) const REST_MIN: Duration = Duration::from_millis(5);
/// Interval of the checks. A copy is left alone for at least this long.
const ROUND_INTERVAL: Duration = Duration::from_secs(1);
/// Number of copies taken at once.
const STEP_PAGES: u64 = 256;
/// Number of pages turned back into plain memory between two checks of the time.
pub(super) const TRIM_PAGES: u64 = 16;
/// The shortest run of pages of a shared folder's file that is mapped while there is plenty of memory: each
/// run costs the host a mapping.
const LEASED_RUN_PAGES_MIN: u64 = 4;

/// State of the background thread.
pub struct Background {
    pub(super) mapper: Arc<Mapper>,
    pressure: Arc<PressureMonitor>,
    /// Sharing mode of each image's disk.
    shares: Vec<Share>,
    chosen: VecDeque<Chosen>,
    /// Bytes of the images that the chosen copies equal.
    bytes: Vec<u8>,
}

/// A run of copies that were found unchanged. They are still its copies only if [`super::pages::Pages`] says
/// so.
struct Chosen {
    at: u64,
    run: Run,
    /// Position of the image's bytes.
    place: usize,
}

impl Background {
    /// Opens the files that the thread needs; called before the sandbox closes. `shares` has an entry for
    /// each image.
    pub fn open(mapper: Arc<Mapper>, pressure: Arc<PressureMonitor>, shares: Vec<Share>) -> Self {
        Self {
            mapper,
            pressure,
            shares,
            chosen: VecDeque::new(),
            bytes: Vec::new(),
        }
    }

    /// Works until the other end of `stop` is dropped; pauses the VM by `quiescer`.
    pub fn run(mut self, quiescer: &Quiescer, stop: &Receiver<()>) {
        let mut trimmed = 0;
        let mut next_round = Instant::now() + ROUND_INTERVAL;
        let mut rest = ROUND_INTERVAL;
        while stop.recv_timeout(rest) == Err(RecvTimeoutError::Timeout) {
            let start = Instant::now();
            if start >= next_round {
                next_round = start + ROUND_INTERVAL;
                self.pressure.refresh();
                self.age();
                self.return_unused_leases();
                if trims(self.mapper.mappings(), trimmed, self.mapper.mappings_max()) {
                    // An edge that can't be trimmed now is trimmed later.
                    let _ = self.trim(quiescer);
                    trimmed = self.mapper.mappings();
                }
            }
            let leased = self.watch_leases(quiescer);
            let step = self.step(quiescer);
            rest = if step.more {
                (step.still * PAUSE_REST_FACTOR)
                    .max(start.elapsed() * WORK_REST_FACTOR)
                    .max(REST_MIN)
            } else {
                next_round.saturating_duration_since(Instant::now()).max(REST_MIN)
            };
            if leased {
                rest = rest.min(LEASE_INTERVAL);
            }
        }
    }

    /// Releases the copies of the last round for processing after those before them. Includes those in short
    /// runs if memory is short.
    pub(super) fn age(&self) {
        let mut pages = self.mapper.pages();
        if pages.copies.is_empty() {
            pages.copies = std::mem::take(&mut pages.fresh);
            if self.pressure.short() {
                for (at, run) in std::mem::take(&mut pages.short).iter() {
                    pages.copies.insert(at, run);
                }
            }
        }
    }

    /// Returns whether copies of any image are replaced now.
    fn replaces_any(&self) -> bool {
        let images = (0..self.shares.len()).filter_map(|image| ImageId::try_from(image).ok());
        images
            .filter_map(|image| self.run_pages_min(image))
            .next()
            .is_some()
            || self.mapper.leases().len() > 0
    }

    /// Returns the shortest run of copies of this image that is replaced now; none if no run is.
    fn run_pages_min(&self, image: ImageId) -> Option<u64> {
        if image >= LEASED_FIRST {
            return Some(LEASED_RUN_PAGES_MIN);
        }
        let share = self.shares.get(usize::from(image))?;
        self.pressure.mode(*share, image).run_pages_min_later()
    }

    /// Returns when copies of `run` at `at` are replaced. A huge page, which makes the guest faster, is split
    /// only if the host is short of memory.
    fn replace_time(&self, at: u64, run: &Run) -> ReplaceTime {
        match self.run_pages_min(run.image) {
            Some(least) if run.pages < least => ReplaceTime::WhenShort,
            Some(_) if !self.mapper.splits(at, run) || self.pressure.short() => ReplaceTime::Now,
            _ => ReplaceTime::NotYet,
        }
    }

    /// Replaces some copies, or chooses those to be replaced.
    pub(super) fn step(&mut self, quiescer: &Quiescer) -> Step {
        let still = if self.chosen.is_empty() {
            if self.replaces_any() {
                self.choose();
            }
            Duration::ZERO
        } else {
            self.replace(quiescer)
        };
        if self.chosen.is_empty() {
            // An idle VM keeps no buffer.
            self.bytes = Vec::new();
        }
        let more = !self.chosen.is_empty() || self.replaces_any() && !self.mapper.pages().copies.is_empty();
        Step { more, still }
    }

    /// Chooses among the next copies those that equal the image's pages now.
    fn choose(&mut self) {
        for (at, run) in self.take() {
            let place = self.bytes.len();
            let there = self.read_cached(&run);
            add(&self.mapper.metrics.cold, run.pages - there);
            let mut unequal = Vec::new();
            for page in 0..there {
                let place = place + (page * PAGE_BYTES) as usize;
                if self.equals(at + page, 1, place) {
                    self.push(at + page, run.image, run.first + page, place);
                } else {
                    add(&self.mapper.metrics.changed, 1);
                    unequal.push(at + page);
                }
            }
            let mut pages = self.mapper.pages();
            let overwritten = unequal.into_iter().map(|page| (page, Fate::Overwritten));
            let cold = (at + there..at + run.pages).map(|page| (page, Fate::Cold));
            for (page, fate) in overwritten.chain(cold) {
                // The guest may have released it meanwhile, or read something else into it.
                if pages.chosen.cover(page..page + 1) {
                    pages.resolve(page, fate);
                }
            }
        }
    }

    /// Takes copies to choose from.
    fn take(&self) -> Vec<(u64, Run)> {
        let mut pages = self.mapper.pages();
        let mut now = Vec::new();
        for (at, run) in pages.copies.take_front(STEP_PAGES) {
            match self.replace_time(at, &run) {
                ReplaceTime::Now => {
                    pages.chosen.insert(at, run);
                    now.push((at, run));
                }
                // Not again before the next round.
                ReplaceTime::NotYet => pages.fresh.insert(at, run),
                ReplaceTime::WhenShort => pages.short.insert(at, run),
            }
        }
        now
    }

    /// Appends a page to the chosen copies, to the last run if it continues that.
    fn push(&mut self, at: u64, image: ImageId, first: u64, place: usize) {
        match self.chosen.back_mut() {
            Some(last)
                if last.run.image == image
                    && last.at + last.run.pages == at
                    && last.run.first + last.run.pages == first =>
            {
                last.run.pages += 1;
            }
            _ => self.chosen.push_back(Chosen {
                at,
                run: Run {
                    pages: 1,
                    image,
                    first,
                },
                place,
            }),
        }
    }

    /// Appends an image's pages to `bytes`, as far as the page cache has them. Returns the number of whole
    /// pages.
    fn read_cached(&mut self, run: &Run) -> u64 {
        let image = self.mapper.image(run.image);
        image.map_or(0, |image| {
            read_cached(&image, run.first, run.pages, &mut self.bytes)
        })
    }

    /// Returns whether guest pages equal the bytes at `place`. While the guest runs the result is a hint
    /// only.
    fn equals(&self, at: u64, pages: u64, place: usize) -> bool {
        let length = (pages * PAGE_BYTES) as usize;
        let (Some(guest), Some(image)) = (
            self.mapper.address(at, pages),
            self.bytes.get(place..place + length),
        ) else {
            return false;
        };
        // SAFETY: both ranges are mapped and have that many bytes. The guest may write meanwhile: the bytes
        // are compared by a function of the C library, without a Rust reference to them.
        unsafe { libc::memcmp(guest.cast(), image.as_ptr().cast(), length) == 0 }
    }

    /// Maps the chosen copies that are still equal once the VM is paused, as far as the time limit allows.
    /// Returns the length of the pause.
    fn replace(&mut self, quiescer: &Quiescer) -> Duration {
        let asked = Instant::now();
        let Some(pause) = quiescer.pause() else {
            add(&self.mapper.metrics.pauses_missed, 1);
            return asked.elapsed();
        };
        let start = Instant::now();
        let mut pages = self.mapper.pages();
        let mut mapped = Vec::new();
        while start.elapsed() < PAUSE_MAX
            && let Some(chosen) = self.chosen.pop_front()
        {
            let there: Vec<_> = pages
                .chosen
                .inside(chosen.at..chosen.at + chosen.run.pages)
                .collect();
            for (at, run) in there {
                let place = chosen.place + ((at - chosen.at) * PAGE_BYTES) as usize;
                if self.map_equal(&mut pages, at, run, place) {
                    mapped.push((at, run));
                }
            }
        }
        drop(pages);
        drop(pause);
        let still = asked.elapsed();
        self.mapper.metrics.paused(still);
        let pages = self.mapper.pages();
        for (at, run) in mapped {
            self.mapper.give_back(&pages, at, run);
        }
        still
    }

    /// Maps `run` over its copy at `at` if the pages are equal. The VM is paused.
    fn map_equal(&self, pages: &mut Pages, at: u64, run: Run, place: usize) -> bool {
        let metrics = &self.mapper.metrics;
        if !self.equals(at, run.pages, place) {
            pages.chosen.remove(at..at + run.pages);
            if run.pages == 1 {
                add(&metrics.changed, 1);
                pages.resolve(at, Fate::Overwritten);
            } else {
                // Some of its pages may still be equal.
                pages.copies.insert(at, run);
            }
            return false;
        }
        match self
            .mapper
            .map(pages, at, run, MapTime::InBackground, &metrics.mapped_later)
        {
            Ok(mapped) => mapped == Mapped::Yes,
            // The pages remain a copy.
            Err(_) => {
                add(&metrics.cold, run.pages);
                false
            }
        }
    }

    /// Turns written pages of mappings back into plain memory, where that does not cost another mapping.
    pub(super) fn trim(&self, quiescer: &Quiescer) -> io::Result<()> {
        let Some(pagemap) = &self.mapper.pagemap else {
            return Ok(());
        };
        let runs: Vec<_> = {
            let pages = self.mapper.pages();
            // Frozen memory has no plain memory to return to.
            if pages.frozen {
                return Ok(());
            }
            pages.mapped.iter().collect()
        };
        let mut trimmed = Vec::new();
        for (at, run) in runs {
            trimmed.extend(self.written_edges(pagemap, at, run.pages)?);
        }
        let mut pieces = trimmed.into_iter().flat_map(pieces).peekable();
        while pieces.peek().is_some() {
            let Some(pause) = quiescer.pause() else {
                add(&self.mapper.metrics.pauses_missed, 1);
                return Ok(());
            };
            let start = Instant::now();
            let mut pages = self.mapper.pages();
            while start.elapsed() < PAUSE_MAX
                && let Some(range) = pieces.next()
            {
                // A read may have replaced the mapping meanwhile.
                let written = self.written_edges(pagemap, range.start, range.end - range.start)?;
                if !pages.frozen && written.first() == Some(&range) && pages.mapped.cover(range.clone()) {
                    self.mapper.restore(&mut pages, range)?;
                }
            }
            drop(pages);
            drop(pause);
            self.mapper.metrics.paused(start.elapsed());
            std::thread::sleep((start.elapsed() * PAUSE_REST_FACTOR).max(REST_MIN));
        }
        Ok(())
    }

    /// Returns the written pages at both ends of a mapping.
    fn written_edges(&self, pagemap: &File, at: u64, pages: u64) -> io::Result<Vec<Range<u64>>> {
        let Some(host) = self.mapper.address(at, pages) else {
            return Ok(Vec::new());
        };
        let written = pagemap::read(pagemap, host as u64, pages)?.map(pagemap::Entry::is_written);
        Ok(edges(&written.collect::<Vec<_>>())
            .into_iter()
            .map(|range| at + range.start as u64..at + range.end as u64)
            .collect())
    }
}

/// Divides a range into parts of at most [`TRIM_PAGES`].
pub(super) fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range
        .step_by(TRIM_PAGES as usize)
        .map(move |at| at..(at + TRIM_PAGES).min(end))
}

/// Time at which a run of copies is replaced.
enum ReplaceTime {
    Now,
    NotYet,
    /// If memory is short.
    WhenShort,
}

/// Result of a step.
pub(super) struct Step {
    /// Whether there may be more copies.
    pub more: bool,
    /// Length of the step's pause of the VM.
    still: Duration,
}

/// Returns the runs of `true` at the two ends.
fn edges(written: &[bool]) -> Vec<Range<usize>> {
    let front = written.iter().take_while(|written| **written).count();
    let rest = &written[front..];
    let back = rest.iter().rev().take_while(|written| **written).count();
    [0..front, written.len() - back..written.len()]
        .into_iter()
        .filter(|range| !range.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_ends_are_trimmed() {
        let edges = |text: &str| -> Vec<_> {
            let written: Vec<_> = text.chars().map(|c| c == 'w').collect();
            edges(&written)
                .into_iter()
                .map(|range| (range.start, range.end))
                .collect()
        };
        assert_eq!(edges("ww.w..w"), [(0, 2), (6, 7)]);
        assert_eq!(edges("www"), [(0, 3)]);
        assert_eq!(edges("..w.."), []);
        assert_eq!(edges(""), []);
    }
}
