//! The page server: a thread that serves one stripe of a node's pages. It alone has their userfaultfd, their
//! engine and its own streams to every other node, so that page servers share nothing.
//!
//! It serves what has arrived; when idle it polls for a while and then sleeps. It does not poll after it has
//! woken a thread or mapped a prefetched page, as that thread may need the CPU. A page server is best on the
//! CPU of the threads that it serves, where a fault and its reply are two switches (3 us) instead of two
//! interrupts between CPUs (20 to 40 us).
//!
//! [`faults`] and [`messages`] are the work, [`residency`] releases pages, [`discarding`] discards them,
//! [`merged`] handles merged page tables, and [`waiting`] decides when to poll.

pub(crate) mod discarding;
mod faults;
mod merged;
mod messages;
mod residency;
mod waiting;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use coherence::{EFFECTS_MAX, Effect, Engine};
use locks::IgnorePoison;
use urpc::poll::PollTime;

use self::discarding::Discarding;
use crate::clock::now_ns;
use crate::driver::EngineDriver;
use crate::meter::Meter;
use crate::node::Polls;
use crate::prefetch::ReadPrefetcher;
use crate::shutdown::{End, Shutdown};

/// Cost of sleeping and being woken, nanoseconds: 20 us from one CPU to another here, more when it has gone
/// idle.
const SLEEP_NS: u64 = 25_000;
/// Polls of the streams for each read of the userfaultfd while a reply is pending.
const POLLS_PER_FAULT_READ: u32 = 8;

/// State of a page server.
#[derive(Debug)]
pub struct PageServer {
    number: u16,
    engine: Engine,
    /// Effects of the event that the engine handles; empty between two events.
    effects: Vec<Effect>,
    driver: EngineDriver,
    shutdown: Arc<Shutdown>,
    shared: Arc<Mutex<Meter>>,
    /// CPU time after which a thread has certainly used its page, nanoseconds.
    enough_ns: Arc<AtomicU64>,
    /// When to poll. At real-time priority a poller keeps other page servers from its CPU, those that it
    /// waits for too.
    polls: Polls,
    /// Poll times while a thread waits here, and while none does.
    asked: PollTime,
    idle: PollTime,
    /// Descriptors, in order: shutdown, userfaultfd, discards, requests about merged pages if there are any,
    /// and the streams of each node.
    polled: Vec<libc::pollfd>,
    /// Whether the userfaultfd may have unread faults.
    faulted: bool,
    discarding: Discarding,
    read_prefetcher: ReadPrefetcher,
}

impl PageServer {
    pub fn new(
        number: u16,
        engine: Engine,
        driver: EngineDriver,
        shutdown: Arc<Shutdown>,
        shared: Arc<Mutex<Meter>>,
        enough_ns: Arc<AtomicU64>,
        polls: Polls,
    ) -> Self {
        let mut descriptors = vec![
            shutdown.event().as_raw_fd(),
            driver.region.userfault(number).as_fd().as_raw_fd(),
            driver.mailbox.event().as_fd().as_raw_fd(),
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
            shutdown,
            shared,
            enough_ns,
            polls,
            asked: PollTime::new(SLEEP_NS),
            idle: PollTime::new(SLEEP_NS),
            polled,
            faulted: true,
            discarding: Discarding::default(),
            read_prefetcher: ReadPrefetcher::default(),
        }
    }

    /// Serves until the end, and reports its reason to the other nodes.
    pub fn run(mut self) {
        let shutdown = self.shutdown.clone();
        let is_first = match self.serve() {
            Err(end) => shutdown.set(end),
            Ok(()) => false,
        };
        if let Some(end) = shutdown.reason() {
            self.report_end(end);
        }
        if let Some(merging) = &self.driver.merging {
            merging.causal.close();
        }
        self.driver.mailbox.close();
        self.publish();
        shutdown.server_reported();
        if is_first {
            shutdown.call_hook();
        }
    }

    fn serve(&mut self) -> Result<(), End> {
        let mut idle_since = None;
        let mut polls_done: u32 = 0;
        loop {
            polls_done = polls_done.wrapping_add(1);
            let mut busy = false;
            if self.faulted && (idle_since.is_none() || polls_done.is_multiple_of(POLLS_PER_FAULT_READ)) {
                busy |= self.take_faults()?;
            }
            busy |= self.take_messages()?;
            let recheck_ns = self.release_wanted()?;
            let resume_ns = self.discard()?;
            self.settle()?;
            if busy && !self.threads().need_the_cpu() {
                if let Some(since) = idle_since.take() {
                    self.poll_time().waited(now_ns() - since, false);
                }
                continue;
            }
            let now = now_ns();
            let since = *idle_since.get_or_insert(now);
            let may_poll = self.threads().allow_polling(self.polls);
            if may_poll && now - since < self.poll_time().poll_ns() {
                self.poll_all();
                std::hint::spin_loop();
                continue;
            }
            if self.shutdown.reason().is_some() {
                return Ok(());
            }
            self.publish();
            self.sleep([recheck_ns, resume_ns].into_iter().flatten().min());
            self.poll_time().waited(now_ns() - since, true);
            (self.driver.woke, self.driver.mapped_prefetched) = (false, false);
            idle_since = None;
        }
    }

    /// Passes an event to the engine and performs its effects in order.
    fn run_event<T>(&mut self, event: impl FnOnce(&mut Engine, &mut Vec<Effect>) -> T) -> T {
        let result = event(&mut self.engine, &mut self.effects);
        for effect in self.effects.drain(..) {
            self.driver.perform(effect);
        }
        result
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
        *self.shared.lock().ignore_poison() = self.driver.meter;
    }
}

#[cfg(test)]
mod tests;
