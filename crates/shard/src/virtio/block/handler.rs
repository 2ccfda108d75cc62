//! One queue's thread: receives requests, submits them to the disk, and replies.

use std::sync::Arc;

use diskstore::disk::{IoQueue, Operation, Segments, Submission};
use nix::sys::epoll::EpollFlags;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::limiter::LimitedQueue;
use super::metrics::{Metrics, add};
use super::request::{Action, Disk, Parser, Request};
use super::waiting::{Waiting, WaitingRequests};
use crate::memory::GuestRam;
use crate::paging::PageOrigins;
use crate::quiescer::Quiescer;
use crate::sharing::DiskSharing;
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, DeviceError, Interrupt};

/// Greatest number of the driver's requests in flight on a queue: the size of the queue.
pub(super) const QUEUE_SIZE: u16 = 256;
/// Token of the disk's completions among the event sources.
const COMPLETIONS: u32 = 0;
/// Token of the timer that retries requests without room.
const RETRY: u32 = 1;
/// Token of the timer of a queue that waits by its disk's limits.
const LIMIT: u32 = 2;
/// Greatest number of successive batches, after which the thread checks its other events (such as a reset).
const BATCHES_MAX: usize = 16;

/// Serves one queue.
pub(super) struct BlockHandler {
    io: IoQueue,
    disk: Disk,
    metrics: Arc<Metrics>,
    quiescer: Arc<Quiescer>,
    /// Use of the origins of reads, if there is one.
    origins: Option<ReadOrigins>,
    /// Number of I/Os in flight that the quiescer has recorded.
    counted: usize,
    parser: Parser,
    /// Requests that wait for room, if the disk's policy is to pause.
    waiting: Option<WaitingRequests>,
    limits: LimitedQueue,
    active: Option<Active>,
}

/// Use of the places in images from which a disk's reads come.
#[derive(Clone)]
pub enum ReadOrigins {
    /// Pages are mapped from there.
    Shared(DiskSharing),
    /// Pages may leave memory as long as they have the image's content.
    Paged(PageOrigins),
}

/// State between an activation and a reset.
struct Active {
    memory: GuestRam,
    interrupt: Arc<dyn Interrupt>,
    index: u16,
    queue: Queue,
    notify: EventFd,
    /// Makes every write durable, for a driver that cannot flush.
    write_through: bool,
    /// Requests in flight; the index is the token.
    requests: Vec<Option<InFlight>>,
    free: Vec<usize>,
    /// Whether requests were completed since the last check for an interrupt.
    answered: bool,
}

/// A request that is not completed yet.
#[derive(Clone, Copy)]
pub(super) struct InFlight {
    pub head: u16,
    pub status: GuestAddress,
    /// Bytes of the driver's buffers that success fills, the status included.
    pub filled: u32,
    /// Whether the write must be followed by a flush.
    pub flush_after: bool,
}

impl BlockHandler {
    pub fn new(
        io: IoQueue,
        disk: Disk,
        metrics: Arc<Metrics>,
        quiescer: Arc<Quiescer>,
        origins: Option<ReadOrigins>,
        waiting: Option<WaitingRequests>,
        limits: LimitedQueue,
    ) -> Self {
        Self {
            io,
            disk,
            metrics,
            quiescer,
            origins,
            counted: 0,
            parser: Parser::default(),
            waiting,
            limits,
            active: None,
        }
    }

    /// Serves the available requests. Ends when the queue is empty, with notifications on, or full, or at the
    /// disk's limit.
    fn serve(&mut self) -> Result<(), DeviceError> {
        for _ in 0..BATCHES_MAX {
            if self.quiescer.draining() {
                // A pause waits for the I/O in flight: new requests wait for the next turn.
                self.reap()?;
                if let Some(active) = &mut self.active {
                    active.signal(&self.metrics)?;
                }
                break;
            }
            let Some(active) = &mut self.active else {
                return Ok(());
            };
            active
                .queue
                .disable_notification(&*active.memory)
                .map_err(ring_error)?;
            self.take_batch()?;
            self.io.send().map_err(cannot_start)?;
            self.reap()?;
            let Some(active) = &mut self.active else {
                return Ok(());
            };
            active.signal(&self.metrics)?;
            if active.free.is_empty() {
                // The next completion continues.
                return Ok(());
            }
            if self.limits.is_waiting() {
                // The timer continues.
                return Ok(());
            }
            if !active
                .queue
                .enable_notification(&*active.memory)
                .map_err(ring_error)?
            {
                return Ok(());
            }
        }
        // More requests are available: continue after the other events.
        match &self.active {
            Some(active) => active.notify.write(1).map_err(|source| DeviceError::Host {
                what: "cannot go on with the queue",
                source,
            }),
            None => Ok(()),
        }
    }

