//! What a lane does for its engine: messages, rights in the view, and who waits for what.

mod post;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use coherence::{Access, Body, Contents, Effect, Message, NodeId, Page, Right, Want};

use self::post::Gathered;
use crate::PAGE_BYTES;
use crate::ahead::Fills;
use crate::clock::{now_ns, ran_ns};
use crate::discards::Mailbox;
use crate::ending::End;
use crate::frame::Frame;
use crate::heat::Heat;
use crate::hold::{Hold, Thread};
use crate::latency::Latency;
use crate::link::Link;
use crate::merging::{HOT, Merging, Todo, unnumbered};
use crate::meter::Meter;
use crate::region::Region;
use crate::userfault::Fault;

/// Threads that wait and pages that are held without the lists having to grow.
const LIST: usize = 256;
/// A thread that waits for a page.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    page: u32,
    access: Access,
    had: Right,
    thread: libc::pid_t,
    since_ns: u64,
    ran_ns: u64,
    /// Another node wants the page already.
    wanted: bool,
}

/// All of a lane but its engine.
#[derive(Debug)]
pub struct Hands {
    pub me: u16,
    pub region: Arc<Region>,
    heat: Arc<Heat>,
    latency: Arc<Latency>,
    /// To each node; none to this one.
    pub links: Vec<Option<Link>>,
    pub meter: Meter,
    /// Whether to ask for pages before anybody wants them.
    pub reads_ahead: Arc<AtomicBool>,
    /// What went wrong in an effect, which can't say so.
    pub failed: Option<End>,
    /// A thread of this node was woken, which may need this CPU.
    pub woke: bool,
    /// A page came ahead: who reads on runs, or is about to, and may need this CPU as well.
    pub brought: bool,
    /// The last page that was granted had never been used.
    pub was_fresh: bool,
    /// What is taken before a thread writes it, and of that what has come and is for nobody to use first: the engine is to know.
    pub fills: Fills,
    pub unheld: Vec<u32>,
    pub holds: Vec<Hold>,
    waiters: Vec<Waiter>,
    /// Pages that were asked for and of which nothing is here: what comes next is probably the first one's bytes.
    landing: VecDeque<u32>,
    /// Requests that go in one write.
    gathered: Gathered,
    /// Where bytes go of which nothing can be guessed.
    scratch: Box<[u8; PAGE_BYTES]>,
    names: Arc<Vec<String>>,
    random: fastrand::Rng,
    /// The guest's page tables, where they are merged.
    pub merging: Option<Box<Merging>>,
    /// What has to be done about them.
    pub todo: VecDeque<Todo>,
    /// The bytes of a page that is offered.
    pub offered: Box<[u8; PAGE_BYTES]>,
    /// What this node's threads give back.
    pub mail: Arc<Mailbox>,
    /// Pages that were forgotten since it was last looked at.
    pub forgotten: Vec<u32>,
    /// Of pages that are just being forgotten, those whose memory was freed before.
    pub freed: Range<u32>,
}

impl Hands {
    pub fn new(
        me: u16,
        region: Arc<Region>,
        heat: Arc<Heat>,
        latency: Arc<Latency>,
        links: Vec<Option<Link>>,
        names: Arc<Vec<String>>,
        mail: Arc<Mailbox>,
    ) -> Self {
        Self {
            me,
            region,
            heat,
            latency,
            links,
            meter: Meter::default(),
            reads_ahead: Arc::default(),
            failed: None,
            woke: false,
            brought: false,
            was_fresh: false,
            fills: Fills::default(),
            unheld: Vec::with_capacity(LIST),
            holds: Vec::with_capacity(LIST),
            waiters: Vec::with_capacity(LIST),
            landing: VecDeque::with_capacity(LIST),
            gathered: Gathered::default(),
            scratch: Box::new([0; PAGE_BYTES]),
            names,
            random: fastrand::Rng::new(),
            merging: None,
            todo: VecDeque::new(),
            offered: Box::new([0; PAGE_BYTES]),
            mail,
            forgotten: Vec::with_capacity(LIST),
            freed: 0..0,
        }
    }

