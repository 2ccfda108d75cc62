//! Counters of a page server, for reports.

use std::ops::{AddAssign, Sub};

use coherence::merged::Merges;
use coherence::{Access, Counters, Right};
use serde::{Deserialize, Serialize};

/// Number and duration of stalls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stalls {
    /// Number of stalls.
    pub count: u64,
    /// Total time from reading the fault to waking the thread, nanoseconds.
    pub ns: u64,
}

/// Counters since the node began. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meter {
    /// Stalls of threads that read.
    pub reads: Stalls,
    /// Stalls of threads that wrote a page without a valid copy.
    pub writes: Stalls,
    /// Stalls of threads that wrote a page that they could read.
    pub upgrades: Stalls,
    /// Messages sent to other nodes.
    pub messages: u64,
    /// Messages sent with a page.
    pub pages: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// Pages received directly at their place.
    pub landed: u64,
    /// Copies invalidated by other nodes' writes.
    pub invalidated: u64,
    /// Requests deferred until a page had been used.
    pub deferred: u64,
    /// Pages released to a deferred request without certain use.
    pub overdue: u64,
    /// Pages discarded, counted at their manager.
    pub discarded: u64,
    /// Times that the page server slept.
    pub sleeps: u64,
    /// Prefetched copies received.
    pub ahead: u64,
    /// Stalls on a page whose prefetch was pending. They are among `reads` and `writes`, and shorter.
    pub joined: u64,
    /// Prefetches of other nodes refused, as the page was zero or in use.
    pub declined: u64,
    /// Pages acquired for writing by a prefetch.
    pub filled: u64,
    /// Page tables merged.
    pub merged: u64,
    /// Merged page tables that became ordinary pages again.
    pub unmerged: u64,
    /// Words of merged pages sent.
    pub words: u64,
    /// Words that two nodes had changed: none while the guest's locks are correct.
    pub conflicts: u64,
}

impl Meter {
    /// Returns the counter of a stall by the right that the node had.
    pub fn stalls(&mut self, had: Right, access: Access) -> &mut Stalls {
        match (access, had) {
            (Access::Read, _) => &mut self.reads,
            (Access::Write, Right::None) => &mut self.writes,
            (Access::Write, _) => &mut self.upgrades,
        }
    }

    /// Copies the counters of merged pages.
    pub fn merge(&mut self, merges: &Merges) {
        self.merged = merges.joined;
        self.unmerged = merges.left;
        self.words = merges.sent;
        self.conflicts = merges.conflicts;
    }

    /// Copies the counters of an engine.
    pub fn take(&mut self, counters: &Counters) {
        self.messages = counters.messages_sent;
        self.pages = counters.pages_sent;
        self.invalidated = counters.invalidated;
        self.deferred = counters.deferred;
        self.discarded = counters.discarded;
        self.ahead = counters.prefetched;
        self.joined = counters.joined;
        self.declined = counters.nacked;
    }
}

/// Combines all counters of two meters by `f`.
fn both(one: &Meter, other: &Meter, f: impl Fn(u64, u64) -> u64) -> Meter {
    let stalls = |one: Stalls, other: Stalls| Stalls {
        count: f(one.count, other.count),
        ns: f(one.ns, other.ns),
    };
    Meter {
        reads: stalls(one.reads, other.reads),
        writes: stalls(one.writes, other.writes),
        upgrades: stalls(one.upgrades, other.upgrades),
        messages: f(one.messages, other.messages),
        pages: f(one.pages, other.pages),
        bytes: f(one.bytes, other.bytes),
        landed: f(one.landed, other.landed),
        invalidated: f(one.invalidated, other.invalidated),
        deferred: f(one.deferred, other.deferred),
        overdue: f(one.overdue, other.overdue),
        discarded: f(one.discarded, other.discarded),
        sleeps: f(one.sleeps, other.sleeps),
        ahead: f(one.ahead, other.ahead),
        joined: f(one.joined, other.joined),
        declined: f(one.declined, other.declined),
        filled: f(one.filled, other.filled),
        merged: f(one.merged, other.merged),
        unmerged: f(one.unmerged, other.unmerged),
        words: f(one.words, other.words),
        conflicts: f(one.conflicts, other.conflicts),
    }
}

impl AddAssign for Meter {
    fn add_assign(&mut self, other: Self) {
        *self = both(self, &other, |one, other| one + other);
    }
}

impl Sub for Meter {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        both(&self, &earlier, |one, other| one.saturating_sub(other))
    }
}
