//! Packets to and from the guest: packets of connections, requests for new ones, resets.

use super::Connections;
use crate::virtio::device::DeviceError;
use crate::virtio::vsock::connection::Connection;
use crate::virtio::vsock::metrics::add;
use crate::virtio::vsock::open_request::OpenRequest;
use crate::virtio::vsock::packet::{HOST_CID, Header, Ports, TYPE_STREAM, op};
use crate::virtio::vsock::peer::Peer;
use crate::virtio::worker::Sources;

/// Greatest number of resets that wait for a receive buffer of the guest; further ones are not sent.
const RESETS_MAX: usize = 1_024;

impl Connections {
    /// Processes a packet of the guest.
    pub fn receive(&mut self, header: &Header, payload: &[u8], sources: &Sources) -> Result<(), DeviceError> {
        let ports = (header.dst_port, header.src_port);
        if header.src_cid != self.cid {
            // There is no receiver for a reply.
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
            // Only a reset may follow a request before its reply.
            (None, operation) if self.open_requests.forget(ports) => {
                if operation != op::RST {
                    self.reset(ports);
                }
                Ok(())
            }
            (None, op::REQUEST) => {
                self.open(ports, header);
                Ok(())
            }
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

    /// Requests the host's socket for the guest's request from the monitor.
    fn open(&mut self, ports: Ports, header: &Header) {
        let open_request = OpenRequest {
            ports,
            credit: (header.buf_alloc, header.fwd_cnt),
        };
        let asked = match &self.ports {
            Some(monitor) if self.open_requests.have_room() => monitor.request(ports.0).is_ok(),
            _ => false,
        };
        if asked {
            self.open_requests.add(open_request);
        } else {
            self.reset(ports);
        }
    }

    /// Processes the monitor's replies: connects the guest to sockets of the host.
    pub(super) fn take_answers(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        while let Some(monitor) = &self.ports {
            let answer = match monitor.answer() {
                Ok(Some(answer)) => answer,
                Ok(None) => break,
                // The monitor does not reply any longer, so all of the guest's requests fail.
                Err(_) => {
                    let _ = sources.remove(monitor);
                    self.ports = None;
                    for ports in self.open_requests.forget_all() {
                        self.reset(ports);
                    }
                    break;
                }
            };
            let answered = self.open_requests.answered(answer.port);
            for ports in answered.lost {
                self.reset(ports);
            }
            // The guest may have dropped the request meanwhile.
            let Some(open_request) = answered.open_request else {
                continue;
            };
            let peer = answer
                .stream
                .filter(|_| self.table.find(open_request.ports).is_none())
                .map(|stream| {
                    let (buf_alloc, fwd_cnt) = open_request.credit;
                    Peer::server(stream, open_request.ports, Connection::accept(buf_alloc, fwd_cnt))
                });
            let inserted = match peer {
                Some(peer) => self.insert(peer, sources)?,
                None => None,
            };
            match inserted {
                Some(index) => {
                    add(&self.metrics.opened, 1);
                    self.service(index, sources)?;
                }
                None => self.reset(open_request.ports),
            }
        }
        Ok(())
    }

    /// Returns whether there may be packets for the guest.
    pub fn have_packets(&self) -> bool {
        !self.resets.is_empty() || self.table.has_turn()
    }

    /// Returns the next packet for the guest. Its payload, if any, is written to the start of `payload`,
    /// which is not empty. The peer whose turn it is may have no packet.
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

    /// Drops a peer and sends the guest a reset.
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
