//! Tests of the loop with guests that the test plays, over real sockets.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::unistd::geteuid;
use registry::subnet::{Captured, Connection, HostFacts, NetworkReport, NetworkSettings, socket_path};

use super::*;

mod dns_over_tcp;
mod lookup;

/// A gateway on a thread, with a runtime directory of its own.
struct Served {
    runtime: PathBuf,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Served {
    fn start(name: &str) -> Self {
        Self::of_owner(name, geteuid().as_raw(), Duration::from_secs(60))
    }

    fn of_owner(name: &str, owner: u32, idle: Duration) -> Self {
        let runtime = std::env::temp_dir().join(format!("gateway-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&runtime);
        std::fs::create_dir(&runtime).unwrap();
        let listener = UnixListener::bind(socket_path(&runtime)).unwrap();
        let missing = (name == "layers").then(|| "system call filter: not supported".to_owned());
        let thread = std::thread::spawn(move || {
            let gateway = Gateway::new(listener, owner, 1024)?;
            gateway.with_idle_limit(idle).with_missing_layers(missing).run()
        });
        Self {
            runtime,
            thread: Some(thread),
        }
    }

    fn connect(&self) -> Connection {
        let connection = Connection::open(&self.runtime).unwrap();
        connection.set_limit(Some(Duration::from_secs(20))).unwrap();
        connection
    }

    fn ask(&self, request: &Request) -> Option<Response> {
        let mut connection = self.connect();
        connection.send(request, &[]).unwrap();
        connection.receive().unwrap()
    }

    fn networks(&self) -> Vec<NetworkReport> {
        match self.ask(&Request::List) {
            Some(Response::Networks { networks, .. }) => networks,
            other => panic!("{other:?}"),
        }
    }

    fn join(&self, join: Join) -> Result<Guest, String> {
        let (near, far) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap();
        let mut connection = self.connect();
        let mac = join.mac;
        connection
            .send(&Request::Join(Box::new(join)), &[far.as_fd()])
            .unwrap();
        match connection.receive().unwrap() {
            Some(Response::Joined { addresses, offloads }) => {
                let std::net::IpAddr::V4(address) = addresses[0] else {
                    panic!("{addresses:?}");
                };
                Ok(Guest {
                    near,
                    connection,
                    mac,
                    address,
                    has_offloads: offloads,
                })
            }
            Some(Response::Refused { why }) => Err(why),
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.runtime);
        // A gateway that waits for its idle limit is left to the end of the test's process.
        drop(self.thread.take());
    }
}

fn card(network: &str, vm: &str, number: u8) -> Join {
    Join {
        network: network.to_owned(),
        vm: vm.to_owned(),
        card: 0,
        mac: [2, 0, 0, 0, 0, number],
        address: None,
        forward: Vec::new(),
        host: false,
        bandwidth: None,
        packets: None,
        offloads: false,
        sandbox_required: false,
        outside: true,
        settings: None,
        facts: HostFacts::default(),
    }
}

/// A guest's end of a card.
struct Guest {
    near: OwnedFd,
    connection: Connection,
    mac: [u8; 6],
    address: Ipv4Addr,
    has_offloads: bool,
}

impl Guest {
    fn send(&self, frame: &[u8]) {
        send(self.near.as_raw_fd(), frame, MsgFlags::empty()).unwrap();
    }

    /// Returns the next frame that `is_wanted`, or none after the limit.
    fn receive_within(&self, limit: Duration, is_wanted: impl Fn(&[u8]) -> bool) -> Option<Vec<u8>> {
        let end = Instant::now() + limit;
        let mut buffer = vec![0; 1 << 17];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = PollTimeout::try_from(left).unwrap();
            let mut files = [PollFd::new(self.near.as_fd(), PollFlags::POLLIN)];
            if poll(&mut files, left).unwrap() == 0 {
                return None;
            }
            let bytes = recv(self.near.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT).unwrap();
            if bytes == 0 {
                return None;
            }
            if is_wanted(&buffer[..bytes]) {
                return Some(buffer[..bytes].to_vec());
            }
        }
    }

    /// A UDP datagram to another guest's hardware address.
    fn datagram(&self, to: ([u8; 6], Ipv4Addr), port: u16, payload: &[u8]) -> Vec<u8> {
        let mut content = 5000_u16.to_be_bytes().to_vec();
        content.extend(port.to_be_bytes());
        content.extend(((8 + payload.len()) as u16).to_be_bytes());
        content.extend([0, 0]);
        content.extend(payload);
        self.packet(to, 17, &content)
    }

    /// A frame with a packet of this protocol.
    fn packet(&self, to: ([u8; 6], Ipv4Addr), protocol: u8, content: &[u8]) -> Vec<u8> {
        let mut frame = [&to.0[..], &self.mac, &[8, 0]].concat();
        let length = (20 + content.len()) as u16;
        let mut header = vec![0x45, 0];
        header.extend(length.to_be_bytes());
        header.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
        header.extend(self.address.octets());
        header.extend(to.1.octets());
        let sum: u32 = header
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        frame.extend(header);
        frame.extend(content);
        frame
    }

    /// The hardware address of the gateway's end of the network.
    fn gateway_mac(&self) -> [u8; 6] {
        let ask = [
            &[0xff; 6][..],
            &self.mac,
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1],
            &self.mac,
            &self.address.octets(),
            &[0; 6],
            &[10, 213, 0, 1],
        ]
        .concat();
        self.send(&ask);
        let reply = self.receive_within(SOON, |frame| frame.get(12..14) == Some(&[8, 6]));
        reply.unwrap()[6..12].try_into().unwrap()
    }
}

const SOON: Duration = Duration::from_secs(20);
const LATE: Duration = Duration::from_millis(300);

fn ends_with<'a>(payload: &'a [u8]) -> impl Fn(&[u8]) -> bool + 'a {
    move |frame| frame.ends_with(payload)
}

