//! Connections of guests to the gateway's port of DNS, by which they ask for answers longer than a datagram.
//!
//! The guest's end is a connection as any other. In the place of the host's socket is one of a pair of local
//! streams; the caller's server of DNS has the other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use super::limits::Admission;
use super::stack::Link;
use super::table::FlowKey;
use super::{CardId, Connection, Nat, Output};
use crate::host_socket as socket;
use crate::network::dns::PORT;

/// Greatest number of connections that wait for the server.
const WAITING_MAX: usize = 64;
/// Bytes of both buffers of a connection: a query is short, and an answer waits for room.
const BUFFER_BYTES: usize = 16 << 10;

/// A guest's connection to the gateway's DNS.
#[derive(Debug)]
pub struct DnsStream {
    /// Card of the guest.
    pub card: CardId,
    /// The server's end. Its peer ends with the guest's connection.
    pub socket: OwnedFd,
}

impl AsFd for DnsStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Nat {
    /// Returns the connections to the gateway's DNS that were opened since the last call. Dropping one ends
    /// the guest's connection.
    pub fn take_dns_streams(&mut self) -> Vec<DnsStream> {
        std::mem::take(&mut self.dns_streams)
    }

    /// Returns whether a connection is one to the gateway's DNS.
    pub(super) fn is_to_dns(&self, key: &FlowKey) -> bool {
        let card = self.cards.get(&key.card);
        card.is_some_and(|entry| entry.card.gateways.contains(key.remote.ip())) && key.remote.port() == PORT
    }

    /// Opens the connection that a guest's SYN requests. Beyond the limits the guest gets a reset.
    pub(super) fn open_dns(&mut self, key: FlowKey, syn: &[u8], now: Instant, output: &mut dyn Output) {
        let (used, all) = self.flows.used(key.card);
        let cards = self.cards.len();
        let has_room = self.dns_streams.len() < WAITING_MAX
            && self.limits.admit_connection(&used, &all, cards) == Admission::Admitted
            && self.limits.buffers(&used, &all, cards).is_some();
        let id = self.flows.next_id();
        let pair = has_room.then(socket::stream_pair).and_then(Result::ok);
        let watched = pair.filter(|(host, _)| self.watch_stream(host, id).is_ok());
        let Some((host, server)) = watched else {
            self.count(key.card, |counts| &mut counts.limited);
            self.reset(key.card, syn, now, output);
            return;
        };
        let mut connection = Connection::accept(host, key.remote, BUFFER_BYTES, now);
        connection.receive(syn, &mut self.stack, &mut Link::new(key.card, output), now);
        self.add_connection(id, key, connection, BUFFER_BYTES, now);
        self.dns_streams.push(DnsStream {
            card: key.card,
            socket: server,
        });
    }
}
