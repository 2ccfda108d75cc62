//! What the guest sends, and what is sent to it: packets of connections, requests for new ones, resets.

use super::Connections;
use crate::virtio::device::DeviceError;
use crate::virtio::vsock::connection::Connection;
use crate::virtio::vsock::metrics::add;
use crate::virtio::vsock::packet::{HOST_CID, Header, Ports, TYPE_STREAM, op};
use crate::virtio::vsock::peer::Peer;
use crate::virtio::vsock::socket;
use crate::virtio::worker::Sources;

/// Resets that wait for the guest to post a buffer; more are not sent.
const RESETS_MAX: usize = 1_024;

impl Connections {
    /// Takes a packet of the guest.
    pub fn receive(&mut self, header: &Header, payload: &[u8], sources: &Sources) -> Result<(), DeviceError> {
        let ports = (header.dst_port, header.src_port);
        if header.src_cid != self.cid {
            // Nobody to answer.
            return Ok(());
        }
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            if header.op != op::RST {
                self.reset(ports);
            }
            return Ok(());
        }
        match (self.table.find(ports), header.op) {
            (Some(index), _) => self.receive_for(index, header, payload, sources),
            (None, op::REQUEST) => self.open(ports, header, sources),
            (None, op::RST) => Ok(()),
            (None, _) => {
                self.reset(ports);
                Ok(())
            }
        }
    }

    fn receive_for(
        &mut self,
        index: usize,
        header: &Header,
        payload: &[u8],
        sources: &Sources,
    ) -> Result<(), DeviceError> {
        let Some(peer) = self.table.get(index) else {
            return Ok(());
        };
        let keep = match peer.receive(header, payload) {
            Ok(true) => {
                add(&self.metrics.opened, 1);
                peer.opened()
            }
            Ok(false) => {
                if header.op == op::RW {
                    add(&self.metrics.tx_bytes, payload.len());
                }
                true
            }
            Err(_) => false,
        };
        if keep {
            self.service(index, sources)
        } else {
            self.refuse(index);
            Ok(())
        }
    }

    /// Connects the guest to a socket of the host.
    fn open(&mut self, ports: Ports, header: &Header, sources: &Sources) -> Result<(), DeviceError> {
        let stream = self
            .ports
            .as_ref()
            .and_then(|directory| socket::connect(&directory.join(ports.0.to_string())).ok());
        let Some(stream) = stream else {
            self.reset(ports);
            return Ok(());
        };
        let connection = Connection::accept(header.buf_alloc, header.fwd_cnt);
        let Some(index) = self.insert(Peer::server(stream, ports, connection), sources)? else {
            self.reset(ports);
            return Ok(());
        };
        add(&self.metrics.opened, 1);
        self.service(index, sources)
    }

    /// Whether there may be packets for the guest.
    pub fn have_packets(&self) -> bool {
        !self.resets.is_empty() || self.table.has_turn()
    }

    /// The next packet for the guest; its payload, if any, is put at the start of `payload`, which is not empty. The one
    /// whose turn it is may have none.
    pub fn next_packet(
        &mut self,
        payload: &mut [u8],
        sources: &Sources,
    ) -> Result<Option<Header>, DeviceError> {
        if let Some(ports) = self.resets.pop_front() {
            let mut header = Header::to_guest(self.cid, ports);
            header.op = op::RST;
            return Ok(Some(header));
        }
        let Some((index, peer)) = self.table.next_turn() else {
            return Ok(None);
        };
        let packet = peer.next_packet(self.cid, payload);
        if let Some(header) = &packet {
            add(&self.metrics.rx_bytes, header.len as usize);
        }
        self.service(index, sources)?;
        Ok(packet)
    }

    /// Gives up a peer; the guest is told.
    pub(super) fn refuse(&mut self, index: usize) {
        if let Some(ports) = self.table.get(index).and_then(|peer| peer.ports()) {
            self.reset(ports);
        }
        self.table.remove(index);
    }

    fn reset(&mut self, ports: Ports) {
        add(&self.metrics.refused, 1);
        if self.resets.len() < RESETS_MAX {
            self.resets.push_back(ports);
        }
    }
}