    /// How many threads of this node wait for a page of this lane.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// A thread waits from now on.
    pub fn waits(&mut self, page: u32, access: Access, fault: &Fault) {
        self.waiters.push(Waiter {
            page,
            access,
            had: self.region.mapped(page),
            thread: fault.thread,
            since_ns: now_ns(),
            ran_ns: 0,
            wanted: false,
        });
    }

    /// Notes how long the thread that waits since last has run. Apart from [`Hands::waits`], as there is time for it once the
    /// request is on its way.
    pub fn note_ran(&mut self) {
        if let Some(waiter) = self.waiters.last_mut().filter(|waiter| waiter.ran_ns == 0) {
            waiter.ran_ns = ran_ns(waiter.thread).unwrap_or(0);
        }
    }

    /// The thread that waits since last may do what it wanted already: another one's answer was enough.
    pub fn again(&mut self, page: u32) {
        self.waiters.pop();
        let result = self.region.again(page);
        self.kernel(page, "map", result);
    }

    /// Another node wants a page: which hold that is, if the page has come.
    pub fn want(&mut self, page: u32) -> Option<usize> {
        for waiter in self.waiters.iter_mut().filter(|waiter| waiter.page == page) {
            waiter.wanted = true;
        }
        let index = self.hold_of(page)?;
        self.holds[index].wanted = true;
        Some(index)
    }

    /// What the thread does for which a page came.
    pub fn thread_of(&self, hold: &Hold) -> Thread {
        let Some(thread) = hold.thread else {
            return Thread::Unknown;
        };
        let waits = self.waiters.iter().any(|waiter| waiter.thread == thread);
        let state = if waits { Thread::Elsewhere } else { Thread::Ran };
        ran_ns(thread).map_or(Thread::Unknown, state)
    }

    /// Where bytes are received before it is known whose they are.
    pub fn guess(&mut self) -> *mut u8 {
        match self.landing.front() {
            Some(page) => self.region.bytes(*page).cast(),
            None => self.scratch.as_mut_ptr(),
        }
    }

    /// A page's bytes have begun to come, of which the first may have come to a guess. What comes next may be another node's, so it is
    /// not received to this page: some of its bytes may be there, and the rest is under way.
    pub fn lands(&mut self, page: u32, guess: *mut u8) {
        self.meter.landed += u64::from(self.region.bytes(page).cast() == guess);
        self.lands_no_more(page);
    }

    /// The page to which the bytes beside a message go; none if it has none.
    pub fn place(region: &Region, frame: &Frame, merges: bool) -> io::Result<Option<u32>> {
        let frame = if merges { unnumbered(frame).1 } else { *frame };
        // What is no message at all is refused where messages are taken.
        let Some(message) = Message::decode(&frame).ok().filter(Message::carries_page) else {
            return Ok(None);
        };
        if message.page.0 >= region.pages() {
            return Err(io::Error::other("it sent a page past the region's end"));
        }
        let page = region.unstriped(message.page.0);
        if region.mapped(page) != Right::None {
            return Err(io::Error::other("it sent a page that nobody asked for"));
        }
        Ok(Some(page))
    }

