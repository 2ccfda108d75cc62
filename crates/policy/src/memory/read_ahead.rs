//! Window of the read-ahead: the number of neighbours that the read of a page brings.
//!
//! A page that is read ahead saves a read if it is touched before it leaves memory, and costs a transfer and
//! a place in memory if it is not. So the window follows use. Each page that was left unmapped gets one
//! verdict: its first touch, a fault without I/O, shows that it was used; otherwise it leaves memory unused.
//!
//! * A used page adds 2 to a score, an unused one takes 1 away: the window grows while more than a third of
//!   the pages are used. At the score's ends, the window has the next length of 0, 1, 3, 7.
//! * A window of 0 brings one page in 16 reads, as a probe. The first probe that is used opens the window, on
//!   probation: two pages that are not used close it, unless others are used before.
//! * The longest window at the highest score is trusted: pages are mapped as soon as they are read, and only
//!   the last one of each read is left unmapped. So a sequential order takes two faults for eight pages, not
//!   eight. One unused page, or many without a verdict, end the trust.

use super::resident_set::READ_CLUSTER_PAGES;

/// Longest window.
pub const WINDOW_MAX: u32 = READ_CLUSTER_PAGES - 1;
/// Reads without read-ahead before one page is brought as a probe; ours: a probe costs a sixteenth of a page
/// for each read.
pub const PROBE_INTERVAL: u32 = 16;
/// Unmapped pages that wait for their verdict in a trusted window at most; ours. Each sequential order has
/// about one.
const TRUSTED_WAITING_PAGES: u32 = 16;
/// Score at which the window grows; the negative one is that at which it shrinks. Ours.
const SCORE_END: i32 = 8;
/// Score of a window that a probe has opened. Ours: an order of which every second page is used opens it.
const PROBATION_SCORE: i32 = -6;
/// Effect of a used page: ours. A read costs more than twice what an unneeded page costs.
const USED_SCORE: i32 = 2;
const UNUSED_SCORE: i32 = -1;

/// Pages that a read may bring beyond the one that is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Greatest number of pages.
    pub pages: u32,
    /// Number of the last ones of them that are left unmapped.
    pub unmapped: u32,
}

/// The window of one VM, and what became of the pages.
#[derive(Clone, Debug)]
pub struct ReadAhead {
    window: u32,
    score: i32,
    /// Reads since the window closed, or since the last probe.
    reads: u32,
    read_pages: u64,
    used_pages: u64,
    unused_pages: u64,
}

impl Default for ReadAhead {
    fn default() -> Self {
        Self {
            window: 1,
            score: 0,
            reads: 0,
            read_pages: 0,
            used_pages: 0,
            unused_pages: 0,
        }
    }
}

impl ReadAhead {
    /// Plans a read, while `waiting` pages have no verdict yet.
    pub fn plan(&mut self, waiting: u32) -> Plan {
        if self.window == 0 {
            self.reads = self.reads.saturating_add(1);
            let pages = u32::from(self.reads >= PROBE_INTERVAL);
            return Plan {
                pages,
                unmapped: pages,
            };
        }
        let is_trusted =
            self.window == WINDOW_MAX && self.score == SCORE_END && waiting <= TRUSTED_WAITING_PAGES;
        Plan {
            pages: self.window,
            unmapped: if is_trusted { 1 } else { self.window },
        }
    }

    /// Records the number of pages that the planned read brings.
    pub fn read(&mut self, pages: u32) {
        self.read_pages = self.read_pages.saturating_add(pages.into());
        if pages > 0 {
            self.reads = 0;
        }
    }

    /// Records that an unmapped page was touched.
    pub fn used(&mut self) {
        self.used_pages = self.used_pages.saturating_add(1);
        if self.window == 0 {
            self.window = 1;
            self.score = PROBATION_SCORE;
            return;
        }
        self.score = (self.score + USED_SCORE).min(SCORE_END);
        if self.score == SCORE_END && self.window < WINDOW_MAX {
            self.window = (2 * self.window + 1).min(WINDOW_MAX);
            self.score = 0;
        }
    }

    /// Records that an unmapped page leaves memory without a touch.
    pub fn unused(&mut self) {
        self.unused_pages = self.unused_pages.saturating_add(1);
        if self.window == 0 {
            return;
        }
        self.score += UNUSED_SCORE;
        if self.score <= -SCORE_END {
            self.window /= 2;
            self.score = 0;
        }
    }

    /// Returns the greatest number of pages that a read brings now, without probes.
    pub fn window(&self) -> u32 {
        self.window
    }

    /// Returns the number of pages that were read ahead.
    pub fn read_pages(&self) -> u64 {
        self.read_pages
    }

    /// Returns the number of unmapped pages that were touched.
    pub fn used_pages(&self) -> u64 {
        self.used_pages
    }

    /// Returns the number of unmapped pages that left memory without a touch.
    pub fn unused_pages(&self) -> u64 {
        self.unused_pages
    }
}

#[cfg(test)]
mod tests;
