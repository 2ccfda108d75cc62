//! What a lane does for its engine: it performs effects, each by one of its parts.
//!
//! - [`effects`]: the effects of an event, in order;
//! - [`peers`]: the links to the other nodes, and messages on their way out;
//! - [`waiters`]: the threads that wait; [`residencies`]: the pages that have come and stay for a while;
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
use crate::PAGE_BYTES;
use crate::prefetch::WritePrefetcher;
use crate::clock::{now_ns, ran_ns};
use crate::discards::Mailbox;
use crate::shutdown::End;
use crate::heat::Heat;
use crate::latency::Latency;
use crate::merging::{DeferredWork, Merging};
use crate::meter::Meter;
use crate::min_residency::{MinResidency, Thread};
use crate::region::Region;
use crate::userfault::Fault;

/// Pages in a list without that having to grow.
const LIST: usize = 256;

/// All of a lane but its engine.
#[derive(Debug)]
pub struct EngineDriver {
    pub me: u16,
    pub region: Arc<Region>,
    heat: Arc<Heat>,
    latency: Arc<Latency>,
    pub peers: Peers,
    pub meter: Meter,
    /// Whether to ask for pages before anybody wants them.
    pub prefetches: Arc<AtomicBool>,
    /// What went wrong in an effect, which has no result.
    pub failed: Option<End>,
    /// A thread of this node was woken, which may need this CPU.
    pub woke: bool,
    /// A page came ahead: its reader runs, or is about to, and may need this CPU as well.
    pub mapped_prefetched: bool,
    /// The last page that was granted had never been used.
    pub was_fresh: bool,
    /// What is taken before a thread writes it, and of that what has come and is for nobody to use first: the engine is to know.
    pub write_prefetcher: WritePrefetcher,
    pub unheld: Vec<u32>,
    pub residencies: Residencies,
    pub waiters: Waiters,
    pub landing: Landing,
    /// The guest's page tables, where they are merged.
    pub merging: Option<Box<Merging>>,
    /// What has to be done about them.
    pub deferred: VecDeque<DeferredWork>,
    /// The bytes of a page that is offered.
    pub offered: Box<[u8; PAGE_BYTES]>,
    /// What this node's threads give back.
    pub mailbox: Arc<Mailbox>,
    /// Pages that were forgotten since it was last looked at.
    pub forgotten: Vec<u32>,
    /// Of pages that are just being forgotten, those whose memory was freed before.
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
            offered: Box::new([0; PAGE_BYTES]),
            mailbox,
            forgotten: Vec::with_capacity(LIST),
            freed: 0..0,
        }
    }

    /// A thread waits from now on.
    pub fn waits(&mut self, page: u32, access: Access, fault: &Fault) {
        self.waiters.add(page, access, self.region.mapped(page), fault);
    }

    /// The thread that waits since last may do what it wanted already: another one's answer was enough.
    pub fn retry_fault(&mut self, page: u32) {
        self.waiters.remove_last();
        let result = self.region.retry_fault(page);
        self.kernel(page, "map", result);
    }

    /// Another node wants a page: where in the list of residencies it is, if it has come.
    pub fn want(&mut self, page: u32) -> Option<usize> {
        self.waiters.want(page);
        let index = self.residencies.index_of(page)?;
        self.residencies.want(index);
        Some(index)
    }

    /// What the thread does for which a page came.
    pub fn thread_of(&self, residency: &MinResidency) -> Thread {
        let Some(thread) = residency.thread else {
            return Thread::Unknown;
        };
        let waits = self.waiters.has_thread(thread);
        let state = if waits { Thread::Elsewhere } else { Thread::Ran };
        ran_ns(thread).map_or(Thread::Unknown, state)
    }

    /// Where bytes are received before it is known whose they are.
    pub fn guess(&mut self) -> *mut u8 {
        self.landing.guess(&self.region)
    }

    /// A page's bytes have begun to come, of which the first may have come to a guess. What comes next may be another node's, so it is
    /// not received to this page: some of its bytes may be there, and the rest is under way.
    pub fn lands(&mut self, page: u32, guess: *mut u8) {
        self.meter.landed += u64::from(self.region.bytes(page).cast() == guess);
        self.landing.cancel(page);
    }

    /// The protocol asks for what can't be.
    pub fn refused(&mut self, why: &str) {
        self.failed.get_or_insert(End::ProtocolError(why.to_owned()));
    }

    /// Whether a page is the engine's business alone: one that is merged, or about to be, is of no use to ask for.
    pub fn is_plain(&self, page: u32) -> bool {
        let merging = self.merging.as_ref();
        merging.is_none_or(|merging| !merging.merger.has_twin(Page(page)) && !merging.taken.contains(&page))
    }

    /// Whether a page is not the engine's to give, for it is merged or about to be.
    pub fn is_taken(&self, page: u32) -> bool {
        let merging = self.merging.as_ref();
        merging.is_some_and(|merging| merging.taken.contains(&page))
    }

    /// Opens a page that is not the engine's to all processors here, and lets those go on that wait for it.
    pub fn open_to_all(&mut self, page: u32) {
        let result = self.region.open(page, Right::Write);
        self.kernel(page, "map", result);
        self.woke |= self.waiters.remove(page, |_| {});
    }

    /// Opens pages that nobody has used.
    pub fn map_zero(&mut self, pages: Range<u32>) {
        if !pages.is_empty() {
            let result = self.region.map_zero(pages.clone());
            self.kernel(pages.start, "map", result);
        }
    }

    /// Gives the memory of pages back, of which this node has nothing that counts.
    pub fn free(&mut self, pages: Range<u32>) {
        let result = self.region.free(pages.clone());
        self.kernel(pages.start, "free", result);
    }

    /// Closes a page to all processors here.
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
        page: Option<*const [u8; PAGE_BYTES]>,
        with_answers: bool,
    ) {
        let result = self.peers.post(to, frames, page, with_answers);
        self.note(result);
    }

    /// Sends pieces of what is said about merged pages ([`Peers::post_fragments`]).
    pub fn post_fragments(&mut self, to: usize, frames: &[u8]) {
        let result = self.peers.post_fragments(to, frames);
        self.note(result);
    }

    /// Sends the requests that were gathered ([`Peers::send_gathered`]).
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

    /// Those who waited for a page go on, and it stays for the first of them.
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
        // One that was answered at once has had no time to be asked.
        let ran = first.map_or(0, |waiter| match waiter.ran_ns {
            0 => ran_ns(waiter.thread).unwrap_or(0),
            ran => ran,
        });
        self.residencies.begin(page, thread, ran, now, wanted);
    }
}
