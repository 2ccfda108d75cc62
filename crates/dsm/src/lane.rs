//! A thread that serves a part of a node's pages, alone: it has their userfaultfd, their engine and its own streams to every
//! other node, so that it shares nothing with the others.
//!
//! It answers whatever has come, and when there is nothing it polls for a while and then sleeps. It does not poll right after
//! it has woken a thread, or has received a page ahead for one that runs, as that thread may need the CPU that it is on: a lane is best
//! on the CPU of the threads that it serves, where a fault and its answer are two switches (3 us) instead of two interrupts between
//! CPUs (20 to 40 us).

pub(crate) mod discarding;
mod merged;
mod waiting;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use coherence::{
    Access, Body, EFFECTS_MAX, Effect, Engine, Faulted, Malformed, Message, NodeId, Page, Right, Want,
};
use urpc::poll::PollTime;

use self::discarding::Discarding;
use crate::ahead::Ahead;
use crate::clock::now_ns;
use crate::driver::EngineDriver;
use crate::driver::landing::Landing;
use crate::ending::{End, Ending};
use crate::frame::{DriverKind, Frame, FrameClass, classify, driver_frame, page_of};
use crate::meter::Meter;
use crate::min_residency::{BOUND_NS, MinResidency, Thread, Verdict};
use crate::node::Polls;
use crate::userfault::{FAULTS_MAX, Fault};

/// What sleeping and being woken costs, nanoseconds: 20 us from one CPU to another here, more when it has gone idle.
const SLEEP_NS: u64 = 25_000;
/// Pages held before those that nobody wants are looked through.
const HOLDS: usize = 64;
/// Pages that are taken together when none of them was used before.
const AROUND: u32 = 16;
/// Looks at the streams while a reply is awaited, for each look at the userfaultfd.
const LOOKS: u32 = 8;

/// What a lane needs.
#[derive(Debug)]
pub struct Lane {
    number: u16,
    engine: Engine,
    /// Of the event that the engine handles now; empty between two events.
    effects: Vec<Effect>,
    driver: EngineDriver,
    ending: Arc<Ending>,
    shared: Arc<Mutex<Meter>>,
    /// How long a thread runs that has used its page for sure.
    enough_ns: Arc<AtomicU64>,
    /// Who polls at real-time priority keeps other lanes from its CPU, those that it waits for too.
    polls: Polls,
    /// While a thread waits here, and while none does.
    asked: PollTime,
    idle: PollTime,
    /// The end's, the userfaultfd, that of who gives pages back, that of who asks about merged pages if there are any, and each
    /// node's streams.
    polled: Vec<libc::pollfd>,
    /// Threads may wait that have not been heard.
    faulted: bool,
    discarding: Discarding,
    ahead: Ahead,
}

