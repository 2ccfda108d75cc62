//! Guests that another implementation plays: they configure themselves, find one another and exchange data.

use std::collections::VecDeque;
use std::time::Duration;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::{dhcpv4, dns, icmp, tcp};
use smoltcp::time::Instant as Time;
use smoltcp::wire::{
    DnsQueryType, EthernetAddress, HardwareAddress, Icmpv4Packet, Icmpv4Repr, IpAddress, IpCidr, Ipv4Address,
};

use super::*;

const STEP: Duration = Duration::from_millis(10);
/// Limit of a test: a minute of the guests' time.
const STEPS_MAX: u32 = 6000;

/// A guest's card.
struct Wire {
    mtu: usize,
    to_guest: VecDeque<Vec<u8>>,
    from_guest: VecDeque<Vec<u8>>,
}

struct Received(Vec<u8>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

struct Sent<'a>(&'a mut VecDeque<Vec<u8>>);

impl TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, bytes: usize, f: F) -> R {
        let mut frame = vec![0; bytes];
        let result = f(&mut frame);
        self.0.push_back(frame);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _: Time) -> Option<(Received, Sent<'_>)> {
        Some((Received(self.to_guest.pop_front()?), Sent(&mut self.from_guest)))
    }

    fn transmit(&mut self, _: Time) -> Option<Sent<'_>> {
        Some(Sent(&mut self.from_guest))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = self.mtu;
        capabilities
    }
}

struct Machine {
    guest: Guest,
    wire: Wire,
    interface: Interface,
    sockets: SocketSet<'static>,
    dhcp: SocketHandle,
}

impl Machine {
    fn new(world: &World, guest: Guest) -> Self {
        let mut wire = Wire {
            mtu: world.network.frame_bytes_max(),
            to_guest: VecDeque::new(),
            from_guest: VecDeque::new(),
        };
        let mut config = Config::new(HardwareAddress::Ethernet(EthernetAddress(guest.mac)));
        config.slaac = true;
        let mut interface = Interface::new(config, &mut wire, Time::ZERO);
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(guest.link_local.into(), 64)).unwrap();
        });
        let mut sockets = SocketSet::new(Vec::new());
        let dhcp = sockets.add(dhcpv4::Socket::new());
        Self {
            guest,
            wire,
            interface,
            sockets,
            dhcp,
        }
    }

    /// Takes the address that the DHCP server has given. Returns the mask's bits, the router and the name
    /// servers.
    fn configure(&mut self) -> Option<(u8, Option<Ipv4Address>, Vec<Ipv4Address>)> {
        let socket = self.sockets.get_mut::<dhcpv4::Socket>(self.dhcp);
        let Some(dhcpv4::Event::Configured(config)) = socket.poll() else {
            return None;
        };
        assert_eq!(IpAddr::from(config.address.address()), self.guest.ipv4);
        let servers = config.dns_servers.iter().copied().collect();
        self.interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::Ipv4(config.address)).unwrap();
        });
        if let Some(router) = config.router {
            self.interface
                .routes_mut()
                .add_default_ipv4_route(router)
                .unwrap();
        }
        Some((config.address.prefix_len(), config.router, servers))
    }

    fn has_address(&self, address: IpAddr) -> bool {
        let mut addresses = self.interface.ip_addrs().iter();
        addresses.any(|found| IpAddr::from(found.address()) == address)
    }
}

struct Machines {
    world: World,
    machines: Vec<Machine>,
    steps: u32,
}

impl Machines {
    fn new(settings: Settings) -> Self {
        let mut world = World::new(settings);
        let guests = [world.attach(card("a", 1)), world.attach(card("b", 2))];
        let machines = guests.map(|guest| Machine::new(&world, guest)).into();
        Self {
            world,
            machines,
            steps: 0,
        }
    }