#[test]
fn guests_of_a_network_reach_each_other_and_no_one_else() {
    let gateway = Served::start("reach");
    let a = gateway.join(card("one", "a", 1)).unwrap();
    let b = gateway.join(card("one", "b", 2)).unwrap();
    let other = gateway.join(card("two", "b", 2)).unwrap();
    a.send(&a.datagram((b.mac, b.address), 7, b"hello b"));
    assert!(b.receive_within(SOON, ends_with(b"hello b")).is_some());
    a.send(&a.datagram(([0xff; 6], [255; 4].into()), 7, b"to all"));
    assert!(b.receive_within(SOON, ends_with(b"to all")).is_some());
    assert_eq!(
        other.receive_within(LATE, |frame| {
            frame.ends_with(b"hello b") || frame.ends_with(b"to all")
        }),
        None
    );
    let networks = gateway.networks();
    let names: Vec<_> = networks.iter().map(|network| network.name.as_str()).collect();
    assert_eq!(names, ["one", "two"]);
    let report = &networks[0].cards[0];
    assert_eq!(
        (report.vm.as_str(), report.counters["from_guest_frames"]),
        ("a", 2)
    );
}

#[test]
fn frame_with_anothers_source_is_dropped_and_counted() {
    let gateway = Served::start("forged");
    let a = gateway.join(card("n", "a", 1)).unwrap();
    let b = gateway.join(card("n", "b", 2)).unwrap();
    let mut forged = a.datagram((b.mac, b.address), 7, b"forged");
    forged[11] = 9;
    a.send(&forged);
    a.send(&a.datagram((b.mac, b.address), 7, b"true"));
    let first = b.receive_within(SOON, |frame| {
        frame.ends_with(b"forged") || frame.ends_with(b"true")
    });
    assert!(first.unwrap().ends_with(b"true"));
    let dropped = &gateway.networks()[0].cards[0].dropped;
    assert_eq!(dropped.get("from_guest_source_mac"), Some(&1), "{dropped:?}");
}

