//! The background of sharing: replaces unchanged copies by mappings, gives overwritten mappings back, watches the images.
//!
//! It works in small steps with rests between: a step holds the VM still for at most about [`STILL_LIMIT`], and is followed
//! by a rest of [`STILL_REST`] times that, and of [`WORK_REST`] times the whole step. Pages that changed are found before the VM is held still; while it is,
//! what is left is compared once more and mapped.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use policy::sharing::Way;

use super::extents::Run;
use super::mapper::{Mapped, Mapper, PAGE_BYTES, When};
use super::metrics::add;
use super::pagemap;
use super::situation::Situations;
use crate::gate::Gate;
use crate::launch::Share;

/// How long the VM may be held still by one step.
const STILL_LIMIT: Duration = Duration::from_millis(2);
/// The VM runs at least this many times as long as it was held still.
const STILL_REST: u32 = 20;
/// The background rests this many times as long as it worked.
const WORK_REST: u32 = 2;
/// The shortest rest.
const REST_MIN: Duration = Duration::from_millis(5);
/// How often it looks around: a copy is left alone for this long at least.
const ROUND: Duration = Duration::from_secs(1);
/// Copies taken at once.
const STEP_PAGES: u64 = 256;
/// Rounds between two looks for overwritten mappings.
const ROUNDS_PER_TRIM: u32 = 5;
/// There is no such look while a VM has fewer mappings than this part of its limit.
const TRIM_FROM: usize = 128;
/// Pages given back to plain memory between two looks at the time.
const TRIM_PAGES: u64 = 16;

/// The work of the background's thread.
pub struct Background {
    mapper: Arc<Mapper>,
    situations: Arc<Situations>,
    /// How each image's disk shares.
    shares: Vec<Share>,
    scratch: Vec<u8>,
}

impl Background {
    /// Opens what it will need; called before the sandbox closes. `shares` has an entry for each image.
    pub fn open(mapper: Arc<Mapper>, situations: Arc<Situations>, shares: Vec<Share>) -> Self {
        Self {
            mapper,
            situations,
            shares,
            scratch: Vec::new(),
        }
    }

    /// Works until the other end of `stop` is dropped, holding the VM still by `gate`.
    pub fn run(mut self, gate: &Gate, stop: &Receiver<()>) {
        let mut rounds = 0_u32;
        let mut next_round = Instant::now() + ROUND;
        let mut rest = ROUND;
        while stop.recv_timeout(rest) == Err(RecvTimeoutError::Timeout) {
            let start = Instant::now();
            if start >= next_round {
                next_round = start + ROUND;
                rounds = rounds.wrapping_add(1);
                self.situations.refresh();
                self.age();
                if rounds.is_multiple_of(ROUNDS_PER_TRIM) && self.mapper.fullness(TRIM_FROM) {
                    // What can't be trimmed now can be the next time.
                    let _ = self.trim(gate);
                }
            }
            let step = self.step(gate);
            rest = if step.more {
                (step.still * STILL_REST)
                    .max(start.elapsed() * WORK_REST)
                    .max(REST_MIN)
            } else {
                next_round.saturating_duration_since(Instant::now()).max(REST_MIN)
            };
        }
    }

    /// Lets the copies of the last round be worked through, once those before are.
    fn age(&self) {
        let mut pages = self.mapper.pages();
        if pages.copies.is_empty() {
            pages.copies = std::mem::take(&mut pages.fresh);
        }
    }

    /// Whether the copies of `run` at `at` are replaced now. A huge page, which makes the guest faster, is split only when
    /// the host is short of memory.
    fn acts(&self, at: u64, run: &Run) -> bool {
        if self.mapper.splits(at, run) && !self.situations.short() {
            return false;
        }
        match self.shares.get(usize::from(run.image)) {
            Some(Share::AtRead | Share::Deferred) => true,
            Some(Share::Adaptive) => self.situations.way(run.image) != Way::Remember,
            Some(Share::Never) | None => false,
        }
    }

