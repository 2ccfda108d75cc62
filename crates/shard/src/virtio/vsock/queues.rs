//! The receive and the transmit queue: packets in guest memory.
//!
//! A receive buffer is taken from the ring when there may be a packet for the guest, and held until a packet
//! fills it.

use std::sync::Arc;

use virtio_queue::{QueueOwnedT, QueueT};

use super::packet::{HEADER_BYTES, Header, PAYLOAD_BYTES_MAX};
use crate::memory::GuestRam;
use crate::virtio::device::{Activation, ActiveQueue, DeviceError, Interrupt};
use crate::virtio::segments::{Direction, Segments};
use crate::virtio::serve::{broken, requeue, signal};

/// Queue of packets for the guest.
pub const RX: u16 = 0;
/// Queue of the guest's packets.
pub const TX: u16 = 1;
/// Queue of events for the guest.
const EVENT: u16 = 2;
/// Event that ends all connections and makes the driver read its id again (Virtio 1.2, section 5.10.6.7).
const TRANSPORT_RESET: u32 = 0;

/// The queues while the driver has them enabled.
pub struct Queues {
    memory: GuestRam,
    interrupt: Arc<dyn Interrupt>,
    rx: ActiveQueue,
    tx: ActiveQueue,
    /// Head of the receive buffer that is held.
    held: Option<u16>,
    buffer: Segments,
    packet: Segments,
}

/// Sends the event, if the driver has room for it.
fn transport_reset(
    active: &mut ActiveQueue,
    memory: &GuestRam,
    interrupt: &dyn Interrupt,
) -> Result<(), DeviceError> {
    let Some(chain) = active.queue.iter(&**memory).map_err(broken)?.next() else {
        return Ok(());
    };
    let head = chain.head_index();
    let mut room = Segments::default();
    room.append(memory, chain, Direction::ToDriver)?;
    let event = TRANSPORT_RESET.to_le_bytes();
    let written = room.write_at(0, &event);
    active
        .queue
        .add_used(&**memory, head, written as u32)
        .map_err(broken)?;
    interrupt.signal_queue(active.index);
    Ok(())
}

impl Queues {
    /// Returns the queues of an activation; the driver must have enabled both.
    pub fn new(activation: Activation) -> Result<Self, DeviceError> {
        let (mut rx, mut tx) = (None, None);
        for mut active in activation.queues {
            match active.index {
                RX => rx = Some(active),
                TX => tx = Some(active),
                // A guest that resumes in another VM has another id now, and its connections are lost.
                EVENT if activation.resumed => {
                    transport_reset(&mut active, &activation.memory, &*activation.interrupt)?;
                }
                _ => {}
            }
        }
        let (Some(rx), Some(tx)) = (rx, tx) else {
            return Err(DeviceError::Protocol(
                "the receive or transmit queue is not enabled".to_owned(),
            ));
        };
        Ok(Self {
            memory: activation.memory,
            interrupt: activation.interrupt,
            rx,
            tx,
            held: None,
            buffer: Segments::default(),
            packet: Segments::default(),
        })
    }

    /// Begins to send packets to the guest, which need not notify of new buffers until none are left.
    pub fn begin_rx(&mut self) -> Result<(), DeviceError> {
        self.rx.queue.disable_notification(&*self.memory).map_err(broken)
    }

    /// Holds a receive buffer and returns its room for payload, never 0. Returns none if the guest has posted
    /// no buffer; it will notify when it does.
    pub fn hold(&mut self) -> Result<Option<usize>, DeviceError> {
        let memory = &*self.memory;
        while self.held.is_none() {
            if let Some(chain) = self.rx.queue.iter(memory).map_err(broken)?.next() {
                let head = chain.head_index();
                self.buffer.clear();
                self.buffer.append(memory, chain, Direction::ToDriver)?;
                if self.buffer.bytes() <= HEADER_BYTES {
                    return Err(DeviceError::Protocol(
                        "a receive buffer without room for more than a header".to_owned(),
                    ));
                }
                self.held = Some(head);
            } else if !self.rx.queue.enable_notification(memory).map_err(broken)? {
                return Ok(None);
            }
        }
        Ok(Some(self.buffer.bytes() - HEADER_BYTES))
    }

    /// Returns the held buffer to the guest with a packet.
    pub fn send(&mut self, header: &Header, payload: &[u8]) -> Result<(), DeviceError> {
        let Some(head) = self.held.take() else {
            return Ok(());
        };
        self.buffer.write_at(0, &header.bytes());
        self.buffer.write_at(HEADER_BYTES, payload);
        let bytes = HEADER_BYTES as u32 + header.len;
        self.rx.queue.add_used(&*self.memory, head, bytes).map_err(broken)
    }

    /// Ends the sending of packets. With `more`, requests another event for the queue, after the other events
    /// of this thread.
    pub fn end_rx(&mut self, more: bool) -> Result<(), DeviceError> {
        if more {
            requeue(&self.rx);
        }
        signal(&mut self.rx, &self.memory, &*self.interrupt)
    }

    /// Begins to take the guest's packets, during which it need not notify of more.
    pub fn begin_tx(&mut self) -> Result<(), DeviceError> {
        self.tx.queue.disable_notification(&*self.memory).map_err(broken)
    }

    /// Takes a packet of the guest and writes its payload to the start of `payload`. The guest will notify if
    /// there is none.
    pub fn take(&mut self, payload: &mut [u8; PAYLOAD_BYTES_MAX]) -> Result<Option<Header>, DeviceError> {
        let memory = &*self.memory;
        let chain = loop {
            if let Some(chain) = self.tx.queue.iter(memory).map_err(broken)?.next() {
                break chain;
            }
            if !self.tx.queue.enable_notification(memory).map_err(broken)? {
                return Ok(None);
            }
        };
        let head = chain.head_index();
        self.packet.clear();
        self.packet.append(memory, chain, Direction::FromDriver)?;
        let mut bytes = [0; HEADER_BYTES];
        if self.packet.read_at(0, &mut bytes) < HEADER_BYTES {
            return Err(DeviceError::Protocol(
                "a packet without a whole header".to_owned(),
            ));
        }
        let header = Header::read(&bytes);
        let length = header.len as usize;
        if length > PAYLOAD_BYTES_MAX || self.packet.bytes() - HEADER_BYTES < length {
            return Err(DeviceError::Protocol(format!(
                "a packet of {length} bytes does not fit its buffer"
            )));
        }
        self.packet.read_at(HEADER_BYTES, &mut payload[..length]);
        self.tx.queue.add_used(memory, head, 0).map_err(broken)?;
        Ok(Some(header))
    }

    /// Ends the taking of packets; `more` as for [`Queues::end_rx`].
    pub fn end_tx(&mut self, more: bool) -> Result<(), DeviceError> {
        if more {
            requeue(&self.tx);
        }
        signal(&mut self.tx, &self.memory, &*self.interrupt)
    }
}
