//! The queue of a cell's events, which one thread at a time handles, and events that are due later.
//!
//! The main thread handles what is in the queue. A thread that brings an event handles it itself if the queue
//! is empty, no other thread is at it, and the handler allows it: to wake the main thread takes longer than
//! most events do. So the order of events is that of the queue, and no event overtakes another.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use locks::{IgnorePoison, lock};

/// Exit status of a process that a panic ends.
const PANIC_STATUS: i32 = 101;

/// The owner of the state that events change.
pub(super) trait Handle: Send + 'static {
    /// An event.
    type Event: Send;
    /// Why no further event is handled.
    type End: Send;

    /// Handles an event. A value is returned if no other one may follow.
    fn handle(&mut self, event: Self::Event) -> Option<Self::End>;

    /// Whether the thread that brings an event may handle it.
    fn allows_any_thread(&self, event: &Self::Event) -> bool;
}

/// The queue. Cheap to clone.
pub(super) struct EventQueue<H: Handle>(Arc<Shared<H>>);

struct Shared<H: Handle> {
    inner: Mutex<Inner<H>>,
    /// Wakes the main thread.
    happened: Condvar,
    timers: Mutex<Timers<H::Event>>,
    /// Wakes the thread of the timers.
    timer_set: Condvar,
}

struct Inner<H: Handle> {
    waiting: VecDeque<H::Event>,
    /// None while a thread handles an event, before the main thread has begun and after it has ended.
    handler: Option<Box<H>>,
    end: Option<H::End>,
}

struct Timers<E> {
    /// The earliest one is the greatest.
    set: BinaryHeap<Timer<E>>,
    /// Number of timers so far.
    count: u64,
}

/// An event that is due at a time. Those of one time come in the order in which they were set.
struct Timer<E> {
    due: Instant,
    number: u64,
    event: E,
}

impl<E> Ord for Timer<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl<E> PartialOrd for Timer<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Timer<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<E> Eq for Timer<E> {}

impl<H: Handle> Clone for EventQueue<H> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<H: Handle> EventQueue<H> {
    /// An empty queue, with the thread of its timers.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(super) fn start() -> io::Result<Self> {
        let queue = Self(Arc::new(Shared {
            inner: Mutex::new(Inner {
                waiting: VecDeque::new(),
                handler: None,
                end: None,
            }),
            happened: Condvar::new(),
            timers: Mutex::new(Timers {
                set: BinaryHeap::new(),
                count: 0,
            }),
            timer_set: Condvar::new(),
        }));
        let timers = queue.clone();
        thread::Builder::new()
            .name("timers".into())
            .spawn(move || timers.run_timers())?;
        Ok(queue)
    }

    /// Handles events as the main thread, until one is the last. Returns the handler, and the end.
    pub(super) fn run(&self, handler: Box<H>) -> (Box<H>, H::End) {
        let mut inner = self.inner();
        inner.handler = Some(handler);
        loop {
            let Some(mut handler) = inner.handler.take() else {
                inner = self.0.happened.wait(inner).ignore_poison();
                continue;
            };
            if let Some(end) = inner.end.take() {
                return (handler, end);
            }
            match inner.waiting.pop_front() {
                Some(event) => {
                    drop(inner);
                    let end = handler.handle(event);
                    inner = self.inner();
                    (inner.handler, inner.end) = (Some(handler), end);
                }
                None => {
                    inner.handler = Some(handler);
                    inner = self.0.happened.wait(inner).ignore_poison();
                }
            }
        }
    }

    /// Adds an event, which the main thread handles. Never blocks.
    pub(super) fn post(&self, event: H::Event) {
        let mut inner = self.inner();
        inner.waiting.push_back(event);
        // A thread that is handling an event looks into the queue afterwards.
        let is_idle = inner.handler.is_some();
        drop(inner);
        if is_idle {
            self.0.happened.notify_one();
        }
    }

    /// Handles an event on this thread, if that is possible at once; else as [`EventQueue::post`]. Not for
    /// handlers, which would wait for themselves.
    pub(super) fn handle(&self, event: H::Event) {
        let mut inner = self.inner();
        let is_first = inner.waiting.is_empty() && inner.end.is_none();
        let is_allowed = |handler: &mut Box<H>| is_first && handler.allows_any_thread(&event);
        let Some(mut handler) = inner.handler.take_if(is_allowed) else {
            drop(inner);
            return self.post(event);
        };
        drop(inner);
        let end = {
            // As a panic of the main thread. Without its handler the process would serve nothing.
            let _ends = EndOnPanic;
            handler.handle(event)
        };
        let mut inner = self.inner();
        (inner.handler, inner.end) = (Some(handler), end);
        let is_more = inner.end.is_some() || !inner.waiting.is_empty();
        drop(inner);
        if is_more {
            self.0.happened.notify_one();
        }
    }

    /// Adds an event after a time.
    pub(super) fn post_after(&self, time: Duration, event: H::Event) {
        let due = Instant::now() + time;
        let mut timers = lock(&self.0.timers);
        let is_earliest = timers.set.peek().is_none_or(|first| due < first.due);
        timers.count += 1;
        let number = timers.count;
        timers.set.push(Timer { due, number, event });
        drop(timers);
        if is_earliest {
            self.0.timer_set.notify_one();
        }
    }

    fn run_timers(&self) {
        let mut timers = lock(&self.0.timers);
        loop {
            let now = Instant::now();
            let left = timers
                .set
                .peek()
                .map(|first| first.due.saturating_duration_since(now));
            match left {
                None => timers = self.0.timer_set.wait(timers).ignore_poison(),
                Some(Duration::ZERO) => {
                    let due = timers.set.pop();
                    drop(timers);
                    due.into_iter().for_each(|timer| self.post(timer.event));
                    timers = lock(&self.0.timers);
                }
                Some(left) => (timers, _) = self.0.timer_set.wait_timeout(timers, left).ignore_poison(),
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner<H>> {
        lock(&self.0.inner)
    }

    /// The next event, if it comes within `limit`. For tests without a handler.
    #[cfg(test)]
    pub(super) fn next(&self, limit: Duration) -> Option<H::Event> {
        let start = Instant::now();
        loop {
            let next = self.inner().waiting.pop_front();
            if next.is_some() || start.elapsed() > limit {
                return next;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Ends the process when it is dropped by a panic.
struct EndOnPanic;

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::exit(PANIC_STATUS);
        }
    }
}

#[cfg(test)]
mod tests;
