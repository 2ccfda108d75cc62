//! Serves the socket device's queues: moves packets between the guest and the connections.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use super::connections::Connections;
use super::metrics::VsockMetrics;
use super::packet::PAYLOAD_BYTES_MAX;
use super::queues::{Queues, RX, TX};
use crate::ports::Ports;
use crate::virtio::device::{Activation, DeviceError};
use crate::virtio::worker::{Event, Handler, Sources};

/// Greatest number of packets moved for one event, after which other events are served.
const PACKETS_PER_EVENT: usize = 256;

/// The half of the socket device that runs on its thread.
pub struct VsockHandler {
    connections: Connections,
    queues: Option<Queues>,
    /// Payload in transit between a socket and guest memory.
    payload: Box<[u8; PAYLOAD_BYTES_MAX]>,
}

impl VsockHandler {
    /// Creates a handler that waits for its first activation.
    pub fn new(
        cid: u64,
        listener: UnixListener,
        ports: Option<Ports>,
        metrics: Arc<VsockMetrics>,
    ) -> io::Result<Self> {
        Ok(Self {
            connections: Connections::new(cid, listener, ports, metrics)?,
            queues: None,
            payload: Box::new([0; PAYLOAD_BYTES_MAX]),
        })
    }

    /// Processes the guest's packets.
    fn drain(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let Some(queues) = &mut self.queues else {
            return Ok(());
        };
        queues.begin_tx()?;
        let mut packets = 0;
        while packets < PACKETS_PER_EVENT
            && let Some(header) = queues.take(&mut self.payload)?
        {
            packets += 1;
            let payload = &self.payload[..header.len as usize];
            self.connections.receive(&header, payload, sources)?;
        }
        if packets > 0 {
            queues.end_tx(packets == PACKETS_PER_EVENT)?;
        }
        Ok(())
    }

    /// Sends the waiting packets to the guest, as far as it has posted buffers.
    fn fill(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let Some(queues) = &mut self.queues else {
            return Ok(());
        };
        queues.begin_rx()?;
        let mut packets = 0;
        while packets < PACKETS_PER_EVENT
            && self.connections.have_packets()
            && let Some(room) = queues.hold()?
        {
            let room = room.min(PAYLOAD_BYTES_MAX);
            let packet = self.connections.next_packet(&mut self.payload[..room], sources)?;
            if let Some(header) = packet {
                queues.send(&header, &self.payload[..header.len as usize])?;
                packets += 1;
            }
        }
        if packets > 0 {
            queues.end_rx(packets == PACKETS_PER_EVENT)?;
        }
        Ok(())
    }
}

impl Handler for VsockHandler {
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError> {
        self.queues = Some(Queues::new(activation)?);
        self.connections.start(sources)?;
        self.drain(sources)?;
        self.fill(sources)
    }

    fn handle(&mut self, event: Event, sources: &Sources) -> Result<(), DeviceError> {
        match event {
            Event::Queue(RX) => {}
            Event::Queue(TX) => self.drain(sources)?,
            Event::Queue(_) => return Ok(()),
            Event::Source(token) => self.connections.ready(token, sources)?,
        }
        self.fill(sources)
    }

    fn stop(&mut self, sources: &Sources) {
        self.connections.stop(sources);
        self.queues = None;
    }
}