    /// Replaces some copies.
    fn step(&mut self, gate: &Gate) -> Step {
        let taken = self.mapper.pages().copies.take_front(STEP_PAGES);
        let (now, later): (Vec<_>, Vec<_>) = taken.into_iter().partition(|(at, run)| self.acts(*at, run));
        if !later.is_empty() {
            let mut pages = self.mapper.pages();
            for (at, run) in later {
                // Not again before the next round.
                keep(&mut pages.fresh, at, run);
            }
        }
        if now.is_empty() {
            return Step {
                more: !self.mapper.pages().copies.is_empty(),
                still: Duration::ZERO,
            };
        }
        let equal = self.equal_runs(&now);
        let (left, still) = if equal.is_empty() {
            (Vec::new(), Duration::ZERO)
        } else {
            self.replace(gate, &equal)
        };
        // An idle VM keeps no buffer.
        self.scratch = Vec::new();
        let mut pages = self.mapper.pages();
        for (at, run, _) in left {
            keep(&mut pages.copies, at, run);
        }
        Step { more: true, still }
    }

    /// The parts of `runs` whose pages equal the image's now, each with the place of the image's bytes in `scratch`.
    fn equal_runs(&mut self, runs: &[(u64, Run)]) -> Vec<(u64, Run, usize)> {
        let mut equal: Vec<(u64, Run, usize)> = Vec::new();
        for &(at, run) in runs {
            let place = self.scratch.len();
            let there = self.read_cached(&run);
            add(&self.mapper.metrics.cold, run.pages - there);
            for page in 0..there {
                let place = place + (page * PAGE_BYTES) as usize;
                if !self.equals(at + page, 1, place) {
                    add(&self.mapper.metrics.changed, 1);
                    continue;
                }
                match equal.last_mut() {
                    Some((before, last, _))
                        if last.image == run.image
                            && *before + last.pages == at + page
                            && last.first + last.pages == run.first + page =>
                    {
                        last.pages += 1;
                    }
                    _ => equal.push((
                        at + page,
                        Run {
                            pages: 1,
                            image: run.image,
                            first: run.first + page,
                        },
                        place,
                    )),
                }
            }
        }
        equal
    }

