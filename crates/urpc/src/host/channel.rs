//! Blocking send and receive.

use std::hint;
use std::time::{Duration, Instant};

use super::{Block, MemoryError, SharedRing};
use crate::message::Message;
use crate::poll::PollTime;
use crate::ring::{Receiver, RecvError, SendError, Sender};

/// Polls of the ring between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 64;

/// The sending end.
#[derive(Debug)]
pub struct BlockingSender {
    sender: Sender<SharedRing>,
    block: Block,
    poll: PollTime,
}

/// The receiving end.
#[derive(Debug)]
pub struct BlockingReceiver {
    receiver: Receiver<SharedRing>,
    block: Block,
    poll: PollTime,
}

/// Returns both ends of a new channel, for two threads. `block_ns` is the result of
/// [`super::measure_block_ns`].
///
/// # Errors
/// As [`SharedRing::create`].
pub fn channel(lines: usize, block_ns: u64) -> Result<(BlockingSender, BlockingReceiver), MemoryError> {
    let (ring, file) = SharedRing::create(lines)?;
    let other = SharedRing::attach(&file)?;
    Ok((
        BlockingSender::new(ring, Block::Futex, block_ns),
        BlockingReceiver::new(other, Block::Futex, block_ns),
    ))
}

/// Closes a channel on behalf of a process that died without doing so.
pub fn end(ring: &SharedRing, block: &Block) {
    ring.close();
    match block {
        Block::Futex => {
            block.wake(ring.receiver());
            block.wake(ring.sender());
        }
        Block::Doorbell(doorbell) => doorbell.ring(),
    }
}

impl BlockingSender {
    /// Creates the only sender of an empty ring.
    pub fn new(ring: SharedRing, block: Block, block_ns: u64) -> Self {
        Self {
            sender: Sender::new(ring),
            block,
            poll: PollTime::new(block_ns),
        }
    }

    /// Puts a message into the channel if there is room. A blocked receiver sleeps until
    /// [`BlockingSender::flush`], which a batch needs once.
    ///
    /// # Errors
    /// As [`Sender::post`].
    pub fn post(&mut self, message: &Message) -> Result<(), SendError> {
        self.sender.post(message)
    }

    /// Wakes the receiver if it is blocked.
    pub fn flush(&self) {
        if self.sender.must_wake() {
            self.block.wake(self.sender.ring().receiver());
        }
    }

    /// Sends a message, and waits for room until `deadline`.
    ///
    /// # Errors
    /// As [`Sender::post`]; [`SendError::Full`] only after the deadline.
    pub fn send(&mut self, message: &Message, deadline: Option<Instant>) -> Result<(), SendError> {
        let mut wait = SpinThenBlock::new(deadline);
        loop {
            match self.sender.post(message) {
                Ok(()) => {
                    wait.over(&mut self.poll);
                    self.flush();
                    return Ok(());
                }
                Err(SendError::Full) => {}
                Err(error) => return Err(error),
            }
            // The receiver must see the messages before there can be room.
            self.flush();
            match wait.next(&mut self.poll) {
                WaitStep::Look => {}
                WaitStep::Over => return Err(SendError::Full),
                WaitStep::Block => {
                    if self.sender.prepare_to_block()? {
                        self.block.wait(self.sender.ring().sender(), deadline);
                        self.sender.unblocked();
                    }
                }
            }
        }
    }
}

impl BlockingReceiver {
    /// Creates the only receiver of a ring from which nothing was taken yet.
    pub fn new(ring: SharedRing, block: Block, block_ns: u64) -> Self {
        Self {
            receiver: Receiver::new(ring),
            block,
            poll: PollTime::new(block_ns),
        }
    }

    /// Takes the next message, if there is one.
    ///
    /// # Errors
    /// Fails if the sender is gone and no message is left.
    pub fn try_recv(&mut self) -> Result<Option<Message>, RecvError> {
        let taken = self.receiver.take();
        self.wake_sender();
        taken
    }

    /// Takes the next message, and waits for it until `deadline`; then returns none.
    ///
    /// # Errors
    /// Fails if the sender is gone and no message is left.
    pub fn recv(&mut self, deadline: Option<Instant>) -> Result<Option<Message>, RecvError> {
        let mut wait = SpinThenBlock::new(deadline);
        loop {
            if let Some(message) = self.try_recv()? {
                wait.over(&mut self.poll);
                return Ok(Some(message));
            }
            match wait.next(&mut self.poll) {
                WaitStep::Look => {}
                WaitStep::Over => return Ok(None),
                WaitStep::Block => {
                    let must_block = self.receiver.prepare_to_block();
                    self.wake_sender();
                    if must_block {
                        self.block.wait(self.receiver.ring().receiver(), deadline);
                        self.receiver.unblocked();
                    }
                }
            }
        }
    }

    fn wake_sender(&mut self) {
        if self.receiver.must_wake() {
            self.block.wake(self.receiver.ring().sender());
        }
    }
}

/// Wakes the other side.
impl Drop for BlockingSender {
    fn drop(&mut self) {
        self.sender.ring().close();
        self.block.wake(self.sender.ring().receiver());
    }
}

impl Drop for BlockingReceiver {
    fn drop(&mut self) {
        self.receiver.ring().close();
        self.block.wake(self.receiver.ring().sender());
    }
}

/// One wait: spin, then block.
struct SpinThenBlock {
    deadline: Option<Instant>,
    /// Time of the first poll without success.
    start: Option<Instant>,
    polls: u32,
    blocked: bool,
}

enum WaitStep {
    Look,
    Block,
    Over,
}

impl SpinThenBlock {
    fn new(deadline: Option<Instant>) -> Self {
        Self {
            deadline,
            start: None,
            polls: 0,
            blocked: false,
        }
    }

    /// Returns the step after a poll without success.
    fn next(&mut self, poll: &mut PollTime) -> WaitStep {
        self.polls += 1;
        if !self.blocked && !self.polls.is_multiple_of(POLLS_PER_CLOCK_READ) {
            hint::spin_loop();
            return WaitStep::Look;
        }
        let now = Instant::now();
        let start = *self.start.get_or_insert(now);
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            self.over(poll);
            return WaitStep::Over;
        }
        if now - start < Duration::from_nanos(poll.poll_ns()) {
            return WaitStep::Look;
        }
        self.blocked = true;
        WaitStep::Block
    }

    /// Records the end of the wait, with or without success.
    fn over(&self, poll: &mut PollTime) {
        if let Some(start) = self.start {
            poll.waited(start.elapsed().as_nanos() as u64, self.blocked);
        } else if self.polls > 0 {
            poll.waited(0, false);
        }
    }
}