/// The monitor keeps a copy of the gateway's end of the card's socket, and sends it again.
#[test]
fn card_joins_again_with_the_same_socket() {
    let gateway = Served::start("again");
    let flags = SockFlag::SOCK_CLOEXEC;
    let (near, far) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
    let b = gateway.join(card("n", "b", 2)).unwrap();
    let mut near = Some(near);
    for round in 0..3 {
        let deadline = Instant::now() + SOON;
        let (connection, address) = loop {
            let mut connection = gateway.connect();
            let join = Request::Join(Box::new(card("n", "a", 1)));
            connection.send(&join, &[far.as_fd()]).unwrap();
            match connection.receive().unwrap() {
                Some(Response::Joined { addresses, .. }) => break (connection, addresses[0]),
                // The gateway has not noticed yet that the last connection has ended.
                Some(Response::Refused { why }) if why.contains("taken") => {}
                other => panic!("round {round}: {other:?}"),
            }
            assert!(Instant::now() < deadline);
        };
        let std::net::IpAddr::V4(address) = address else {
            panic!("{address}");
        };
        let a = Guest {
            near: near.take().unwrap(),
            connection,
            mac: [2, 0, 0, 0, 0, 1],
            address,
            has_offloads: false,
        };
        let payload = [b'r', round];
        a.send(&a.datagram((b.mac, b.address), 7, &payload));
        assert!(b.receive_within(SOON, ends_with(&payload)).is_some());
        near = Some(a.near);
    }
}

/// A header that leaves the checksum of a datagram to the receiver.
const UNFINISHED: [u8; 12] = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0];

#[test]
fn offloads_are_confirmed_and_cards_without_them_get_whole_frames() {
    let gateway = Served::start("offloads");
    let join = |vm: &str, number: u8| Join {
        offloads: true,
        ..card("n", vm, number)
    };
    let a = gateway.join(join("a", 1)).unwrap();
    let b = gateway.join(join("b", 2)).unwrap();
    let plain = gateway.join(card("n", "plain", 3)).unwrap();
    assert_eq!(
        [&a, &b, &plain].map(|guest| guest.has_offloads),
        [true, true, false]
    );
    let headed = |header: [u8; 12], frame: Vec<u8>| [&header[..], &frame].concat();
    let frame = a.datagram((b.mac, b.address), 7, &[7; 60_000]);
    a.send(&headed(UNFINISHED, frame.clone()));
    let received = b.receive_within(SOON, |packet| packet.len() > 60_000).unwrap();
    assert!(
        received == headed(UNFINISHED, frame),
        "the work goes with its frame"
    );
    let frame = a.datagram((plain.mac, plain.address), 7, b"sum");
    a.send(&headed(UNFINISHED, frame.clone()));
    let mut received = plain.receive_within(SOON, ends_with(b"sum")).unwrap();
    let sum: Vec<u8> = received.splice(40..42, [0, 0]).collect();
    assert!(received == frame && sum != [0, 0], "{received:?}");
    let frame = plain.datagram((a.mac, a.address), 7, b"back");
    plain.send(&frame);
    let received = a.receive_within(SOON, ends_with(b"back")).unwrap();
    assert_eq!(received, headed([0; 12], frame));
    // A part of a header, and a sum in the source address.
    a.send(&[1; 11]);
    let mut forged = UNFINISHED;
    forged[6..9].copy_from_slice(&[14, 0, 12]);
    a.send(&headed(forged, a.datagram((b.mac, b.address), 7, b"forged")));
    a.send(&headed([0; 12], a.datagram((b.mac, b.address), 7, b"last")));
    let next = b.receive_within(SOON, |packet| packet.len() > 40).unwrap();
    assert!(next.ends_with(b"last"), "{next:?}");
    let dropped = &gateway.networks()[0].cards[0].dropped;
    assert_eq!(dropped.get("from_guest_malformed"), Some(&2), "{dropped:?}");
}

