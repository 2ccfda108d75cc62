//! The driver of a page server's engine: it performs the engine's effects.
//!
//! - [`effects`]: the effects of an event, in order;
//! - [`peers`]: the links to the other nodes, and outgoing messages;
//! - [`waiters`]: the threads that wait; [`residencies`]: the pages that stay for a minimum time;
//! - [`landing`]: where bytes of pages are received.

mod effects;
pub mod landing;
mod peers;
mod residencies;
mod waiters;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coherence::{Access, Page, Right};

use self::landing::Landing;
pub use self::peers::Peers;
use self::residencies::Residencies;
use self::waiters::Waiters;
use crate::PAGE_LEN;
use crate::clock::{now_ns, ran_ns};
use crate::discards::Mailbox;
use crate::heat::Heat;
use crate::latency::Latency;
use crate::merging::{DeferredWork, Merging};
use crate::meter::Meter;
use crate::min_residency::{MinResidency, Thread};
use crate::prefetch::WritePrefetcher;
use crate::region::Region;
use crate::shutdown::End;
use crate::userfault::Fault;

/// Initial capacity of lists of pages.
const LIST: usize = 256;

/// State of a page server except its engine.
#[derive(Debug)]
pub struct EngineDriver {
    pub me: u16,
    pub region: Arc<Region>,
    heat: Arc<Heat>,
    latency: Arc<Latency>,
    pub peers: Peers,
    pub meter: Meter,
    /// Whether pages are prefetched.
    pub prefetches: Arc<AtomicBool>,
    /// First error of an effect, as effects have no result.
    pub failed: Option<End>,
    /// A thread of this node was woken and may need this CPU.
    pub woke: bool,
    /// A prefetched page was mapped: its reader runs, or is about to, and may need this CPU as well.
    pub mapped_prefetched: bool,
    /// The page granted last was zero.
    pub was_fresh: bool,
    /// Write prefetches, and in `unheld` the arrived pages that no thread waits for: the engine must end
    /// their hold.
    pub write_prefetcher: WritePrefetcher,
    pub unheld: Vec<u32>,
    pub residencies: Residencies,
    pub waiters: Waiters,
    pub landing: Landing,
    /// The guest's merged page tables, if they are merged.
    pub merging: Option<Box<Merging>>,
    /// Work on merged pages that waits until the merger or the engine returns.
    pub deferred: VecDeque<DeferredWork>,
    /// Bytes of the page that is being offered.
    pub offered: Box<[u8; PAGE_LEN]>,
    /// Blocks that this node's threads give back.
    pub mailbox: Arc<Mailbox>,
    /// Pages discarded since the list was last read.
    pub forgotten: Vec<u32>,
    /// Pages being discarded whose memory was freed before.
    pub freed: Range<u32>,
}

impl EngineDriver {
    pub fn new(
        me: u16,
        region: Arc<Region>,
        heat: Arc<Heat>,
        latency: Arc<Latency>,
        peers: Peers,
        mailbox: Arc<Mailbox>,
    ) -> Self {
        Self {
            me,
            region,
            heat,
            latency,
            peers,
            meter: Meter::default(),
            prefetches: Arc::default(),
            failed: None,
            woke: false,
            mapped_prefetched: false,
            was_fresh: false,
            write_prefetcher: WritePrefetcher::default(),
            unheld: Vec::with_capacity(LIST),
            residencies: Residencies::default(),
            waiters: Waiters::default(),
            landing: Landing::default(),
            merging: None,
            deferred: VecDeque::new(),
            offered: Box::new([0; PAGE_LEN]),
            mailbox,
            forgotten: Vec::with_capacity(LIST),
            freed: 0..0,
        }
    }

    /// Adds a thread that waits for a page.
    pub fn add_waiter(&mut self, page: u32, access: Access, fault: &Fault) {
        self.waiters.add(page, access, self.region.mapped(page), fault);
    }

    /// Wakes the last thread added: the right is there already.
    pub fn retry_fault(&mut self, page: u32) {
        self.waiters.remove_last();
        let result = self.region.retry_fault(page);
        self.kernel(page, "map", result);
    }

    /// Records that another node requests a page. Returns the index of its residency, if the page has one.
    pub fn want(&mut self, page: u32) -> Option<usize> {
        self.waiters.want(page);
        let index = self.residencies.index_of(page)?;
        self.residencies.want(index);
        Some(index)
    }

    /// Returns what the thread does for which a page arrived.
    pub fn thread_of(&self, residency: &MinResidency) -> Thread {
        let Some(thread) = residency.thread else {
            return Thread::Unknown;
        };
        let waits = self.waiters.has_thread(thread);
        let state = if waits { Thread::Elsewhere } else { Thread::Ran };
        ran_ns(thread).map_or(Thread::Unknown, state)
    }

