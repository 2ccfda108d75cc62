//! The world of a test: a translator, a guest behind it, and a clock that can be advanced.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::wire::{HardwareAddress, IpEndpoint};

use crate::filter::Barred;
use crate::nat::connection::Connection;
use crate::nat::table::Transport;
use crate::nat::{Card, CardId, Counts, Gateways, Limits, Nat, Output, Settings};

pub(super) const CARD: CardId = CardId(1);
pub(super) const MTU: usize = 65_520;
/// Longest time that a test waits for something.
const LIMIT: Duration = Duration::from_secs(20);

pub(super) fn gateways() -> Gateways {
    Gateways {
        ipv4: [10, 77, 0, 1].into(),
        ipv6: "fd77::1".parse().unwrap(),
    }
}

/// The guest's address of the gateway's version.
pub(super) fn guest_address(gateway: IpAddr) -> IpAddr {
    match gateway {
        IpAddr::V4(_) => [10, 77, 0, 5].into(),
        IpAddr::V6(_) => "fd77::5".parse().unwrap(),
    }
}

pub(super) fn card(host: bool) -> Card {
    Card {
        address: [10, 77, 0, 5].into(),
        gateways: gateways(),
        host,
    }
}

pub(super) fn nat(limits: Limits, barred: Barred) -> Nat {
    let list = barred.clone();
    let settings = Settings {
        limits,
        mtu: MTU,
        barred,
        list_addresses: Box::new(move || Some(list.clone())),
    };
    Nat::new(settings, Instant::now()).unwrap()
}

/// Packets to guests, with a bound.
pub(super) struct Wire {
    pub(super) packets: VecDeque<(CardId, Vec<u8>)>,
    pub(super) capacity: usize,
    /// Packets that were sent without room.
    pub(super) lost: usize,
}

impl Wire {
    pub(super) fn new() -> Self {
        Self {
            packets: VecDeque::new(),
            capacity: 64,
            lost: 0,
        }
    }
}

impl Output for Wire {
    fn has_room(&mut self, _: CardId) -> bool {
        self.packets.len() < self.capacity
    }

    fn send(&mut self, card: CardId, packet: &[u8]) {
        if self.has_room(card) {
            self.packets.push_back((card, packet.to_vec()));
        } else {
            self.lost += 1;
        }
    }
}

/// The guest's device.
struct Cable<'a> {
    arriving: &'a mut VecDeque<(CardId, Vec<u8>)>,
    leaving: &'a mut VecDeque<Vec<u8>>,
    /// Checksums of TCP that the guest computes or checks.
    checksums: Checksum,
}

struct Arrived(Vec<u8>);

impl RxToken for Arrived {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

struct Leaving<'a>(&'a mut VecDeque<Vec<u8>>);

impl TxToken for Leaving<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, bytes: usize, write: F) -> R {
        let mut packet = vec![0; bytes];
        let result = write(&mut packet);
        self.0.push_back(packet);
        result
    }
}