    /// Lets the guests run for a step.
    fn step(&mut self) {
        self.steps += 1;
        self.world.now += STEP;
        let time = Time::from_millis(i64::from(self.steps) * 10);
        for index in 0..self.machines.len() {
            let machine = &mut self.machines[index];
            machine
                .interface
                .poll(time, &mut machine.wire, &mut machine.sockets);
            let guest = machine.guest;
            while let Some(frame) = self.machines[index].wire.from_guest.pop_front() {
                for (target, frame) in self.world.receive(guest, &frame) {
                    let Target::Card(id) = target else {
                        continue;
                    };
                    let receiver = self.machines.iter_mut().find(|machine| machine.guest.id == id);
                    receiver.unwrap().wire.to_guest.push_back(frame);
                }
            }
        }
    }

    /// Lets the guests run until `check` returns a value.
    fn run<T>(&mut self, what: &str, mut check: impl FnMut(&mut [Machine]) -> Option<T>) -> T {
        let end = self.steps + STEPS_MAX;
        while self.steps < end {
            self.step();
            if let Some(found) = check(&mut self.machines) {
                return found;
            }
        }
        panic!("{what} did not happen");
    }

    /// Waits until all guests have their addresses of both versions.
    fn configured(settings: Settings) -> Self {
        let mut all = Self::new(settings);
        for index in 0..all.machines.len() {
            all.run("DHCP", |machines| machines[index].configure());
            let ipv6 = all.machines[index].guest.ipv6;
            all.run("address of IPv6", |machines| {
                machines[index].has_address(ipv6).then_some(())
            });
        }
        all
    }

    fn lookup(&mut self, name: &str, kind: DnsQueryType, server: IpAddress) -> Option<Vec<IpAddress>> {
        let machine = &mut self.machines[0];
        let handle = machine.sockets.add(dns::Socket::new(&[server], Vec::new()));
        let socket = machine.sockets.get_mut::<dns::Socket>(handle);
        let query = socket
            .start_query(machine.interface.context(), name, kind)
            .unwrap();
        let found = self.run("answer of DNS", |machines| {
            let socket = machines[0].sockets.get_mut::<dns::Socket>(handle);
            match socket.get_query_result(query) {
                Ok(found) => Some(Some(found.to_vec())),
                Err(dns::GetQueryResultError::Pending) => None,
                Err(dns::GetQueryResultError::Failed) => Some(None),
            }
        });
        // Or it would take the answers to later queries.
        self.machines[0].sockets.remove(handle);
        found
    }
}

#[test]
fn guest_gets_its_address_router_and_name_server_by_dhcp() {
    for outside in [true, false] {
        let mut all = Machines::new(Settings {
            outside,
            ..Settings::new("test")
        });
        let gateway = all.world.network.gateway().addresses.ipv4;
        let (bits, router, servers) = all.run("DHCP", |machines| machines[0].configure());
        assert_eq!(bits, 16);
        assert_eq!(router, outside.then_some(gateway));
        assert_eq!(servers, [gateway]);
    }
}

#[test]
fn guest_forms_its_ipv6_address_and_finds_its_router_if_there_is_one() {
    for outside_ipv6 in [true, false] {
        let all = Machines::configured(Settings {
            outside_ipv6,
            ..Settings::new("test")
        });
        let mut interface = all.machines;
        let mut routes = 0;
        interface[0]
            .interface
            .routes_mut()
            .update(|table| routes = table.len());
        // The other one is that of IPv4.
        assert_eq!(routes, 1 + usize::from(outside_ipv6));
    }
}

#[test]
fn guests_find_one_another_by_name() {
    let mut all = Machines::configured(Settings::new("test"));
    let gateway = all.world.network.gateway().addresses;
    let b = all.machines[1].guest;
    // `b` shows its address, so that it is known.
    let echo = icmp(route_v6(b, all.world.gateway()), &[128, 0, 0, 0, 0, 1, 0, 1]);
    assert_eq!(all.world.receive(b, &echo).len(), 1);
    for server in [IpAddress::from(gateway.ipv4), gateway.ipv6.into()] {
        for name in ["b.vm.internal", "B.VM.internal"] {
            assert_eq!(
                all.lookup(name, DnsQueryType::A, server),
                Some(vec![b.ipv4.into()])
            );
            let found = all.lookup(name, DnsQueryType::Aaaa, server);
            assert_eq!(found, Some(vec![b.ipv6.into()]), "{name} by {server}");
        }
        assert_eq!(all.lookup("c.vm.internal", DnsQueryType::A, server), None);
    }
}

