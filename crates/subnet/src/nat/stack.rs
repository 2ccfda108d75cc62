//! The TCP stack towards guests: `smoltcp`, with one set of sockets for each connection.
//!
//! A set with a single socket makes the cost of a packet independent of the number of connections. The
//! interface, which all connections share, has no state for packets of IP without Ethernet: it takes packets
//! to any address.
//!
//! `smoltcp` panics when its arithmetic of sequence numbers overflows. No input is known that does this. As a
//! guest's packets reach that code, a panic in it ends the connection and no other, and is counted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, PollResult, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::wire::HardwareAddress;

use super::{CardId, Output};

/// Bytes of the buffer beyond the largest packet, by which a longer datagram is noticed.
const SPARE_BYTES: usize = 64;

/// Segments that one connection sends in one turn. It goes on in the next one, as others also wait.
pub(super) const SEGMENTS_MAX: usize = 1024;

/// Failure of the stack, by which a connection ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackFailure;

/// The stack.
pub(super) struct Stack {
    interface: Interface,
    capabilities: DeviceCapabilities,
    /// Time 0 of the stack.
    start: Instant,
    /// Where packets to guests are written.
    buffer: Vec<u8>,
    /// Number of panics in the stack.
    failures: u64,
}

/// Path to a card, for one call of the stack.
pub(super) struct Link<'a> {
    card: CardId,
    output: &'a mut dyn Output,
    /// Whether a packet waits because the card has no room.
    pub(super) is_full: bool,
    /// Whether a packet was sent.
    pub(super) has_sent: bool,
}

impl<'a> Link<'a> {
    pub(super) fn new(card: CardId, output: &'a mut dyn Output) -> Self {
        Self {
            card,
            output,
            is_full: false,
            has_sent: false,
        }
    }
}

impl Stack {
    /// Creates a stack whose time begins at `start`. The first numbers of connections derive from `seed`.
    pub(super) fn new(mtu: usize, start: Instant, seed: u64) -> Self {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = mtu;
        // Guests leave the checksum to the receiver; memory changes no bytes.
        capabilities.checksum.tcp = Checksum::Tx;
        let mut buffer = vec![0; mtu + SPARE_BYTES];
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut device = Port {
            packet: None,
            link: None,
            buffer: &mut buffer,
            capabilities: &capabilities,
        };
        let mut interface = Interface::new(config, &mut device, smoltcp::time::Instant::ZERO);
        interface.set_any_ip(true);
        Self {
            interface,
            capabilities,
            start,
            buffer,
            failures: 0,
        }
    }

    /// Returns the number of connections that ended by a failure of the stack.
    pub(super) fn failures(&self) -> u64 {
        self.failures
    }

    /// Returns the buffer for a packet to a guest.
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Returns the interface's state that sockets need when they connect.
    pub(super) fn interface(&mut self) -> &mut Interface {
        &mut self.interface
    }

    fn time(&self, now: Instant) -> smoltcp::time::Instant {
        let elapsed = now.saturating_duration_since(self.start).as_micros();
        smoltcp::time::Instant::from_micros(i64::try_from(elapsed).unwrap_or(i64::MAX))
    }

    /// Passes a guest's packet to the sockets. The stack may reply at once. Without a socket the reply is a
    /// reset.
    pub(super) fn receive(
        &mut self,
        packet: &[u8],
        sockets: &mut SocketSet<'static>,
        link: &mut Link<'_>,
        now: Instant,
    ) -> Result<(), StackFailure> {
        let time = self.time(now);
        let mut port = Port {
            packet: Some(packet),
            link: Some(link),
            buffer: &mut self.buffer,
            capabilities: &self.capabilities,
        };
        let interface = &mut self.interface;
        guarded(&mut self.failures, || {
            interface.poll_ingress_single(time, &mut port, sockets);
        })
    }

    /// Sends what the sockets have to send, as far as the card has room, and up to `segments_max` segments.
    pub(super) fn send(
        &mut self,
        sockets: &mut SocketSet<'static>,
        link: &mut Link<'_>,
        segments_max: usize,
        now: Instant,
    ) -> Result<(), StackFailure> {
        let time = self.time(now);
        let mut port = Port {
            packet: None,
            link: Some(link),
            buffer: &mut self.buffer,
            capabilities: &self.capabilities,
        };
        let interface = &mut self.interface;
        guarded(&mut self.failures, || {
            for _ in 0..segments_max {
                if interface.poll_egress(time, &mut port, sockets) != PollResult::SocketStateChanged {
                    break;
                }
            }
        })
    }

    /// Returns when the sockets must send, without other events.
    pub(super) fn deadline(&mut self, sockets: &SocketSet<'static>, now: Instant) -> Option<Instant> {
        let time = self.time(now);
        let interface = &mut self.interface;
        let at = guarded(&mut self.failures, || interface.poll_at(time, sockets))
            .ok()
            .flatten()?;
        let micros = u64::try_from(at.total_micros()).unwrap_or(0);
        self.start.checked_add(Duration::from_micros(micros))
    }
}

fn guarded<T>(failures: &mut u64, call: impl FnOnce() -> T) -> Result<T, StackFailure> {
    // The connection, whose sockets may be inconsistent, ends. The interface has nothing that a packet
    // changes.
    catch_unwind(AssertUnwindSafe(call)).map_err(|_| {
        *failures = failures.saturating_add(1);
        StackFailure
    })
}

/// The device of the interface: one packet of a guest, and the path back.
struct Port<'a, 'b> {
    packet: Option<&'a [u8]>,
    link: Option<&'a mut Link<'b>>,
    buffer: &'a mut Vec<u8>,
    capabilities: &'a DeviceCapabilities,
}

impl<'b> Device for Port<'_, 'b> {
    type RxToken<'t>
        = Received<'t>
    where
        Self: 't;
    type TxToken<'t>
        = Outgoing<'t, 'b>
    where
        Self: 't;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received<'_>, Outgoing<'_, 'b>)> {
        let packet = self.packet.take()?;
        let link = self.link.as_deref_mut()?;
        Some((
            Received(packet),
            Outgoing {
                link,
                buffer: &mut *self.buffer,
            },
        ))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Outgoing<'_, 'b>> {
        let link = self.link.as_deref_mut()?;
        if !link.output.has_room(link.card) {
            link.is_full = true;
            return None;
        }
        Some(Outgoing {
            link,
            buffer: &mut *self.buffer,
        })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        self.capabilities.clone()
    }
}

struct Received<'a>(&'a [u8]);

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

struct Outgoing<'a, 'b> {
    link: &'a mut Link<'b>,
    buffer: &'a mut Vec<u8>,
}

impl TxToken for Outgoing<'_, '_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, bytes: usize, write: F) -> R {
        if bytes > self.buffer.len() {
            self.buffer.resize(bytes, 0);
        }
        let packet = &mut self.buffer[..bytes];
        let result = write(packet);
        self.link.output.send(self.link.card, packet);
        self.link.has_sent = true;
        result
    }
}
