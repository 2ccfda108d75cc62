//! What threads other than the lane have to do with merged page tables: a message to another node by any way of their own goes
//! after what this node's processors changed, and is acted on after what it comes after (`coherence::merged`, rules 1 and 2).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Between the lane and everybody else.
#[derive(Debug)]
pub struct Causal {
    /// The CR3 of each of the guest's processors that is here, as it was when it left the guest last; 0 of one that is not.
    roots: Vec<AtomicU64>,
    /// Of the region's pages, those of the guest's own kernel.
    standing: Range<u32>,
    /// The last CR3 of any that named one of these.
    stood: AtomicU64,
    /// Wakes the lane.
    event: EventFd,
    asked: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Requests that were answered.
    answered: u64,
    /// Batches that this node has sent, as of the last answer.
    sent: u32,
    /// Batches of the other node that were applied.
    applied: u32,
    is_over: bool,
}

impl Causal {
    /// For so many processors of a guest whose kernel is in these pages of the region.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub fn new(processors: usize, standing: Range<u32>) -> nix::Result<Self> {
        Ok(Self {
            standing,
            stood: AtomicU64::new(0),
            roots: (0..processors).map(|_| AtomicU64::new(0)).collect(),
            event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            asked: AtomicU64::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// A processor has this CR3, and is out of the guest; or it is not here (`None`).
    pub fn root(&self, processor: usize, cr3: Option<u64>) {
        if let Some(root) = self.roots.get(processor) {
            root.store(cr3.unwrap_or(0), Ordering::Relaxed);
        }
        let page = cr3.and_then(coherence::merged::root);
        if page.is_some_and(|page| self.standing.contains(&page.0)) {
            self.stood.store(cr3.unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Call it before a message by which processors of another node may learn what those of this one did; who did it is out of the
    /// guest. Returns what the message comes after, for [`Causal::after`] where it is received.
    pub fn before(&self) -> u32 {
        let number = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        // It can't be full.
        let _ = self.event.write(1);
        let mut state = self.state();
        while state.answered < number && !state.is_over {
            state = self.wait(state);
        }
        state.sent
    }

    /// Waits until what a message comes after is here.
    pub fn after(&self, count: u32) {
        let mut state = self.state();
        while !has_come(state.applied, count) && !state.is_over {
            state = self.wait(state);
        }
    }

    /// Requests so far.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Acquire)
    }

    /// What the lane waits on.
    pub(crate) fn event(&self) -> &EventFd {
        &self.event
    }

    /// The processors that are here, and their CR3.
    pub(crate) fn roots(&self) -> impl Iterator<Item = (usize, Option<u64>)> + '_ {
        let root = |root: &AtomicU64| Some(root.load(Ordering::Relaxed)).filter(|cr3| *cr3 != 0);
        self.roots.iter().map(root).enumerate()
    }

    /// The pages of the guest's own kernel.
    pub(crate) fn standing(&self) -> Range<u32> {
        self.standing.clone()
    }

    /// The last CR3 that named a page of the guest's kernel; 0 if none has.
    pub(crate) fn stood(&self) -> u64 {
        self.stood.load(Ordering::Relaxed)
    }

    /// Requests up to this one come after so many batches.
    pub(crate) fn answer(&self, number: u64, sent: u32) {
        let mut state = self.state();
        (state.answered, state.sent) = (number, sent);
        self.changed.notify_all();
    }

    /// So many batches of the other node have been applied.
    pub(crate) fn applied(&self, count: u32) {
        self.state().applied = count;
        self.changed.notify_all();
    }

    /// Nobody is to wait any more.
    pub(crate) fn over(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether so many batches are no fewer than `wanted`, where both may have gone through zero.
pub(crate) fn has_come(count: u32, wanted: u32) -> bool {
    count.wrapping_sub(wanted) < u32::MAX / 2
}