    /// That a node's stream failed.
    pub fn lost(&self, node: usize, error: &io::Error) -> End {
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "it closed its streams".to_owned()
            }
            io::ErrorKind::TimedOut => "it says nothing".to_owned(),
            _ => error.to_string(),
        };
        End::Lost {
            node: self.name(node),
            why,
        }
    }

    /// The protocol asks for what can't be.
    pub fn refused(&mut self, why: &str) {
        self.failed.get_or_insert(End::Nonsense(why.to_owned()));
    }

    /// What comes next is not received to this page before it is known whose it is.
    pub fn lands_no_more(&mut self, page: u32) {
        self.landing.retain(|landing| *landing != page);
    }

    /// Whether a page is the engine's business alone: one that is merged, or about to be, is of no use to ask for.
    pub fn is_plain(&self, page: u32) -> bool {
        let merging = self.merging.as_ref();
        merging.is_none_or(|merging| !merging.merger.has_twin(Page(page)) && !merging.taken.contains(&page))
    }

    /// The hold of a page, if there is one.
    pub fn hold_of(&self, page: u32) -> Option<usize> {
        self.holds.iter().position(|hold| hold.page == page)
    }

    /// Whether a page is not the engine's to give, for it is merged or about to be.
    pub fn is_taken(&self, page: u32) -> bool {
        let merging = self.merging.as_ref();
        merging.is_some_and(|merging| merging.taken.contains(&page))
    }

    /// Opens a page that is not the engine's to all processors here, and lets those go on that wait for it.
    pub fn let_in(&mut self, page: u32) {
        let result = self.region.open(page, Right::Write);
        self.kernel(page, "map", result);
        let waited = self.waiters.len();
        self.waiters.retain(|waiter| waiter.page != page);
        self.woke |= self.waiters.len() < waited;
    }

    /// Opens pages that nobody has used.
    pub fn open_fresh(&mut self, pages: Range<u32>) {
        if !pages.is_empty() {
            let result = self.region.open_fresh(pages.clone());
            self.kernel(pages.start, "map", result);
        }
    }

    /// Gives the memory of pages back, of which this node has nothing that counts.
    pub fn free(&mut self, pages: Range<u32>) {
        let result = self.region.free(pages.clone());
        self.kernel(pages.start, "free", result);
    }

    /// Closes a page to all processors here.
    pub fn shut(&mut self, page: u32) {
        self.holds.retain(|hold| hold.page != page);
        let result = self.region.restrict(page, Right::None);
        self.kernel(page, "restrict", result);
    }

    /// A node as people know it.
    pub fn name(&self, node: usize) -> String {
        self.names
            .get(node)
            .cloned()
            .unwrap_or_else(|| format!("node {node}"))
    }

    fn kernel(&mut self, page: u32, what: &str, result: io::Result<()>) {
        if let Err(error) = result {
            let end = End::Kernel(format!("can't {what} page {page}: {error}"));
            self.failed.get_or_insert(end);
        }
    }

    /// Those who waited for a page go on, and it is held for the first of them.
    fn wake(&mut self, page: u32) {
        let now = now_ns();
        let (mut first, mut wanted) = (None, false);
        let (meter, waiters) = (&mut self.meter, &mut self.waiters);
        waiters.retain(|waiter| {
            if waiter.page != page {
                return true;
            }
            let stalls = meter.stalls(waiter.had, waiter.access);
            let took_ns = now.saturating_sub(waiter.since_ns);
            stalls.count += 1;
            stalls.ns += took_ns;
            if !self.was_fresh {
                self.latency.took(took_ns);
            }
            first.get_or_insert(*waiter);
            wanted |= waiter.wanted;
            false
        });
        self.woke |= first.is_some();
        let thread = first.map(|waiter| waiter.thread);
        // One that was answered at once has had no time to be asked.
        let ran = first.map_or(0, |waiter| match waiter.ran_ns {
            0 => ran_ns(waiter.thread).unwrap_or(0),
            ran => ran,
        });
        let mut hold = Hold::new(page, thread, ran, now, &mut self.random);
        hold.wanted = wanted;
        match self.holds.iter_mut().find(|hold| hold.page == page) {
            Some(earlier) => {
                hold.wanted |= earlier.wanted;
                *earlier = hold;
            }
            None => self.holds.push(hold),
        }
    }
}