    /// Appends an image's pages to `scratch`, as far as the page cache has them; how many whole pages that is.
    fn read_cached(&mut self, run: &Run) -> u64 {
        let Some(image) = self.mapper.image(run.image) else {
            return 0;
        };
        let start = self.scratch.len();
        self.scratch.resize(start + (run.pages * PAGE_BYTES) as usize, 0);
        let room = &mut self.scratch[start..];
        let vector = libc::iovec {
            iov_base: room.as_mut_ptr().cast(),
            iov_len: room.len(),
        };
        let offset = (run.first * PAGE_BYTES) as libc::off_t;
        // SAFETY: the vector names a live, exclusive buffer of that length.
        let mut read = unsafe { libc::preadv2(image.as_raw_fd(), &vector, 1, offset, libc::RWF_NOWAIT) };
        if read < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            // A file system that is memory, or can't tell.
            // SAFETY: as above.
            read = unsafe { libc::pread(image.as_raw_fd(), vector.iov_base, vector.iov_len, offset) };
        }
        let pages = u64::try_from(read).unwrap_or(0) / PAGE_BYTES;
        self.scratch.truncate(start + (pages * PAGE_BYTES) as usize);
        pages
    }

    /// Whether guest pages equal the bytes at `place`. Of use only as a hint while the guest runs.
    fn equals(&self, at: u64, pages: u64, place: usize) -> bool {
        let bytes = (pages * PAGE_BYTES) as usize;
        let (Some(guest), Some(image)) = (
            self.mapper.address(at, pages),
            self.scratch.get(place..place + bytes),
        ) else {
            return false;
        };
        // SAFETY: both ranges are mapped and have that many bytes. The guest may write meanwhile: the bytes are compared
        // by a function of the C library, without a Rust reference to them.
        unsafe { libc::memcmp(guest.cast(), image.as_ptr().cast(), bytes) == 0 }
    }

    /// Maps what is still equal once the VM stands still; returns what there was no time for, and how long it stood.
    fn replace(&self, gate: &Gate, equal: &[(u64, Run, usize)]) -> (Vec<(u64, Run, usize)>, Duration) {
        let asked = Instant::now();
        let metrics = &self.mapper.metrics;
        let Some(pause) = gate.pause() else {
            add(&metrics.pauses_missed, 1);
            return (equal.to_vec(), asked.elapsed());
        };
        let start = Instant::now();
        let mut pages = self.mapper.pages();
        let mut done = 0;
        for &(at, run, place) in equal {
            if start.elapsed() >= STILL_LIMIT {
                break;
            }
            done += 1;
            if !self.equals(at, run.pages, place) {
                add(&metrics.changed, run.pages);
                continue;
            }
            match self
                .mapper
                .map(&mut pages, at, run, When::Later, &metrics.mapped_later)
            {
                Ok(Mapped::Yes | Mapped::AtLimit) => (),
                // The copy stays a copy.
                Err(_) => add(&metrics.cold, run.pages),
            }
        }
        drop(pages);
        drop(pause);
        let still = asked.elapsed();
        metrics.paused(still);
        let pages = self.mapper.pages();
        for &(at, run, _) in &equal[..done] {
            self.mapper.give_back(&pages, at, run);
        }
        (equal[done..].to_vec(), still)
    }

    /// Gives mapped pages that were written back to plain memory, where that does not cost another mapping.
    pub(super) fn trim(&self, gate: &Gate) -> io::Result<()> {
        let Some(pagemap) = &self.mapper.pagemap else {
            return Ok(());
        };
        let runs: Vec<_> = {
            let pages = self.mapper.pages();
            // Frozen memory has no plain memory to give back to.
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
            let Some(pause) = gate.pause() else {
                add(&self.mapper.metrics.pauses_missed, 1);
                return Ok(());
            };
            let start = Instant::now();
            let mut pages = self.mapper.pages();
            while start.elapsed() < STILL_LIMIT
                && let Some(range) = pieces.next()
            {
                // Meanwhile a read may have mapped something else there.
                let written = self.written_edges(pagemap, range.start, range.end - range.start)?;
                if !pages.frozen && written.first() == Some(&range) && pages.mapped.cover(range.clone()) {
                    self.mapper.restore(&mut pages, range)?;
                }
            }
            drop(pages);
            drop(pause);
            self.mapper.metrics.paused(start.elapsed());
            std::thread::sleep((start.elapsed() * STILL_REST).max(REST_MIN));
        }
        Ok(())
    }

    /// The written pages at both ends of a mapping.
    fn written_edges(&self, pagemap: &File, at: u64, pages: u64) -> io::Result<Vec<Range<u64>>> {
        let Some(host) = self.mapper.address(at, pages) else {
            return Ok(Vec::new());
        };
        let written = pagemap::read(pagemap, host as u64, pages)?.map(pagemap::Entry::written);
        Ok(edges(&written.collect::<Vec<_>>())
            .into_iter()
            .map(|range| at + range.start as u64..at + range.end as u64)
            .collect())
    }
}

/// A range in parts of [`TRIM_PAGES`] at most.
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    range
        .step_by(TRIM_PAGES as usize)
        .map(move |at| at..(at + TRIM_PAGES).min(end))
}

/// What a step came to.
struct Step {
    /// There may be more copies.
    more: bool,
    /// How long the VM stood still for it.
    still: Duration,
}

/// Puts a run back among remembered ones unless something newer is known of its pages.
fn keep(extents: &mut super::extents::Extents, at: u64, run: Run) {
    if extents.inside(at..at + run.pages).next().is_none() {
        extents.insert(at, run);
    }
}

/// The runs of `true` at the two ends.
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
