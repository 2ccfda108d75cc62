//! The thread of a virtual paging disk: receives requests, moves their pages, and replies.
//!
//! The thread does everything itself, so no I/O into guest memory is in flight without it. The pager writes
//! pages only at an instant at which this thread does not work ([`Quiescer::io_gap`]). So a request is done
//! in parts, between which the thread checks whether such an instant is waited for, and continues at its next
//! turn.

use std::sync::Arc;

use diskstore::disk::{Operation, Segments};
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::handler::copy_name;
use super::metrics::{Metrics, add};
use super::request::{Action, Disk, Parser};
use crate::memory::GuestRam;
use crate::paging::{PagingDiskIo, SegmentCursor, SegmentPosition};
use crate::quiescer::Quiescer;
use crate::virtio::serve::{self, broken};
use crate::virtio::worker::{Event, Handler, Sources};
use crate::virtio::{Activation, ActiveQueue, DeviceError, Interrupt};

/// Bytes that are moved in one turn: the quiescer's guard is taken anew afterwards.
const TURN_BYTES: u64 = 16 << 20;
/// Cost of a request in addition to its bytes, as bytes.
const REQUEST_COST_BYTES: u64 = 4096;
/// Cleared bytes that cost as much as one that is moved: a cleared page changes one entry of a table.
const CLEARED_BYTES_PER_COST: u64 = 64;

/// Serves the queue of a paging disk.
pub(super) struct PagingDiskHandler {
    io: PagingDiskIo,
    disk: Disk,
    metrics: Arc<Metrics>,
    quiescer: Arc<Quiescer>,
    parser: Parser,
    active: Option<Active>,
}

/// State between an activation and a reset.
struct Active {
    memory: GuestRam,
    interrupt: Arc<dyn Interrupt>,
    queue: ActiveQueue,
    /// A request that is done in part.
    current: Option<Current>,
}

/// A request that is not completed yet.
struct Current {
    head: u16,
    status: GuestAddress,
    operation: Operation,
    /// Bytes that are done.
    done: u64,
    position: SegmentPosition,
}

/// Completion of a request.
struct Completion {
    head: u16,
    /// Address and value of the status byte.
    status: (GuestAddress, u32),
    /// Bytes of the driver's buffers that were filled, the status included.
    filled: u32,
}

/// Next step of a request.
enum Next {
    /// The request has more parts.
    Continue(Current),
    Complete(Completion),
}

impl PagingDiskHandler {
    pub fn new(io: PagingDiskIo, disk: Disk, metrics: Arc<Metrics>, quiescer: Arc<Quiescer>) -> Self {
        Self {
            io,
            disk,
            metrics,
            quiescer,
            parser: Parser::default(),
            active: None,
        }
    }

    /// Serves the available requests for one turn, and requests another one if some are left.
    fn serve(&mut self) -> Result<(), DeviceError> {
        let Some(mut active) = self.active.take() else {
            return Ok(());
        };
        let served = self.serve_turn(&mut active);
        let signalled = match served {
            Ok((true, _)) => self.signal(&mut active),
            _ => Ok(()),
        };
        let result = match served {
            Ok((_, true)) => {
                serve::requeue(&active.queue);
                Ok(())
            }
            Ok((_, false)) => serve::listen(&mut active.queue, &active.memory),
            Err(error) => Err(error),
        };
        self.active = Some(active);
        signalled.and(result)
    }

    /// Serves one turn. Returns whether requests were completed, and whether there may be more work.
    fn serve_turn(&mut self, active: &mut Active) -> Result<(bool, bool), DeviceError> {
        let memory = active.memory.clone();
        let mut is_answered = false;
        let mut cost = 0;
        while cost < TURN_BYTES && !self.quiescer.draining() {
            let next = match active.current.take() {
                Some(current) => self.advance(current, &mut cost),
                None => {
                    let Some(chain) = serve::take(&mut active.queue, &memory)? else {
                        return Ok((is_answered, false));
                    };
                    cost += REQUEST_COST_BYTES;
                    let head = chain.head_index();
                    let request = self.parser.parse(&memory, chain, &self.disk)?;
                    self.begin(head, request.status, request.action)
                }
            };
            match next {
                Next::Continue(current) => active.current = Some(current),
                Next::Complete(Completion { head, status, filled }) => {
                    // A status outside memory harms the driver only.
                    let _ = memory.write_obj(status.1 as u8, status.0);
                    active
                        .queue
                        .queue
                        .add_used(&*memory, head, filled)
                        .map_err(broken)?;
                    is_answered = true;
                }
            }
        }
        Ok((is_answered, true))
    }

