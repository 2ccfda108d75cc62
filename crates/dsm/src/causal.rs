//! What threads other than the lane have to do with merged page tables: a message to another node by any way of their own goes
//! after what this node's processors changed, and is acted on after what it comes after (`coherence::merged`, rules 1 and 2).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::batches::{AHEAD_MAX, Batches, SHARERS_MAX, ahead};

/// Changes that a message comes after are here after this time, or will never be: each node sends them to all at once, and to nobody
/// any more if one takes nothing for a third of it.
pub const AWAITED_MAX: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

const TOO_FAR: u32 = AHEAD_MAX + 1;

/// Between the lane and everybody else.
#[derive(Debug)]
pub struct Causal {
    me: usize,
    nodes: usize,
    /// The CR3 of each of the guest's processors that is here, as it was when it left the guest last; 0 of one that is not.
    roots: Vec<AtomicU64>,
    /// Of the region's pages, those of the guest's own kernel.
    pinned: Range<u32>,
    /// The last CR3 of any that named one of these.
    last_pinned: AtomicU64,
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
    /// What a message comes after that this node sends, as of the last answer.
    sent: Batches,
    /// Batches of the others that were applied.
    applied: Batches,
    /// Who sent what can't be, and what that is.
    refused: Option<(usize, &'static str)>,
    is_over: bool,
}

impl Causal {
    /// Of node `me` of so many, for so many processors of a guest whose kernel is in these pages of the region.
    ///
    /// # Errors
    /// If the kernel has no descriptor left.
    pub(crate) fn new(me: usize, nodes: usize, processors: usize, pinned: Range<u32>) -> nix::Result<Self> {
        Ok(Self {
            me,
            nodes,
            pinned,
            last_pinned: AtomicU64::new(0),
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
        if page.is_some_and(|page| self.pinned.contains(&page.0)) {
            self.last_pinned.store(cr3.unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Call it before a message by which processors of another node may learn what those of this one did; who did it is out of the
    /// guest. Returns what the message comes after, for [`Causal::after`] where it is received.
    pub fn before(&self) -> Batches {
        let number = self.ask();
        let mut state = self.state();
        while state.answered < number && !state.is_over {
            state = self.wait(state);
        }
        state.sent
    }

    /// Waits until what a message of node `from` comes after is here. If that can't be, the memory ends first.
    pub fn after(&self, from: usize, batches: &Batches) {
        let mut state = self.state();
        let mut limit = None;
        while !state.is_over {
            let refused = match self.ahead(&state.applied, batches) {
                0 => return,
                TOO_FAR.. => Some("its packet comes after changes that there can't be"),
                _ if limit.is_some_and(|limit| Instant::now() >= limit) => {
                    Some("its packet comes after changes that do not come")
                }
                _ => None,
            };
            if let Some(why) = refused
                && state.refused.is_none()
            {
                state.refused = Some((from, why));
                self.ask();
            }
            let until = *limit.get_or_insert_with(|| Instant::now() + AWAITED_MAX);
            state = match state.refused {
                // The lane is about to end.
                Some(_) => self.wait(state),
                None => self.wait_until(state, until),
            };
        }
    }

    /// By how many batches of one node a message is ahead of what was applied. What it says of this node's own counts for nothing.
    fn ahead(&self, applied: &Batches, batches: &Batches) -> u32 {
        let others = (0..SHARERS_MAX).filter(|node| *node != self.me);
        let ahead = others.map(|node| match (node < self.nodes, batches.of(node)) {
            (true, count) => ahead(applied.of(node), count),
            // A node that does not exist sends none.
            (false, 0) => 0,
            (false, _) => u32::MAX,
        });
        ahead.max().unwrap_or(0)
    }

    /// Wakes the lane. The request's number.
    fn ask(&self) -> u64 {
        let number = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        // It can't be full.
        let _ = self.event.write(1);
        number
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
    pub(crate) fn pinned(&self) -> Range<u32> {
        self.pinned.clone()
    }

    /// The last CR3 that named a page of the guest's kernel; 0 if none has.
    pub(crate) fn last_pinned(&self) -> u64 {
        self.last_pinned.load(Ordering::Relaxed)
    }

    /// Requests up to this one come after so many batches.
    pub(crate) fn answer(&self, number: u64, sent: Batches) {
        let mut state = self.state();
        (state.answered, state.sent) = (number, sent);
        self.changed.notify_all();
    }

    /// So many batches of the other nodes have been applied.
    pub(crate) fn applied(&self, batches: Batches) {
        self.state().applied = batches;
        self.changed.notify_all();
    }

    /// Who sent a packet that comes after what can't be, and how that shows. The memory is to end for it.
    pub(crate) fn refused(&self) -> Option<(usize, &'static str)> {
        self.state().refused
    }

    /// Nobody is to wait any more.
    pub(crate) fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let rest = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout(state, rest);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