impl Device for Cable<'_> {
    type RxToken<'a>
        = Arrived
    where
        Self: 'a;
    type TxToken<'a>
        = Leaving<'a>
    where
        Self: 'a;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Arrived, Leaving<'_>)> {
        let (_, packet) = self.arriving.pop_front()?;
        Some((Arrived(packet), Leaving(self.leaving)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Leaving<'_>> {
        Some(Leaving(self.leaving))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities.checksum.tcp = self.checksums;
        capabilities
    }
}

/// A translator with one guest.
pub(super) struct World {
    pub(super) nat: Nat,
    pub(super) wire: Wire,
    sockets: SocketSet<'static>,
    interface: Interface,
    leaving: VecDeque<Vec<u8>>,
    /// Whether packets to the guest stay on the wire, for the test to read.
    pub(super) keeps_packets: bool,
    checksums: Checksum,
    start: Instant,
    skipped: Duration,
    next_port: u16,
}

impl World {
    pub(super) fn new() -> Self {
        Self::with_limits(Limits::of_descriptors(16_384))
    }

    /// Creates a guest that leaves the checksums of TCP to the receiver.
    pub(super) fn without_checksums() -> Self {
        Self::with_checksums(Limits::of_descriptors(16_384), Checksum::Rx)
    }

    pub(super) fn with_limits(limits: Limits) -> Self {
        Self::with_checksums(limits, Checksum::Both)
    }

    fn with_checksums(limits: Limits, checksums: Checksum) -> Self {
        let mut nat = nat(limits, Barred::default());
        nat.add_card(CARD, card(true));
        let mut cable = Cable {
            arriving: &mut VecDeque::new(),
            leaving: &mut VecDeque::new(),
            checksums,
        };
        let config = Config::new(HardwareAddress::Ip);
        let mut interface = Interface::new(config, &mut cable, smoltcp::time::Instant::ZERO);
        interface.set_any_ip(true);
        Self {
            nat,
            wire: Wire::new(),
            sockets: SocketSet::new(Vec::new()),
            interface,
            leaving: VecDeque::new(),
            keeps_packets: false,
            checksums,
            start: Instant::now(),
            skipped: Duration::ZERO,
            next_port: 20_000,
        }
    }

    pub(super) fn now(&self) -> Instant {
        Instant::now() + self.skipped
    }

    /// Advances the clock.
    pub(super) fn skip(&mut self, time: Duration) {
        self.skipped += time;
    }

    pub(super) fn counts(&self) -> Counts {
        self.nat.counts(CARD).unwrap()
    }

    /// Sends a packet of the guest.
    pub(super) fn send(&mut self, packet: &[u8]) {
        let now = self.now();
        self.nat.receive(CARD, packet, now, &mut self.wire);
    }

    /// Lets the guest and the translator do what they can. Returns whether any packet moved.
    pub(super) fn step(&mut self) -> bool {
        let now = self.now();
        let elapsed = now.duration_since(self.start).as_micros();
        let time = smoltcp::time::Instant::from_micros(i64::try_from(elapsed).unwrap());
        let mut moved = false;
        if !self.keeps_packets {
            moved = !self.wire.packets.is_empty();
            let mut cable = Cable {
                arriving: &mut self.wire.packets,
                leaving: &mut self.leaving,
                checksums: self.checksums,
            };
            self.interface.poll(time, &mut cable, &mut self.sockets);
        }
        for packet in std::mem::take(&mut self.leaving) {
            moved = true;
            self.nat.receive(CARD, &packet, now, &mut self.wire);
        }
        if self.wire.has_room(CARD) {
            self.nat.resume(CARD);
        }
        self.nat.turn(now, &mut self.wire);
        moved || !(self.keeps_packets || self.wire.packets.is_empty())
    }

    /// Steps until `done`.
    pub(super) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !done(self) {
            assert!(Instant::now() < end, "{what}: {:?}", self.counts());
            if !self.step() {
                let mut files = [PollFd::new(self.nat.as_fd(), PollFlags::POLLIN)];
                poll(&mut files, 1_u8).unwrap();
            }
        }
    }

    /// Steps for a time.
    pub(super) fn run_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        self.until("time", |_| Instant::now() >= end);
    }

    /// Begins a connection of the guest to a port of the gateway.
    pub(super) fn connect(&mut self, gateway: IpAddr, port: u16) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 262_144]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_ack_delay(None);
        self.next_port += 1;
        let from = IpEndpoint::from(SocketAddr::new(guest_address(gateway), self.next_port));
        let to = IpEndpoint::from(SocketAddr::new(gateway, port));
        socket.connect(self.interface.context(), to, from).unwrap();
        self.sockets.add(socket)
    }

    /// Lets the guest forget its last connection, without a packet. The next one has the same port.
    pub(super) fn forget(&mut self, handle: SocketHandle) {
        self.sockets.remove(handle);
        self.next_port -= 1;
    }

    /// Listens at a port of the guest.
    pub(super) fn listen(&mut self, port: u16) -> SocketHandle {
        let buffer = || SocketBuffer::new(vec![0; 65_536]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.listen(port).unwrap();
        self.sockets.add(socket)
    }

    /// Adds a connection to a port of the guest, with this socket as the host's.
    pub(super) fn add_connection(&mut self, host: OwnedFd, port: u16) {
        const BYTES: usize = 512 << 10;
        let now = self.now();
        let nat = &mut self.nat;
        let key = nat
            .forwarded_key(CARD, &card(true), Transport::Tcp, port)
            .unwrap();
        let id = nat.flows.next_id();
        nat.watch_stream(&host, id).unwrap();
        let connection = Connection::connect(host, key.guest, key.remote, BYTES, &mut nat.stack, now);
        nat.add_connection(id, key, connection, BYTES, now);
    }

    pub(super) fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    pub(super) fn state(&mut self, handle: SocketHandle) -> State {
        self.socket(handle).state()
    }

    pub(super) fn write(&mut self, handle: SocketHandle, bytes: &[u8]) {
        let written = self.socket(handle).send_slice(bytes).unwrap();
        assert_eq!(written, bytes.len());
    }

    /// Reads the bytes that the guest has.
    pub(super) fn read(&mut self, handle: SocketHandle) -> Vec<u8> {
        let mut bytes = Vec::new();
        let socket = self.socket(handle);
        while socket.can_recv() {
            bytes.extend(socket.recv(|part| (part.len(), part.to_vec())).unwrap());
        }
        bytes
    }

    /// Reads the guest's bytes until the end of the direction.
    pub(super) fn read_to_end(&mut self, handle: SocketHandle) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.until("end of the guest's bytes", |world| {
            bytes.extend(world.read(handle));
            !world.socket(handle).may_recv()
        });
        bytes
    }

    /// Opens a connection of the guest to a new listener of the host.
    pub(super) fn connected(&mut self, gateway: IpAddr) -> (SocketHandle, TcpStream) {
        let listener = listener(gateway);
        let guest = self.connect(gateway, listener.local_addr().unwrap().port());
        self.until("connection", |world| world.state(guest) == State::Established);
        let (host, _) = listener.accept().unwrap();
        host.set_nonblocking(true).unwrap();
        (guest, host)
    }
}

/// Listens on the host's loopback of the address's version.
pub(super) fn listener(gateway: IpAddr) -> TcpListener {
    let listener = match gateway {
        IpAddr::V4(_) => TcpListener::bind("127.0.0.1:0"),
        IpAddr::V6(_) => TcpListener::bind("[::1]:0"),
    };
    listener.unwrap()
}

pub(super) fn ipv4() -> IpAddr {
    gateways().ipv4.into()
}

pub(super) fn ipv6() -> IpAddr {
    gateways().ipv6.into()
}