    /// Returns where bytes are received before their page is known.
    pub fn guess(&mut self) -> *mut u8 {
        self.landing.guess(&self.region)
    }

    /// Handles the first bytes of a page, which may have arrived at the guessed place. Later bytes may belong
    /// to another page, so this page is no longer a guess.
    pub fn record_landing(&mut self, page: u32, guess: *mut u8) {
        self.meter.landed += u64::from(self.region.bytes(page).cast() == guess);
        self.landing.cancel(page);
    }

    /// Records a protocol error as the reason of the end.
    pub fn refused(&mut self, why: &str) {
        self.failed.get_or_insert(End::ProtocolError(why.to_owned()));
    }

    /// Returns whether a page is the engine's alone. A merged page, or one about to be, is not prefetched.
    pub fn is_plain(&self, page: u32) -> bool {
        let merging = self.merging.as_ref();
        merging.is_none_or(|merging| !merging.merger.has_twin(Page(page)) && !merging.taken.contains(&page))
    }

    /// Returns whether the engine must not grant a page, as it is merged or about to be.
    pub fn is_taken(&self, page: u32) -> bool {
        let merging = self.merging.as_ref();
        merging.is_some_and(|merging| merging.taken.contains(&page))
    }

    /// Opens a merged page to all processors of this node, and wakes the threads that wait for it.
    pub fn open_to_all(&mut self, page: u32) {
        let result = self.region.open(page, Right::Write);
        self.kernel(page, "map", result);
        self.woke |= self.waiters.remove(page, |_| {});
    }

    /// Maps pages that no node has used.
    pub fn map_zero(&mut self, pages: Range<u32>) {
        if !pages.is_empty() {
            let result = self.region.map_zero(pages.clone());
            self.kernel(pages.start, "map", result);
        }
    }

    /// Frees the memory of pages of which this node has no valid bytes.
    pub fn free(&mut self, pages: Range<u32>) {
        let result = self.region.free(pages.clone());
        self.kernel(pages.start, "free", result);
    }

    /// Revokes all rights of this node's processors to a page.
    pub fn revoke(&mut self, page: u32) {
        self.residencies.end_page(page);
        let result = self.region.restrict(page, Right::None);
        self.kernel(page, "restrict", result);
    }

    /// Sends a message of the engine ([`Peers::post`]).
    pub fn post(
        &mut self,
        to: usize,
        frames: &[u8],
        page: Option<*const [u8; PAGE_LEN]>,
        with_answers: bool,
    ) {
        let result = self.peers.post(to, frames, page, with_answers);
        self.note(result);
    }

    /// Sends fragments of a merge payload ([`Peers::post_fragments`]).
    pub fn post_fragments(&mut self, to: usize, frames: &[u8]) {
        let result = self.peers.post_fragments(to, frames);
        self.note(result);
    }

    /// Sends the gathered requests ([`Peers::send_gathered`]).
    pub fn send_gathered(&mut self) {
        let result = self.peers.send_gathered();
        self.note(result);
    }

    fn note(&mut self, result: Result<(), End>) {
        if let Err(end) = result {
            self.failed.get_or_insert(end);
        }
    }

    fn kernel(&mut self, page: u32, what: &str, result: io::Result<()>) {
        if let Err(error) = result {
            let end = End::Kernel(format!("can't {what} page {page}: {error}"));
            self.failed.get_or_insert(end);
        }
    }

    /// Wakes the threads that wait for a page. The page stays for the first of them.
    fn wake(&mut self, page: u32) {
        let now = now_ns();
        let (mut first, mut wanted) = (None, false);
        let (meter, latency, was_fresh) = (&mut self.meter, &self.latency, self.was_fresh);
        self.waiters.remove(page, |waiter| {
            let stalls = meter.stalls(waiter.had, waiter.access);
            let took_ns = now.saturating_sub(waiter.since_ns);
            stalls.count += 1;
            stalls.ns += took_ns;
            if !was_fresh {
                latency.record(took_ns);
            }
            first.get_or_insert(*waiter);
            wanted |= waiter.wanted;
        });
        self.woke |= first.is_some();
        let thread = first.map(|waiter| waiter.thread);
        // A fault that was served at once left no time to read the thread's CPU time.
        let ran = first.map_or(0, |waiter| match waiter.ran_ns {
            0 => ran_ns(waiter.thread).unwrap_or(0),
            ran => ran,
        });
        self.residencies.begin(page, thread, ran, now, wanted);
    }
}