    /// Starts requests until the queue is empty, all its places are in flight, or the disk's limit is
    /// reached.
    fn take_batch(&mut self) -> Result<(), DeviceError> {
        for _ in 0..QUEUE_SIZE {
            let Some(active) = &mut self.active else {
                return Ok(());
            };
            if !self.limits.admits().map_err(cannot_limit)? {
                return Ok(());
            }
            let Some(token) = active.free.pop() else {
                return Ok(());
            };
            let memory = active.memory.clone();
            let Some(chain) = active.queue.iter(&*memory).map_err(ring_error)?.next() else {
                active.free.push(token);
                return Ok(());
            };
            let head = chain.head_index();
            let request = self.parser.parse(&memory, chain, &self.disk)?;
            self.limits.charge(request.action.bytes());
            self.start(token, head, request)?;
        }
        Ok(())
    }

    fn start(&mut self, token: usize, head: u16, request: Request) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let mut filled = 1;
        let flush_after;
        match &request.action {
            Action::Io(operation) => {
                self.metrics.count(operation);
                if let Operation::Read { into, .. } = operation {
                    filled = u32::try_from(into.bytes()).unwrap_or(u32::MAX).saturating_add(1);
                }
                let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
                flush_after = changes && active.write_through;
            }
            Action::Name(into) => {
                let copied = copy_name(into, &self.disk.id);
                active.free.push(token);
                return self.answer(head, request.status, VIRTIO_BLK_S_OK, copied + 1);
            }
            Action::Refuse(status) => {
                let status = u32::from(*status);
                active.free.push(token);
                let unsupported = status == VIRTIO_BLK_S_UNSUPP;
                add(
                    if unsupported {
                        &self.metrics.unsupported
                    } else {
                        &self.metrics.failed
                    },
                    1,
                );
                return self.answer(head, request.status, status, 1);
            }
        }
        let Action::Io(operation) = request.action else {
            return Ok(());
        };
        let in_flight = InFlight {
            head,
            status: request.status,
            filled,
            flush_after,
        };
        let submission = self.submit(operation, token as u64);
        self.submitted(token, in_flight, submission)
    }

    /// Continues with a request whose operation was submitted.
    fn submitted(
        &mut self,
        token: usize,
        request: InFlight,
        submission: Submission,
    ) -> Result<(), DeviceError> {
        match submission {
            Submission::Done(result) => self.done(token, request, result),
            Submission::Pending => {
                add(&self.metrics.in_background, 1);
                if let Some(active) = &mut self.active {
                    active.requests[token] = Some(request);
                }
                Ok(())
            }
            Submission::NoRoom(operation, error) => match &mut self.waiting {
                None => self.done(token, request, Err(error)),
                Some(waiting) => waiting
                    .add(Waiting {
                        token,
                        request,
                        operation,
                    })
                    .map_err(cannot_wait),
            },
        }
    }

    /// Retries the requests without room.
    fn retry(&mut self) -> Result<(), DeviceError> {
        let Some(waiting) = &mut self.waiting else {
            return Ok(());
        };
        let requests = waiting.take().map_err(cannot_wait)?;
        let tried = requests.len();
        for Waiting {
            token,
            request,
            operation,
        } in requests
        {
            let submission = self.io.submit(operation, token as u64);
            self.submitted(token, request, submission)?;
        }
        self.io.send().map_err(cannot_start)?;
        match &mut self.waiting {
            Some(waiting) => waiting.tried(tried).map_err(cannot_wait),
            None => Ok(()),
        }
    }

    /// Starts an operation: a read that can be mapped is mapped.
    fn submit(&mut self, operation: Operation, token: u64) -> Submission {
        let (Operation::Read { offset, into }, Some(origins)) = (&operation, &mut self.origins) else {
            return self.io.submit(operation, token);
        };
        let store = &**self.io.store();
        match origins {
            ReadOrigins::Shared(sharing) => {
                if let Some(result) = sharing.read(store, *offset, into) {
                    return Submission::Done(result);
                }
                if let Err(error) = sharing.before_copy(store, *offset, into) {
                    return Submission::Done(Err(error));
                }
            }
            ReadOrigins::Paged(origins) => origins.begin(token as usize, store, *offset, into),
        }
        self.io.submit(operation, token)
    }

    /// Reports the I/O in flight to the quiescer.
    fn report_in_flight(&mut self) {
        let now = self.io.under_way();
        (self.counted..now).for_each(|_| self.quiescer.io_started());
        (now..self.counted).for_each(|_| self.quiescer.io_done());
        self.counted = now;
    }

    /// Completes a request of the disk, or makes it durable first.
    fn done(
        &mut self,
        token: usize,
        mut request: InFlight,
        result: std::io::Result<()>,
    ) -> Result<(), DeviceError> {
        if request.flush_after && result.is_ok() {
            request.flush_after = false;
            let submission = self.io.submit(Operation::Flush, token as u64);
            return self.submitted(token, request, submission);
        }
        if let Some(ReadOrigins::Paged(origins)) = &mut self.origins {
            origins.end(token, result.is_ok());
        }
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        active.free.push(token);
        match result {
            Ok(()) => self.answer(request.head, request.status, VIRTIO_BLK_S_OK, request.filled),
            Err(_) => {
                add(&self.metrics.failed, 1);
                self.answer(request.head, request.status, VIRTIO_BLK_S_IOERR, 1)
            }
        }
    }

    fn answer(&mut self, head: u16, at: GuestAddress, status: u32, filled: u32) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        // A status outside memory harms the driver only.
        let _ = active.memory.write_obj(status as u8, at);
        active
            .queue
            .add_used(&*active.memory, head, filled)
            .map_err(ring_error)?;
        active.answered = true;
        Ok(())
    }

    /// Completes the requests that the kernel has completed.
    fn reap(&mut self) -> Result<(), DeviceError> {
        while let Some((token, result)) = self.io.completed() {
            let Some(active) = &mut self.active else { continue };
            let token = token as usize;
            let Some(request) = active.requests.get_mut(token).and_then(Option::take) else {
                continue;
            };
            self.done(token, request, result)?;
        }
        Ok(())
    }
}