impl Lane {
    pub fn new(
        number: u16,
        engine: Engine,
        driver: EngineDriver,
        ending: Arc<Ending>,
        shared: Arc<Mutex<Meter>>,
        enough_ns: Arc<AtomicU64>,
        polls: Polls,
    ) -> Self {
        let mut descriptors = vec![
            ending.event().as_raw_fd(),
            driver.region.userfault(number).as_fd().as_raw_fd(),
            driver.mail.event().as_fd().as_raw_fd(),
        ];
        if let Some(merging) = &driver.merging {
            descriptors.push(merging.causal.event().as_fd().as_raw_fd());
        }
        for link in driver.peers.links.iter().flatten() {
            descriptors.extend(link.streams().iter().map(AsRawFd::as_raw_fd));
        }
        let polled = descriptors
            .into_iter()
            .map(|fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        Self {
            number,
            engine,
            effects: Vec::with_capacity(EFFECTS_MAX),
            driver,
            ending,
            shared,
            enough_ns,
            polls,
            asked: PollTime::new(SLEEP_NS),
            idle: PollTime::new(SLEEP_NS),
            polled,
            faulted: true,
            discarding: Discarding::default(),
            ahead: Ahead::default(),
        }
    }

    /// Serves until the end, and tells the other nodes why.
    pub fn run(mut self) {
        let ending = self.ending.clone();
        let is_first = match self.serve() {
            Err(end) => ending.set(end),
            Ok(()) => false,
        };
        if let Some(end) = ending.reason() {
            self.say_end(end);
        }
        if let Some(merging) = &self.driver.merging {
            merging.causal.over();
        }
        self.driver.mail.over();
        self.publish();
        ending.lane_told();
        if is_first {
            ending.call_hook();
        }
    }

    fn serve(&mut self) -> Result<(), End> {
        let mut idle_since = None;
        let mut looks: u32 = 0;
        loop {
            looks = looks.wrapping_add(1);
            let mut busy = false;
            if self.faulted && (idle_since.is_none() || looks.is_multiple_of(LOOKS)) {
                busy |= self.take_faults()?;
            }
            busy |= self.take_messages()?;
            let look_again_ns = self.let_go()?;
            let go_on_ns = self.discard()?;
            self.settle()?;
            if busy && !self.threads().want_the_cpu() {
                if let Some(since) = idle_since.take() {
                    self.patience().waited(now_ns() - since, false);
                }
                continue;
            }
            let now = now_ns();
            let since = *idle_since.get_or_insert(now);
            let may_poll = self.threads().let_poll(self.polls);
            if may_poll && now - since < self.patience().poll_ns() {
                self.look_at_all();
                std::hint::spin_loop();
                continue;
            }
            if self.ending.reason().is_some() {
                return Ok(());
            }
            self.publish();
            self.sleep([look_again_ns, go_on_ns].into_iter().flatten().min());
            self.patience().waited(now_ns() - since, true);
            (self.driver.woke, self.driver.brought) = (false, false);
            idle_since = None;
        }
    }

    /// Passes an event to the engine, and performs its effects in their order before it returns.
    fn turn<T>(&mut self, event: impl FnOnce(&mut Engine, &mut Vec<Effect>) -> T) -> T {
        let result = event(&mut self.engine, &mut self.effects);
        for effect in self.effects.drain(..) {
            self.driver.perform(effect);
        }
        result
    }

    /// Takes what faults there are. Whether there were any.
    fn take_faults(&mut self) -> Result<bool, End> {
        let mut faults = [Fault::NONE; FAULTS_MAX];
        let count = self
            .driver
            .region
            .userfault(self.number)
            .read(&mut faults)
            .map_err(|error| End::Kernel(format!("userfaultfd can't be read: {error}")))?;
        self.faulted = count == FAULTS_MAX;
        for fault in &faults[..count] {
            let Some(page) = self.driver.region.page_at(fault.address) else {
                return Err(End::Kernel(format!(
                    "a fault at {:#x}, outside the region",
                    fault.address
                )));
            };
            let access = if fault.write { Access::Write } else { Access::Read };
            self.driver.waits(page, access, fault);
            match self.driver.merging.as_ref() {
                // One that is leaving is closed already.
                Some(merging)
                    if merging.merger.is_merged(Page(page))
                        && self.driver.region.mapped(page) != Right::None =>
                {
                    self.driver.retry_fault(page);
                    self.check()?;
                    continue;
                }
                // It goes on when the page is open to all, or the engine's again.
                Some(merging) if merging.taken.contains(&page) => continue,
                _ => {}
            }
            let striped = Page(self.driver.region.striped(page));
            self.driver.peers.gather();
            let faulted = self.turn(|engine, effects| engine.fault(striped, access, effects));
            match access {
                _ if faulted != Faulted::Waits => {}
                Access::Read => self.ask_ahead(page),
                Access::Write => self.ask_to_fill(page),
            }
            self.driver.send_gathered();
            match faulted {
                Faulted::Allowed => self.driver.retry_fault(page),
                Faulted::Granted => self.claim_around(page),
                Faulted::Waits => self.driver.waiters.note_ran(),
            }
            self.check()?;
        }
        Ok(count > 0)
    }

    /// Asks for pages after one that was just asked for, if it is of a stream of them.
    fn ask_ahead(&mut self, page: u32) {
        if !self.driver.reads_ahead.load(Ordering::Relaxed) {
            return;
        }
        // Of this lane, and most probably of the same manager.
        let end = self.driver.region.block_of(page, u32::MAX).end;
        let region = &self.driver.region;
        let is_here = |page| region.mapped(page) != Right::None;
        for page in self.ahead.reads(page, end, is_here) {
            if !self.ahead.was_taken(page) && self.driver.is_plain(page) {
                let striped = Page(self.driver.region.striped(page));
                self.turn(|engine, effects| engine.ask_ahead(striped, effects));
            }
        }
    }

    /// Takes pages after one that is about to be written, if it is of a stream of pages that nobody had written. For the protocol this is
    /// a fault as any other, whose page has been used as soon as it comes.
    fn ask_to_fill(&mut self, page: u32) {
        let region = &self.driver.region;
        if !self.driver.reads_ahead.load(Ordering::Relaxed) || region.mapped(page) != Right::None {
            return;
        }
        let end = region.block_of(page, u32::MAX).end;
        let more = (self.driver.fills).writes(page, end, |page| region.mapped(page) != Right::None);
        for page in more {
            let striped = Page(self.driver.region.striped(page));
            if self.driver.is_plain(page) && self.engine.is_absent(striped) {
                self.driver.fills.asks(page);
                self.turn(|engine, effects| engine.fault(striped, Access::Write, effects));
            }
        }
    }

    /// Takes pages beside one that was just used for the first time, of those that nobody has used: who fills memory that begins here
    /// goes on there, and would come back for each.
    fn claim_around(&mut self, page: u32) {
        if !std::mem::take(&mut self.driver.was_fresh) {
            return;
        }
        let block = self.driver.region.block_of(page, AROUND);
        let mut end = page + 1;
        while end < block.end && self.engine.claim(Page(self.driver.region.striped(end))) {
            end += 1;
        }
        let mut start = page;
        while start > block.start && self.engine.claim(Page(self.driver.region.striped(start - 1))) {
            start -= 1;
        }
        self.driver.open_fresh(start..page);
        self.driver.open_fresh(page + 1..end);
    }

    /// Takes what messages there are, until they wake a thread for which this CPU may be needed. Whether there were any.
    fn take_messages(&mut self) -> Result<bool, End> {
        let mut busy = false;
        for node in 0..self.driver.peers.links.len() {
            while let Some(frame) = self.next_message(node)? {
                busy = true;
                self.message(node, &frame)?;
                if self.threads().want_the_cpu() {
                    return Ok(true);
                }
            }
        }
        Ok(busy)
    }

    /// The next message of a node.
    fn next_message(&mut self, node: usize) -> Result<Option<Frame>, End> {
        let guess = self.driver.guess();
        let Some(link) = &mut self.driver.peers.links[node] else {
            return Ok(None);
        };
        let region = &self.driver.region;
        // Both places are pages that no thread can use, or the lane's own scratch.
        let merges = self.driver.merging.is_some();
        let mut landing = None;
        let place = |frame: &Frame| {
            landing = Landing::place(region, frame, merges)?;
            Ok(landing.map(|page| region.bytes(page).cast()))
        };
        // SAFETY: as above.
        let came = unsafe { link.next_bulk(guess, place) }.transpose();
        let frame = match came {
            Some(Ok(frame)) => Ok(Some(frame)),
            None => link.next_control(),
            // Who ends has said why before.
            Some(Err(error)) => {
                link.fill([true; 2]);
                match link.next_control() {
                    Ok(Some(frame)) => Ok(Some(frame)),
                    _ => Err(error),
                }
            }
        };
        if let Some(page) = landing {
            self.driver.lands(page, guess);
        }
        frame.map_err(|error| self.driver.peers.lost(node, &error))
    }

    fn message(&mut self, node: usize, frame: &Frame) -> Result<(), End> {
        match classify(frame).map_err(|error| self.malformed(node, error))? {
            FrameClass::End => Err(End::Told {
                by: self.driver.peers.name(node),
                lost: self.driver.peers.name(page_of(frame) as usize),
            }),
            FrameClass::Discards(kind) => self.heard_of_discards(node, kind, frame),
            FrameClass::Ordered(kind) => match self.in_order(node, kind, frame)? {
                Some(frame) => self.act(node, frame),
                None => Ok(()),
            },
        }
    }

    /// A node sent bytes that no node sends.
    fn malformed(&self, node: usize, error: Malformed) -> End {
        End::Nonsense(format!("{}: {error}", self.driver.peers.name(node)))
    }

    /// Acts on a message of the engine.
    fn act(&mut self, node: usize, frame: Frame) -> Result<(), End> {
        let message = Message::decode(&frame).map_err(|error| self.malformed(node, error))?;
        if message.page.0 < self.driver.region.pages() {
            let page = self.driver.region.unstriped(message.page.0);
            // Nothing more comes of it, whatever it was.
            self.driver.landing.cancel(page);
            if self.driver.is_taken(page)
                && matches!(message.body, Body::Ask { .. } | Body::AskAhead)
                && let Some(merging) = &mut self.driver.merging
            {
                merging.parked.push((node, frame));
                return Ok(());
            }
            // Also one that has not come yet: it will be wanted as soon as it is here.
            if matches!(
                message.body,
                Body::Ask { .. } | Body::Forward { .. } | Body::Invalidate
            ) && let Some(index) = self.driver.want(page)
            {
                self.judge(index, now_ns());
            }
            self.note_ahead(page, message.body);
        }
        let from = NodeId(node as u16);
        self.turn(|engine, effects| engine.receive(from, message, effects))
            .map_err(|refusal| End::Nonsense(format!("{}: {refusal}", self.driver.peers.name(node))))?;
        while let Some(page) = self.driver.unheld.pop() {
            let page = Page(self.driver.region.striped(page));
            self.turn(|engine, effects| engine.used(page, effects));
        }
        self.check()
    }

    /// What a message says of pages that are, or were, asked for ahead.
    fn note_ahead(&mut self, page: u32, body: Body) {
        match body {
            Body::Decline => self.ahead.declined(page),
            Body::Invalidate
            | Body::Ask {
                access: Access::Write,
            }
            | Body::Forward {
                want: Want::Write | Want::Discard,
                ..
            } => {
                self.ahead.takes(page);
                self.driver.fills.takes(page);
            }
            // It may have been used long ago, and nobody has looked since. If not it stays, as nobody waits for it.
            Body::AskAhead | Body::ForwardAhead { .. } => {
                if let Some(index) = self.driver.residencies.index_of(page) {
                    self.judge(index, now_ns());
                }
            }
            Body::Ask { access: Access::Read }
            | Body::Forward { want: Want::Read, .. }
            | Body::Copy { .. }
            | Body::Ownership { .. }
            | Body::Acknowledge => {}
        }
    }

    /// Lets pages go that were wanted, and have been used by now; when to look again, nanoseconds from now.
    fn let_go(&mut self) -> Result<Option<u64>, End> {
        if self.driver.residencies.is_empty() {
            return Ok(None);
        }
        let now = now_ns();
        let every = self.driver.residencies.len() > HOLDS;
        let mut next: Option<u64> = None;
        let mut index = 0;
        while index < self.driver.residencies.len() {
            let MinResidency { wanted, since_ns, .. } = *self.driver.residencies.at(index);
            let overdue = now.saturating_sub(since_ns) >= BOUND_NS;
            match (wanted || every || overdue).then(|| self.judge(index, now)) {
                // Another one is at this place now.
                Some(Verdict::Release) => continue,
                Some(Verdict::Keep(ns)) if wanted => next = Some(next.map_or(ns, |next| next.min(ns))),
                _ => {}
            }
            index += 1;
        }
        self.check()?;
        // Those that nobody wants need not be looked at often, but once: the engine is to know that they are used.
        let later = (!self.driver.residencies.is_empty()).then_some(BOUND_NS);
        Ok(next.or(later))
    }

    /// Lets a page go if it may.
    fn judge(&mut self, index: usize, now: u64) -> Verdict {
        let hold = *self.driver.residencies.at(index);
        // One that came long ago goes whatever its thread does, which takes time to ask.
        let thread = match now.saturating_sub(hold.since_ns) {
            BOUND_NS.. => Thread::Unknown,
            _ => self.driver.thread_of(&hold),
        };
        let enough_ns = self.enough_ns.load(Ordering::Relaxed);
        let verdict = hold.evaluate(now, thread, enough_ns);
        if verdict == Verdict::Release {
            let ran = matches!(thread, Thread::Ran(ran) | Thread::Elsewhere(ran)
                if ran.saturating_sub(hold.ran_ns) >= enough_ns);
            self.driver.meter.overdue += u64::from(hold.wanted && !ran && thread != Thread::Unknown);
            self.driver.residencies.end(index);
            if hold.wanted {
                // What could not be answered yet, as a thread here waits to write, is wanted after that.
                self.driver.want(hold.page);
            }
            let page = Page(self.driver.region.striped(hold.page));
            self.turn(|engine, effects| engine.used(page, effects));
        }
        verdict
    }

    fn check(&mut self) -> Result<(), End> {
        match self.driver.failed.take() {
            Some(end) => Err(end),
            None => Ok(()),
        }
    }

    fn publish(&mut self) {
        self.driver.meter.take(self.engine.counters());
        self.driver.meter.bytes = self.driver.peers.bytes_sent;
        if let Some(merging) = &self.driver.merging {
            self.driver.meter.merge(&merging.merges());
        }
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = self.driver.meter;
    }

    /// Tells the other nodes which one is lost. Each lane of each node does, also what it was told: a node that hears nothing on a stream
    /// before it is closed takes the node at its other end for the lost one.
    fn say_end(&mut self, end: &End) {
        let number_of = |name: &str| self.driver.peers.number_of(name);
        let lost = match end {
            End::Lost { node: lost, .. } | End::Told { lost, .. } => number_of(lost),
            End::Nonsense(_) | End::Kernel(_) => Some(usize::from(self.driver.me)),
            End::Closed => None,
        };
        let Some(lost) = lost else { return };
        let frame = driver_frame(DriverKind::End, lost as u32);
        for (node, link) in self.driver.peers.links.iter_mut().enumerate() {
            let Some(link) = link.as_mut().filter(|_| node != lost) else {
                continue;
            };
            // Who is gone by now needs no word.
            let _ = link.send(&frame, false);
        }
    }
}

#[cfg(test)]
mod tests;
