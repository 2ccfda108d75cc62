//! What a lane has counted, for who looks from outside.

use std::ops::{AddAssign, Sub};

use coherence::merged::Merges;
use coherence::{Access, Counters, Right};
use serde::{Deserialize, Serialize};

/// Waits of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stalls {
    /// How many.
    pub count: u64,
    /// From when the fault was read until the thread was woken, in all, nanoseconds.
    pub ns: u64,
}

/// Numbers since the node began. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meter {
    /// Threads that waited to read.
    pub reads: Stalls,
    /// Threads that waited to write what they could not read.
    pub writes: Stalls,
    /// Threads that waited to write what they could read.
    pub upgrades: Stalls,
    /// Messages sent to other nodes.
    pub messages: u64,
    /// Of these, with a page.
    pub pages: u64,
    /// What all of that took, bytes.
    pub bytes: u64,
    /// Pages whose bytes came straight to their place.
    pub landed: u64,
    /// Copies given up because others wrote.
    pub invalidated: u64,
    /// Requests that waited until a page had been used.
    pub deferred: u64,
    /// Of these pages, those that went without having been used for sure.
    pub overdue: u64,
    /// Pages that were forgotten, counted where they are managed.
    pub discarded: u64,
    /// Times that the lane slept.
    pub sleeps: u64,
    /// Pages asked for before any thread here wanted them, which came.
    pub ahead: u64,
    /// Threads that wanted such a page before it came, and waited for the rest of its way only. They are among `reads` and `writes`.
    pub joined: u64,
    /// Requests of other nodes for such pages that were declined, as the page was fresh, or in use.
    pub declined: u64,
    /// Pages that came to be written before any thread here wanted them.
    pub filled: u64,
    /// Page tables that were merged.
    pub merged: u64,
    /// Of these, those that are ordinary pages again.
    pub unmerged: u64,
    /// Words of merged pages that were sent.
    pub words: u64,
    /// Words that both nodes had changed: none while the guest's locks are right.
    pub conflicts: u64,
}

impl Meter {
    /// The kind of a wait.
    pub fn stalls(&mut self, had: Right, access: Access) -> &mut Stalls {
        match (access, had) {
            (Access::Read, _) => &mut self.reads,
            (Access::Write, Right::None) => &mut self.writes,
            (Access::Write, _) => &mut self.upgrades,
        }
    }

    /// Takes over what is counted of merged pages.
    pub fn merge(&mut self, merges: &Merges) {
        self.merged = merges.joined;
        self.unmerged = merges.left;
        self.words = merges.sent;
        self.conflicts = merges.conflicts;
    }

    /// Takes over what an engine counts.
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

/// All numbers of two, by `f`.
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