impl Active {
    /// Interrupts the driver for the completed requests, if it requests that.
    fn signal(&mut self, metrics: &Metrics) -> Result<(), DeviceError> {
        if std::mem::take(&mut self.answered)
            && self.queue.needs_notification(&*self.memory).map_err(ring_error)?
        {
            add(&metrics.interrupts, 1);
            self.interrupt.signal_queue(self.index);
        }
        Ok(())
    }
}

impl Handler for BlockHandler {
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError> {
        let Activation {
            memory,
            features,
            queues,
            interrupt,
            ..
        } = activation;
        let Some(mut active) = queues.into_iter().next() else {
            return Ok(());
        };
        let has = |bit: u32| features >> bit & 1 == 1;
        active.queue.set_event_idx(has(VIRTIO_RING_F_EVENT_IDX));
        if let Some(event) = self.io.event() {
            sources
                .add(event, COMPLETIONS, EpollFlags::EPOLLIN)
                .map_err(|source| DeviceError::Host {
                    what: "cannot wait for disk I/O",
                    source,
                })?;
        }
        if let Some(waiting) = &self.waiting {
            sources
                .add(waiting.timer(), RETRY, EpollFlags::EPOLLIN)
                .map_err(cannot_wait)?;
        }
        sources
            .add(self.limits.timer(), LIMIT, EpollFlags::EPOLLIN)
            .map_err(cannot_limit)?;
        let places = usize::from(QUEUE_SIZE);
        self.active = Some(Active {
            memory,
            interrupt,
            index: active.index,
            queue: active.queue,
            notify: active.notify,
            write_through: !has(VIRTIO_BLK_F_FLUSH),
            requests: vec![None; places],
            free: (0..places).collect(),
            answered: false,
        });
        // The driver may have made requests available before the thread listened.
        let served = self.serve();
        self.report_in_flight();
        served
    }

    fn handle(&mut self, event: Event, _sources: &Sources) -> Result<(), DeviceError> {
        match event {
            Event::Queue(_) => add(&self.metrics.notifications, 1),
            Event::Source(RETRY) => self.retry()?,
            Event::Source(LIMIT) => self.limits.expired(),
            Event::Source(_) => {
                if let Some(event) = self.io.event() {
                    let mut count = [0; 8];
                    // Nonblocking; empty if a batch has already taken its completions.
                    let _ = nix::unistd::read(event, &mut count);
                }
                self.reap()?;
            }
        }
        let served = self.serve();
        self.report_in_flight();
        served
    }

    fn stop(&mut self, sources: &Sources) {
        if let Some(event) = self.io.event() {
            let _ = sources.remove(event);
        }
        if let Some(waiting) = &mut self.waiting {
            let _ = sources.remove(waiting.timer());
            waiting.clear();
        }
        let _ = sources.remove(self.limits.timer());
        self.limits.clear();
        self.io.drain();
        self.report_in_flight();
        if let Some(ReadOrigins::Paged(origins)) = &mut self.origins {
            origins.clear();
        }
        self.active = None;
    }
}

/// Copies the disk's name, zero-padded; returns the number of bytes.
pub(super) fn copy_name(into: &Segments, name: &[u8]) -> u32 {
    let mut done = 0;
    for piece in into.iovecs() {
        let take = piece.iov_len.min(name.len() - done);
        // SAFETY: a piece is guest memory that is mapped and writable; the name has `take` bytes from `done`
        // on.
        unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().add(done), piece.iov_base.cast(), take) };
        done += take;
    }
    done as u32
}

fn cannot_start(source: std::io::Error) -> DeviceError {
    DeviceError::Host {
        what: "cannot start disk I/O",
        source,
    }
}

fn cannot_wait(source: std::io::Error) -> DeviceError {
    DeviceError::Host {
        what: "cannot wait for room",
        source,
    }
}

fn cannot_limit(source: std::io::Error) -> DeviceError {
    DeviceError::Host {
        what: "cannot wait by the disk's limits",
        source,
    }
}

fn ring_error(error: virtio_queue::Error) -> DeviceError {
    DeviceError::Protocol(error.to_string())
}