#[test]
fn name_or_address_of_another_is_refused_and_free_after_it_has_left() {
    let gateway = Served::start("taken");
    let a = gateway.join(card("n", "a", 1)).unwrap();
    let same_name = gateway.join(card("n", "a", 2)).err().unwrap();
    assert!(same_name.contains("the name a is taken"), "{same_name}");
    let mut same_address = card("n", "b", 2);
    same_address.address = Some(a.address);
    let refused = gateway.join(same_address.clone()).err().unwrap();
    assert!(refused.contains(&a.address.to_string()), "{refused}");
    drop(a);
    let deadline = Instant::now() + SOON;
    while let Err(error) = gateway.join(same_address.clone()) {
        assert!(Instant::now() < deadline, "{error}");
    }
}

#[test]
fn port_in_use_is_refused_and_nothing_of_the_card_stays() {
    let gateway = Served::start("port");
    let taken = std::net::TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut join = card("n", "a", 1);
    join.forward = vec![format!("{port}:80")];
    let refused = gateway.join(join).err().unwrap();
    assert!(refused.contains(&port.to_string()), "{refused}");
    assert_eq!(gateway.networks(), []);
}

#[test]
fn cards_of_a_network_agree_on_its_settings_which_hold_for_their_frames() {
    let gateway = Served::start("settings");
    let join = |vm: &str, number: u8, range: &str| Join {
        outside: vm != "b",
        settings: Some(NetworkSettings {
            range: Some(range.to_owned()),
            isolated: false,
            peers: false,
        }),
        ..card("n", vm, number)
    };
    let a = gateway.join(join("a", 1, "10.20.30.0/24")).unwrap();
    let b = gateway.join(join("b", 2, "10.20.30.0/24")).unwrap();
    assert_eq!(a.address.octets()[..3], [10, 20, 30]);
    for other in [
        join("c", 3, "10.20.0.0/16"),
        join("c", 3, "10.20.0.0"),
        card("n", "c", 3),
    ] {
        let refused = gateway.join(other).err().unwrap();
        assert!(
            refused.contains("other settings") || refused.contains("no range"),
            "{refused}"
        );
        assert!(!refused.contains('\n'), "{refused}");
    }
    a.send(&a.datagram((b.mac, b.address), 7, b"to a peer"));
    assert_eq!(b.receive_within(LATE, ends_with(b"to a peer")), None);
    let networks = gateway.networks();
    let network = &networks[0];
    assert!(!network.peers && !network.isolated);
    assert_eq!(network.ranges[0], "10.20.30.0/24");
    let [of_a, of_b] = &network.cards[..] else {
        panic!("{networks:?}");
    };
    assert_eq!(of_a.dropped.get("from_guest_peers_barred"), Some(&1), "{of_a:?}");
    assert!(of_a.outside && !of_b.outside);
    // The first card of an empty network decides again.
    drop((a, b));
    let deadline = Instant::now() + SOON;
    while let Err(error) = gateway.join(join("c", 3, "10.20.0.0/16")) {
        assert!(Instant::now() < deadline, "{error}");
    }
}

#[test]
fn vm_that_requires_the_sandbox_is_refused_by_a_gateway_that_lacks_a_layer() {
    let requiring = || Join {
        sandbox_required: true,
        ..card("n", "a", 1)
    };
    let gateway = Served::start("layers");
    let refused = gateway.join(requiring()).err().unwrap();
    assert!(refused.contains("lacks system call filter"), "{refused}");
    let _other = gateway.join(card("n", "a", 1)).unwrap();
    let gateway = Served::start("sealed");
    let _card = gateway.join(requiring()).unwrap();
}

#[test]
fn process_of_another_user_is_not_served() {
    let gateway = Served::of_owner("owner", geteuid().as_raw() + 1, Duration::from_secs(60));
    let mut connection = gateway.connect();
    // The connection may end before the request is sent.
    let sent = connection.send(&Request::List, &[]);
    let answer = sent.and_then(|()| connection.receive());
    assert!(matches!(answer, Ok(None) | Err(_)), "{answer:?}");
}

#[test]
fn gateway_ends_after_the_last_card_and_not_before() {
    let mut gateway = Served::of_owner("idle", geteuid().as_raw(), Duration::from_millis(300));
    let a = gateway.join(card("n", "a", 1)).unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let thread = gateway.thread.take().unwrap();
    assert!(!thread.is_finished());
    drop(a);
    thread.join().unwrap().unwrap();
}