/// What an engine requires. What goes wrong is kept until the lane looks ([`Hands::failed`]): the effects that follow are of a node that
/// ends.
impl Hands {
    /// Performs one effect, completely.
    pub fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Send { to, message } => self.send_message(to, message),
            Effect::Restrict { page, to } => self.restrict(page, to),
            // Its bytes were received to where they belong.
            Effect::Store { .. } => {}
            Effect::Grant {
                page,
                right,
                contents,
            } => self.grant(page, right, contents),
            Effect::Forget { page } => self.forget(page),
            Effect::MapPrefetched { page } => self.map_prefetched(page),
        }
    }

    fn send_message(&mut self, to: NodeId, message: Message) {
        let node = usize::from(to.0);
        let page = self.region.unstriped(message.page.0);
        let frame = message.encode();
        let bytes = message
            .carries_page()
            .then(|| self.region.bytes(page).cast_const());
        let with_answers = matches!(
            message.body,
            Body::Ask { .. } | Body::AskAhead | Body::Decline | Body::Copy { .. } | Body::Ownership { .. }
        );
        let asks = match message.body {
            Body::Ask { .. } | Body::AskAhead => true,
            Body::Forward { requester, .. } | Body::ForwardAhead { requester } => requester.0 == self.me,
            _ => false,
        };
        match self.merging.take_if(|_| message.is_causal()) {
            Some(mut merging) => {
                merging.send(self, node, frame, bytes);
                self.merging = Some(merging);
            }
            None if asks && self.gathered.is_open() => self.gather_one(node, &frame, with_answers),
            None => self.post(node, &frame, bytes, with_answers),
        }
        // No bytes come of what is to be forgotten.
        let brings = asks
            && !matches!(
                message.body,
                Body::Forward {
                    want: Want::Discard,
                    ..
                }
            );
        // Of a page that is merged, or about to be, what is here counts, though it may be closed to all.
        let is_nothing = self.region.mapped(page) == Right::None && self.is_plain(page);
        if brings && is_nothing && self.landing.len() < LIST {
            self.landing.push_back(page);
        }
    }

    fn restrict(&mut self, page: Page, to: Right) {
        let page = self.region.unstriped(page.0);
        let result = self.region.restrict(page, to);
        self.kernel(page, "restrict", result);
    }

    fn grant(&mut self, page: Page, right: Right, contents: Contents) {
        let page = self.region.unstriped(page.0);
        self.was_fresh = contents == Contents::Fresh;
        if self.was_fresh {
            self.region.clear(page);
        }
        self.lands_no_more(page);
        let was_asked_ahead = right == Right::Write && self.fills.came(page, self.was_fresh);
        if self.is_taken(page) {
            // Not for processors. A grant to read answers one to write too.
            self.holds.retain(|hold| hold.page != page);
            if self.region.mapped(page) != Right::None {
                self.shut(page);
            }
            return self.todo.push_back(match right {
                Right::Write => Todo::Taken(page),
                _ => Todo::Take(page),
            });
        }
        let result = self.region.open(page, right);
        self.kernel(page, "map", result);
        if contents != Contents::Fresh && self.heat.came(page).is_multiple_of(HOT) && self.merging.is_some() {
            self.todo.push_back(Todo::Suspect(page));
        }
        if was_asked_ahead && !self.waiters.iter().any(|waiter| waiter.page == page) {
            self.meter.filled += 1;
            self.brought = true;
            return self.unheld.push(page);
        }
        self.wake(page);
    }

    fn forget(&mut self, page: Page) {
        let page = self.region.unstriped(page.0);
        if !self.freed.contains(&page) {
            self.free(page..page + 1);
        }
        let waited = self.waiters.len();
        self.waiters.retain(|waiter| waiter.page != page);
        if self.waiters.len() < waited {
            let result = self.region.again(page);
            self.kernel(page, "wake who waits for", result);
            self.woke = true;
        }
        if self.is_taken(page) {
            self.todo.push_back(Todo::Take(page));
        }
        self.forgotten.push(page);
    }

    fn map_prefetched(&mut self, page: Page) {
        let page = self.region.unstriped(page.0);
        self.lands_no_more(page);
        let result = self.region.open(page, Right::Read);
        self.kernel(page, "map", result);
        self.heat.came(page);
        self.brought = true;
    }
}