    fn begin(&self, head: u16, status: GuestAddress, action: Action) -> Next {
        let complete = |value: u32, filled| {
            Next::Complete(Completion {
                head,
                status: (status, value),
                filled,
            })
        };
        match action {
            Action::Io(operation) => {
                self.metrics.count(&operation);
                Next::Continue(Current {
                    head,
                    status,
                    operation,
                    done: 0,
                    position: SegmentPosition::default(),
                })
            }
            Action::Name(into) => complete(VIRTIO_BLK_S_OK, copy_name(&into, &self.disk.id) + 1),
            Action::Refuse(value) => {
                let value = u32::from(value);
                let counter = match value {
                    VIRTIO_BLK_S_UNSUPP => &self.metrics.unsupported,
                    _ => &self.metrics.failed,
                };
                add(counter, 1);
                complete(value, 1)
            }
        }
    }

    /// Does a part of a request, and adds its cost.
    fn advance(&mut self, mut current: Current, cost: &mut u64) -> Next {
        let Current {
            operation,
            done,
            position,
            ..
        } = &mut current;
        let cursor = |segments, position| cursor(segments, position, *done);
        let (result, bytes, filled) = match &*operation {
            Operation::Read { offset, into } => {
                let read = self.io.read(offset + *done, &mut cursor(into, position));
                (read, into.bytes(), into.bytes())
            }
            Operation::Write { offset, from } => {
                let written = self.io.write(offset + *done, &mut cursor(from, position));
                (written, from.bytes(), 0)
            }
            // The content does not outlive the shard, which has all of it that was completed.
            Operation::Flush => (Ok(0), 0, 0),
            Operation::Discard { offset, bytes } => {
                let range = offset + *done..offset + bytes;
                (self.io.clear(range, true), *bytes, 0)
            }
            Operation::WriteZeroes { offset, bytes, .. } => {
                let range = offset + *done..offset + bytes;
                (self.io.clear(range, false), *bytes, 0)
            }
        };
        let moved = *result.as_ref().unwrap_or(&0);
        *cost += match operation {
            Operation::Read { .. } | Operation::Write { .. } => moved,
            _ => moved / CLEARED_BYTES_PER_COST,
        };
        *done += moved;
        let is_done = *done >= bytes;
        let complete = |value, filled| {
            Next::Complete(Completion {
                head: current.head,
                status: (current.status, value),
                filled,
            })
        };
        match result {
            Ok(_) if is_done => {
                let filled = u32::try_from(filled).unwrap_or(u32::MAX);
                complete(VIRTIO_BLK_S_OK, filled.saturating_add(1))
            }
            // Each part is at least one byte; none would be a fault of this program.
            Ok(1..) => Next::Continue(current),
            Ok(0) | Err(_) => {
                add(&self.metrics.failed, 1);
                complete(VIRTIO_BLK_S_IOERR, 1)
            }
        }
    }

    /// Interrupts the driver for the completed requests, if it requests that.
    fn signal(&self, active: &mut Active) -> Result<(), DeviceError> {
        let Active {
            memory,
            interrupt,
            queue,
            ..
        } = active;
        if queue.queue.needs_notification(&**memory).map_err(broken)? {
            add(&self.metrics.interrupts, 1);
            interrupt.signal_queue(queue.index);
        }
        Ok(())
    }
}

/// Returns a transfer's memory after `done` bytes.
fn cursor<'a>(segments: &'a Segments, position: &'a mut SegmentPosition, done: u64) -> SegmentCursor<'a> {
    let left = segments.bytes().saturating_sub(done);
    // SAFETY: the pieces are guest memory, checked by the parser, and mapped for as long as the handler holds
    // the activation's `GuestRam`, as it does while it serves. No Rust reference to guest memory exists.
    unsafe { SegmentCursor::new(segments.iovecs(), position, left) }
}

impl Handler for PagingDiskHandler {
    fn start(&mut self, activation: Activation, _sources: &Sources) -> Result<(), DeviceError> {
        let Activation {
            memory,
            features,
            queues,
            interrupt,
            ..
        } = activation;
        let Some(mut queue) = queues.into_iter().next() else {
            return Ok(());
        };
        let has_event_index = features >> VIRTIO_RING_F_EVENT_IDX & 1 == 1;
        queue.queue.set_event_idx(has_event_index);
        self.active = Some(Active {
            memory,
            interrupt,
            queue,
            current: None,
        });
        // The driver may have made requests available before the thread listened.
        self.serve()
    }

    fn handle(&mut self, event: Event, _sources: &Sources) -> Result<(), DeviceError> {
        if let Event::Queue(_) = event {
            add(&self.metrics.notifications, 1);
        }
        self.serve()
    }

    fn stop(&mut self, _sources: &Sources) {
        self.active = None;
    }
}
