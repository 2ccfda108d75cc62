//! The device's peers, by index and by ports, and the order of their turns to send to the guest.
//!
//! Invariants: `by_ports` has the ports of every peer with ports; `turns` has an index at most once, and only
//! of a peer in the table.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use super::connection::Connection;
use super::packet::Ports;
use super::peer::{Peer, Phase};

/// Greatest number of peers, those still opening included.
const PEERS_MAX: usize = 1_023;
/// First port on the host's side of connections that the host requests.
const HOST_PORT_FIRST: u32 = 1 << 30;

/// Table of the peers.
pub struct Table {
    peers: Vec<Option<Peer>>,
    free: Vec<usize>,
    by_ports: HashMap<Ports, usize>,
    turns: VecDeque<usize>,
    host_port_next: u32,
}

impl Table {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self {
            peers: Vec::new(),
            free: Vec::new(),
            by_ports: HashMap::new(),
            turns: VecDeque::new(),
            host_port_next: HOST_PORT_FIRST,
        }
    }

    /// Inserts a peer if there is room, and returns its index.
    pub fn insert(&mut self, peer: Peer) -> Option<(usize, &mut Peer)> {
        if self.peers.len() - self.free.len() >= PEERS_MAX {
            return None;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.peers.push(None);
            self.peers.len() - 1
        });
        if let Some(ports) = peer.ports() {
            self.by_ports.insert(ports, index);
        }
        Some((index, self.peers[index].insert(peer)))
    }

    /// Returns a peer; none if it was removed.
    pub fn get(&mut self, index: usize) -> Option<&mut Peer> {
        self.peers.get_mut(index)?.as_mut()
    }

    /// Returns the index of a connection's peer.
    pub fn find(&self, ports: Ports) -> Option<usize> {
        self.by_ports.get(&ports).copied()
    }

    /// Starts a connection to `guest_port` of the guest for a peer without one, from an unused port of the
    /// host.
    pub fn connect(&mut self, index: usize, guest_port: u32) {
        let Some(peer) = self.peers.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        let after = |port: u32| HOST_PORT_FIRST | port.wrapping_add(1) & (HOST_PORT_FIRST - 1);
        let mut host_port = self.host_port_next;
        // Terminates: there are far fewer connections than ports.
        while self.by_ports.contains_key(&(host_port, guest_port)) {
            host_port = after(host_port);
        }
        self.host_port_next = after(host_port);
        let ports = (host_port, guest_port);
        peer.phase = Phase::Connected {
            ports,
            connection: Connection::request(),
        };
        self.by_ports.insert(ports, index);
    }

    /// Removes a peer, which closes its socket.
    pub fn remove(&mut self, index: usize) {
        let Some(peer) = self.peers.get_mut(index).and_then(Option::take) else {
            return;
        };
        if let Some(ports) = peer.ports() {
            self.by_ports.remove(&ports);
        }
        if peer.queued {
            // Otherwise a guest that opens and resets, and posts no buffers, would make the list grow.
            self.turns.retain(|queued| *queued != index);
        }
        self.free.push(index);
    }

    /// Gives a peer a turn, unless it waits for one.
    pub fn queue(&mut self, index: usize) {
        if let Some(peer) = self.peers.get_mut(index).and_then(Option::as_mut)
            && !peer.queued
        {
            peer.queued = true;
            self.turns.push_back(index);
        }
    }

    /// Returns whether a peer waits for its turn.
    pub fn has_turn(&self) -> bool {
        !self.turns.is_empty()
    }

    /// Removes and returns the peer whose turn is next.
    pub fn next_turn(&mut self) -> Option<(usize, &mut Peer)> {
        let index = self.turns.pop_front()?;
        let peer = self.peers.get_mut(index)?.as_mut()?;
        peer.queued = false;
        Some((index, peer))
    }

    /// Returns the peers that must open by a deadline, with their deadlines.
    pub fn deadlines(&self) -> Vec<(usize, Instant)> {
        let deadline = |(index, peer): (usize, &Option<Peer>)| Some((index, peer.as_ref()?.deadline?));
        self.peers.iter().enumerate().filter_map(deadline).collect()
    }

    /// Removes all peers.
    pub fn clear(&mut self) {
        self.peers.clear();
        self.free.clear();
        self.by_ports.clear();
        self.turns.clear();
    }
}
