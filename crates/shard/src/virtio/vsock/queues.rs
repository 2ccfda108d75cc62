//! The receive and the transmit queue: packets in and out of the guest's memory.
//!
//! A receive buffer is taken from the ring when there may be something for the guest, and held until a packet
//! fills it.

use std::sync::Arc;

use virtio_queue::{QueueOwnedT, QueueT};

use super::packet::{HEADER_BYTES, Header, PAYLOAD_BYTES_MAX};
use crate::memory::GuestRam;
use crate::virtio::device::{Activation, ActiveQueue, DeviceError, Interrupt};
use crate::virtio::segments::{Direction, Segments};
use crate::virtio::serve::{broken, look_again, signal};

/// The queue of packets for the guest.
pub const RX: u16 = 0;
/// The queue of the guest's packets.
pub const TX: u16 = 1;
/// The queue of events for the guest.
const EVENT: u16 = 2;
/// The event that ends all connections and lets the driver read its id anew (Virtio 1.2, section 5.10.6.7).
const TRANSPORT_RESET: u32 = 0;

/// The queues while the driver has them enabled.
pub struct Queues {
    memory: GuestRam,
    interrupt: Arc<dyn Interrupt>,
    rx: ActiveQueue,
    tx: ActiveQueue,
    /// The head of the receive buffer that is held, and its memory.
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
    /// The queues of an activation; the driver must have enabled both.
    pub fn new(activation: Activation) -> Result<Self, DeviceError> {
        let (mut rx, mut tx) = (None, None);
        for mut active in activation.queues {
            match active.index {
                RX => rx = Some(active),
                TX => tx = Some(active),
                // A guest that goes on elsewhere has another id now, and its connections are gone.
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

    /// Packets are about to be sent to the guest: it need not tell of new buffers until there are none left.
    pub fn begin_rx(&mut self) -> Result<(), DeviceError> {
        self.rx.queue.disable_notification(&*self.memory).map_err(broken)
    }

    /// Holds a receive buffer and returns its room for payload, never 0; nothing when the guest has posted
    /// none. It will notify when it does.
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

    /// Gives the held buffer to the guest, with a packet.
    pub fn send(&mut self, header: &Header, payload: &[u8]) -> Result<(), DeviceError> {
        let Some(head) = self.held.take() else {
            return Ok(());
        };
        self.buffer.write_at(0, &header.bytes());
        self.buffer.write_at(HEADER_BYTES, payload);
        let bytes = HEADER_BYTES as u32 + header.len;
        self.rx.queue.add_used(&*self.memory, head, bytes).map_err(broken)
    }

    /// Packets have been sent to the guest; with `more`, comes back to the queue after what else waits for
    /// this thread.
    pub fn end_rx(&mut self, more: bool) -> Result<(), DeviceError> {
        if more {
            look_again(&self.rx);
        }
        signal(&mut self.rx, &self.memory, &*self.interrupt)
    }

    /// Packets of the guest are about to be taken: it need not tell of more until there are none left.
    pub fn begin_tx(&mut self) -> Result<(), DeviceError> {
        self.tx.queue.disable_notification(&*self.memory).map_err(broken)
    }

    /// Takes a packet of the guest; its payload is put at the start of `payload`. The guest will notify when
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

    /// Packets of the guest have been taken; `more` as for [`Queues::end_rx`].
    pub fn end_tx(&mut self, more: bool) -> Result<(), DeviceError> {
        if more {
            look_again(&self.tx);
        }
        signal(&mut self.tx, &self.memory, &*self.interrupt)
    }
}
