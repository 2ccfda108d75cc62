//! Moves frames from a card's backend to one receive queue of the guest.

use std::io;

use virtio_queue::QueueT;

use super::handler::{FRAMES_PER_EVENT, FRAMES_PER_SIGNAL, Link, protocol, signal};
use super::header::HEADER_BYTES;
use super::metrics::{NetMetrics, add};
use super::posted::Posted;
use super::stream::{Framing, TransferResult};
use super::window;
use crate::memory::GuestRam;
use crate::virtio::device::{ActiveQueue, DeviceError, Interrupt};

/// One run of a receive queue, for one event.
pub(super) struct Receiver<'a> {
    pub(super) link: &'a mut Link,
    pub(super) metrics: &'a NetMetrics,
    pub(super) memory: &'a GuestRam,
    pub(super) interrupt: &'a dyn Interrupt,
    pub(super) rx: &'a mut ActiveQueue,
    /// Buffers of `rx` that were taken from its ring.
    pub(super) posted: &'a mut Posted,
    /// The queue pair's number, from 0.
    pub(super) pair: usize,
    /// Greatest size of a frame with its header, bytes.
    pub(super) largest: usize,
}

/// Reason why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// The backend has no frame now, or the run has moved as many as one event may.
    Idle,
    /// The guest has posted too few buffers for the next frame.
    NoBuffers,
    /// The backend has failed or was closed: its file would be reported as ready forever.
    Unreadable,
}

/// Outcome of one attempt to move a frame.
enum Attempt {
    Delivered,
    /// The frame was dropped, or a signal interrupted the read.
    Nothing,
    Paused(Pause),
}

impl Receiver<'_> {
    /// Moves frames until the guest has no buffers, the backend has no frames, or the limit of an event is
    /// reached. Notifies the guest of the delivered frames.
    pub(super) fn run(mut self) -> Result<Pause, DeviceError> {
        let memory = &**self.memory;
        self.rx.queue.disable_notification(memory).map_err(protocol)?;
        let mut delivered = 0;
        let mut pause = Pause::Idle;
        for _ in 0..FRAMES_PER_EVENT {
            match self.move_frame()? {
                Attempt::Delivered => {
                    delivered += 1;
                    if delivered % FRAMES_PER_SIGNAL == 0 {
                        signal(self.rx, self.memory, self.interrupt)?;
                    }
                }
                Attempt::Nothing => {}
                Attempt::Paused(why) => {
                    pause = why;
                    break;
                }
            }
        }
        if delivered > 0 {
            signal(self.rx, self.memory, self.interrupt)?;
        }
        Ok(pause)
    }

    fn move_frame(&mut self) -> Result<Attempt, DeviceError> {
        let wanted = match self.wanted() {
            Ok(wanted) => wanted,
            Err(pause) => return Ok(Attempt::Paused(pause)),
        };
        if !self.fill(wanted)? {
            return Ok(Attempt::Paused(Pause::NoBuffers));
        }
        let room = self.posted.room_bytes();
        let count = match self.read(wanted, room) {
            Ok(count) => count,
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Ok(Attempt::Paused(Pause::Idle)),
                io::ErrorKind::Interrupted => return Ok(Attempt::Nothing),
                // EBADFD: detached, or the device was deleted. EIO: it is down.
                _ => return Ok(Attempt::Paused(Pause::Unreadable)),
            },
        };
        // A TAP frame that fills too little room was cut off by the kernel.
        let cut = matches!(self.link, Link::Tap(_)) && count == room && room < self.largest;
        if cut || count > room || count < HEADER_BYTES {
            add(&self.metrics.rx_dropped, 1);
            return Ok(Attempt::Nothing);
        }
        self.posted.deliver(self.memory, &mut self.rx.queue, count)?;
        add(&self.metrics.rx_frames, 1);
        add(&self.metrics.rx_bytes, count - HEADER_BYTES);
        Ok(Attempt::Delivered)
    }

    /// Returns the room that the next frame needs with its header, bytes. A TAP device's frames show their
    /// size only when they are read, so each needs the room of the largest.
    fn wanted(&mut self) -> Result<usize, Pause> {
        let Link::Stream(stream) = &mut *self.link else {
            return Ok(self.largest);
        };
        while stream.frame().is_none() && stream.is_open() {
            if stream.receive() != TransferResult::All {
                break;
            }
        }
        let absent = stream.framing().absent_header_bytes();
        if let Some(frame) = stream.frame() {
            return Ok(absent + frame.len());
        }
        Err(match stream.is_open() {
            true => Pause::Idle,
            false => Pause::Unreadable,
        })
    }

    /// Takes buffers of the guest for a frame of `wanted` bytes. If there are too few, it returns false and
    /// leaves notifications enabled.
    fn fill(&mut self, wanted: usize) -> Result<bool, DeviceError> {
        let memory = &**self.memory;
        let queue = &mut self.rx.queue;
        if self.posted.fill(memory, queue, wanted)? {
            return Ok(true);
        }
        // Enables notifications, then checks again: the guest may have added buffers meanwhile.
        if !queue.enable_notification(memory).map_err(protocol)?
            || !self.posted.fill(memory, queue, wanted)?
        {
            return Ok(false);
        }
        queue.disable_notification(memory).map_err(protocol)?;
        Ok(true)
    }

    /// Takes the next frame of the backend, and writes it into the guest's buffers of `room` bytes if it
    /// fits. Returns its size with its header, bytes.
    fn read(&mut self, wanted: usize, room: usize) -> io::Result<usize> {
        match &mut *self.link {
            Link::Tap(tap) => tap.read(self.pair, self.posted.room()),
            Link::Stream(stream) => {
                // passt alone forgets to report that a window has opened again.
                let may_lose_windows = stream.framing() == Framing::Length;
                let absent = stream.framing().absent_header_bytes();
                if let Some(frame) = stream.frame()
                    && wanted <= room
                {
                    if may_lose_windows {
                        window::keep_open(frame);
                    }
                    self.posted.write_at(0, &[0; HEADER_BYTES][..absent]);
                    self.posted.write_at(absent, frame);
                }
                stream.pop();
                Ok(wanted)
            }
        }
    }
}
