//! Causal order of messages that other threads send: each follows the diffs of what this node's processors
//! did before, and is handled after its predecessors (`coherence::merged`, rules 1 and 2).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use locks::IgnorePoison;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::batches::{AHEAD_MAX, Batches, SHARERS_MAX, ahead};

/// Time after which the predecessors of a message will never arrive. Each node sends its diffs to all others
/// at once, and sends nothing more if a node takes nothing for a third of this time.
pub const AWAITED_MAX: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 30 });

const TOO_FAR: u32 = AHEAD_MAX + 1;

/// State shared by the page server and the threads that send or receive messages.
#[derive(Debug)]
pub struct Causal {
    me: usize,
    nodes: usize,
    /// CR3 of each guest processor of this node at its last exit; 0 for a processor that is not here.
    roots: Vec<AtomicU64>,
    /// Pages of the region with the guest's own kernel.
    pinned: Range<u32>,
    /// Last CR3 of any processor that named one of these pages.
    last_pinned: AtomicU64,
    /// Wakes the page server.
    event: EventFd,
    asked: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the last request that was answered.
    answered: u64,
    /// Vector time of this node's messages as of the last answer.
    sent: Batches,
    /// Batches of the other nodes that were applied.
    applied: Batches,
    /// Node that sent a message whose predecessors can't exist, and how that showed.
    refused: Option<(usize, &'static str)>,
    is_over: bool,
}

impl Causal {
    /// Creates the state of node `me` of `nodes`, for a guest with `processors` processors whose kernel is in
    /// the pages `pinned`.
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

    /// Records the CR3 of a processor that has left the guest, or that the processor left this node (`None`).
    pub fn root(&self, processor: usize, cr3: Option<u64>) {
        if let Some(root) = self.roots.get(processor) {
            root.store(cr3.unwrap_or(0), Ordering::Relaxed);
        }
        let page = cr3.and_then(coherence::merged::root);
        if page.is_some_and(|page| self.pinned.contains(&page.0)) {
            self.last_pinned.store(cr3.unwrap_or(0), Ordering::Relaxed);
        }
    }

    /// Waits until the diffs of this node's processors are sent. The caller does so before a message
    /// by which processors of another node may learn of it; the processor that did it is out of the guest.
    /// Returns the message's vector time, for [`Causal::after`] at the receiver.
    pub fn before(&self) -> Batches {
        let number = self.ask();
        let mut state = self.state();
        while state.answered < number && !state.is_over {
            state = self.wait(state);
        }
        state.sent
    }

    /// Waits until the predecessors of a message of node `from` are applied. If they can't exist, the memory
    /// ends instead.
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
                // The page server is about to end the memory.
                Some(_) => self.wait(state),
                None => self.wait_until(state, until),
            };
        }
    }

    /// Returns by how many batches of one node a message is ahead of the applied ones. The entry of this node
    /// is ignored.
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

    /// Wakes the page server. Returns the request's number.
    fn ask(&self) -> u64 {
        let number = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        // The counter can't overflow.
        let _ = self.event.write(1);
        number
    }

    /// Returns the number of the last request.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Acquire)
    }

    /// Returns the descriptor that wakes the page server.
    pub(crate) fn event(&self) -> &EventFd {
        &self.event
    }

    /// Iterates over the processors and their CR3, `None` for one that is not here.
    pub(crate) fn roots(&self) -> impl Iterator<Item = (usize, Option<u64>)> + '_ {
        let root = |root: &AtomicU64| Some(root.load(Ordering::Relaxed)).filter(|cr3| *cr3 != 0);
        self.roots.iter().map(root).enumerate()
    }

    /// Returns the pages of the guest's own kernel.
    pub(crate) fn pinned(&self) -> Range<u32> {
        self.pinned.clone()
    }

    /// Returns the last CR3 that named a page of the guest's kernel; 0 if none has.
    pub(crate) fn last_pinned(&self) -> u64 {
        self.last_pinned.load(Ordering::Relaxed)
    }

    /// Answers all requests up to `number` with the vector time of messages sent now.
    pub(crate) fn answer(&self, number: u64, sent: Batches) {
        let mut state = self.state();
        (state.answered, state.sent) = (number, sent);
        self.changed.notify_all();
    }

    /// Records the batches of the other nodes that have been applied.
    pub(crate) fn applied(&self, batches: Batches) {
        self.state().applied = batches;
        self.changed.notify_all();
    }

    /// Returns the node whose message has predecessors that can't exist, and how that showed. The memory must
    /// end.
    pub(crate) fn refused(&self) -> Option<(usize, &'static str)> {
        self.state().refused
    }

    /// Ends all waits.
    pub(crate) fn close(&self) {
        self.state().is_over = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).ignore_poison()
    }

    fn wait_until<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let rest = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout(state, rest);
        waited.ignore_poison().0
    }
}