#[test]
fn guests_exchange_segments_of_64_kib() {
    let mut all = Machines::configured(Settings::new("test"));
    let b = all.machines[1].guest;
    for (port, to) in [(80, b.ipv4), (81, b.ipv6)] {
        let socket = || tcp::Socket::new(buffer(), buffer());
        let server = all.machines[1].sockets.add(socket());
        all.machines[1]
            .sockets
            .get_mut::<tcp::Socket>(server)
            .listen(port)
            .unwrap();
        let machine = &mut all.machines[0];
        let client = machine.sockets.add(socket());
        let socket = machine.sockets.get_mut::<tcp::Socket>(client);
        let context = machine.interface.context();
        socket
            .connect(context, (IpAddress::from(to), port), 40_000)
            .unwrap();
        let data: Vec<u8> = (0..1_000_000_u32).map(|index| (index / 251) as u8).collect();
        let (mut sent, mut received) = (0, Vec::new());
        let before = all.world.network.counts(b.id).unwrap().to_guest;
        all.run("transfer", |machines| {
            let socket = machines[0].sockets.get_mut::<tcp::Socket>(client);
            if socket.can_send() && sent < data.len() {
                sent += socket.send_slice(&data[sent..]).unwrap();
            }
            let socket = machines[1].sockets.get_mut::<tcp::Socket>(server);
            if socket.can_recv() {
                let take = |bytes: &mut [u8]| (bytes.len(), received.extend_from_slice(bytes));
                socket.recv(take).unwrap();
            }
            (received.len() == data.len()).then_some(())
        });
        assert!(received == data, "the data differ");
        let frames = all.world.network.counts(b.id).unwrap().to_guest.frames - before.frames;
        assert!(frames < 100, "{frames} frames for a megabyte");
    }
}

fn buffer() -> tcp::SocketBuffer<'static> {
    tcp::SocketBuffer::new(vec![0; 256 * 1024])
}

#[test]
fn gateway_answers_echoes() {
    let mut all = Machines::configured(Settings::new("test"));
    let gateway = all.world.network.gateway().addresses.ipv4;
    let machine = &mut all.machines[0];
    let packets = || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY; 4], vec![0; 4096]);
    let handle = machine.sockets.add(icmp::Socket::new(packets(), packets()));
    let socket = machine.sockets.get_mut::<icmp::Socket>(handle);
    socket.bind(icmp::Endpoint::Ident(7)).unwrap();
    let request = Icmpv4Repr::EchoRequest {
        ident: 7,
        seq_no: 9,
        data: b"hello",
    };
    let buffer = socket.send(request.buffer_len(), gateway.into()).unwrap();
    request.emit(
        &mut Icmpv4Packet::new_unchecked(buffer),
        &ChecksumCapabilities::default(),
    );
    let (reply, from) = all.run("echo", |machines| {
        let socket = machines[0].sockets.get_mut::<icmp::Socket>(handle);
        socket.recv().ok().map(|(data, from)| (data.to_vec(), from))
    });
    assert_eq!(from, IpAddress::from(gateway));
    let reply = Icmpv4Repr::parse(
        &Icmpv4Packet::new_checked(&reply[..]).unwrap(),
        &ChecksumCapabilities::default(),
    );
    let expected = Icmpv4Repr::EchoReply {
        ident: 7,
        seq_no: 9,
        data: b"hello",
    };
    assert_eq!(reply.unwrap(), expected);
}

#[test]
fn network_drops_nothing_of_well_behaved_guests() {
    let all = Machines::configured(Settings::new("test"));
    for machine in &all.machines {
        let counts = all.world.network.counts(machine.guest.id).unwrap();
        assert_eq!(counts.from_guest.dropped_in_all(), 0, "{counts:?}");
        assert_eq!(counts.to_guest.dropped_in_all(), 0, "{counts:?}");
    }
}