#[test]
fn captured_frames_are_a_pcap_stream_and_unknown_names_are_refused() {
    let gateway = Served::start("pcap");
    let a = gateway.join(card("n", "a", 1)).unwrap();
    let b = gateway.join(card("n", "b", 2)).unwrap();
    let of = |vm: &str| Request::Capture {
        of: Captured::Vm(vm.to_owned()),
    };
    let refused = gateway.ask(&of("c"));
    assert!(matches!(&refused, Some(Response::Refused { why }) if why.contains("net ls")));
    let mut connection = gateway.connect();
    connection.send(&of("b"), &[]).unwrap();
    assert!(matches!(connection.receive().unwrap(), Some(Response::Capturing)));
    let frame = a.datagram((b.mac, b.address), 7, b"captured");
    a.send(&frame);
    let (mut stream, mut bytes) = connection.into_stream();
    while !bytes.ends_with(b"captured") {
        let mut more = [0; 4096];
        let count = io::Read::read(&mut stream, &mut more).unwrap();
        assert!(count > 0);
        bytes.extend(&more[..count]);
    }
    assert_eq!(bytes[..24], pcap::file_header());
    assert!(bytes.len() >= 24 + 16 + frame.len());
    assert!(bytes.ends_with(&frame));
}

#[test]
fn guest_that_floods_neither_stops_nor_starves_another() {
    let gateway = Served::start("flood");
    let a = gateway.join(card("n", "a", 1)).unwrap();
    let b = gateway.join(card("n", "b", 2)).unwrap();
    let c = gateway.join(card("n", "c", 3)).unwrap();
    // It reads nothing, so its queue fills.
    let frame = a.datagram((c.mac, c.address), 7, &[1; 1000]);
    let end = Instant::now() + Duration::from_secs(1);
    let mut answered = 0;
    while Instant::now() < end {
        for _ in 0..100 {
            let _ = send(a.near.as_raw_fd(), &frame, MsgFlags::MSG_DONTWAIT);
        }
        b.send(&b.datagram((a.mac, a.address), 7, b"between"));
        answered += usize::from(a.receive_within(SOON, ends_with(b"between")).is_some());
    }
    assert!(answered >= 5, "{answered} frames passed in a second");
    let networks = gateway.networks();
    let of_c = &networks[0].cards[2];
    assert!(
        of_c.dropped.get("to_guest_full").is_some_and(|full| *full > 0),
        "{of_c:?}"
    );
}

#[test]
fn malformed_requests_and_sockets_end_only_their_connection() {
    let gateway = Served::start("malformed");
    let mut stream = UnixStream::connect(socket_path(&gateway.runtime)).unwrap();
    io::Write::write_all(&mut stream, b"{\"ask\":\"levitate\"}\n").unwrap();
    let mut text = String::new();
    io::Read::read_to_string(&mut stream, &mut text).unwrap();
    assert!(text.contains("refused"), "{text}");
    // A join without a socket.
    let response = gateway.ask(&Request::Join(Box::new(card("n", "a", 1))));
    assert!(matches!(response, Some(Response::Refused { .. })), "{response:?}");
    assert_eq!(gateway.networks(), []);
}

#[test]
fn facts_are_requested_while_guests_use_the_outside() {
    let gateway = Served::start("facts");
    let mut a = gateway.join(card("n", "a", 1)).unwrap();
    let gateway_mac = a.gateway_mac();
    std::thread::sleep(Duration::from_millis(1100));
    a.send(&a.datagram((gateway_mac, [192, 0, 2, 9].into()), 7, b"out"));
    assert!(matches!(
        a.connection.receive().unwrap(),
        Some(Response::NeedFacts)
    ));
    let facts = HostFacts::default();
    a.connection.send(&Request::Facts(facts), &[]).unwrap();
    assert_eq!(gateway.networks().len(), 1);
}
