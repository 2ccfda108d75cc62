//! Tests with the real passt.

use std::collections::HashSet;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use child_process::service_process::wait;

use super::*;
use crate::frame::{Datagram, Packet, Payload, parse};
use crate::process::tests::{egress, left_filter};
use crate::samples::{MAC, SYN, TCP, UDP, address, drop_capabilities, frame, message, tcp, udp};

/// Address of the host in a test's own network namespace.
const OWN: &str = "192.0.2.77";
const GUEST_PORT: u16 = 7000;
/// Time that a UDP client waits for a reply before it sends again.
const ASK_AGAIN: Duration = Duration::from_secs(2);
const ASKED_MAX: u64 = 10;

/// Returns a card that may reach neither the host nor the cluster.
fn walled(forward: Vec<PortForward>) -> PasstSpec {
    PasstSpec {
        mac: MAC,
        forward,
        egress: Some(egress(HashSet::new).0),
        user: None,
    }
}

fn filtered(spec: &PasstSpec) -> u64 {
    spec.egress.as_ref().map_or(0, |egress| egress.count.get())
}

fn socket(passt: &Passt) -> UnixStream {
    let socket = UnixStream::from(passt.socket.try_clone().unwrap());
    socket.set_nonblocking(false).unwrap();
    socket.set_read_timeout(Some(START_LIMIT)).unwrap();
    socket
}

fn send(passt: &Passt, frame: &[u8]) {
    // In one write: passt drops a length that it reads before any byte of its frame.
    socket(passt).write_all(&message(frame)).unwrap();
}

/// Returns the next IP packet for the guest that `is` accepts, with its frame.
fn receive(passt: &Passt, is: impl Fn(&Datagram) -> bool) -> Option<(Datagram, Vec<u8>)> {
    let mut socket = socket(passt);
    loop {
        let mut length = [0; 4];
        socket.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        socket.read_exact(&mut frame).ok()?;
        if let Some(Packet::Ip(datagram)) = parse(&frame)
            && is(&datagram)
        {
            return Some((datagram, frame));
        }
    }
}

/// Sends a DHCP discover, and returns the offered address.
fn dhcp(passt: &Passt) -> Option<[u8; 4]> {
    let mut bootp = vec![1, 1, 6, 0, 0, 0, 0x12, 0x34];
    bootp.resize(28, 0);
    bootp.extend(MAC);
    bootp.resize(236, 0);
    bootp.extend([0x63, 0x82, 0x53, 0x63, 53, 1, 1, 255]);
    bootp.resize(300, 0);
    let (from, to) = (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST);
    send(passt, &frame(from.into(), to.into(), UDP, &udp(68, 67, &bootp)));
    let is_offer = |datagram: &Datagram| matches!(datagram.payload, Payload::Udp { destination: 68, .. });
    let (_, frame) = receive(passt, is_offer)?;
    frame[14 + 20 + 8 + 16..][..4].try_into().ok()
}

/// Requests a connection to `to`; returns whether the listener received one. passt replies to DHCP before it
/// processes the TCP segments that it read with it, so the second reply shows that it has processed the
/// request.
fn connects(passt: &Passt, to: IpAddr, listener: &TcpListener) -> bool {
    let port = listener.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    send(
        passt,
        &frame(GUEST_ADDRESS.into(), to, TCP, &tcp(40_000, port, SYN)),
    );
    for _ in 0..2 {
        assert_eq!(dhcp(passt), Some(GUEST_ADDRESS.octets()));
    }
    listener.accept().is_ok()
}

/// Runs `test` in a network namespace whose host has a loopback and, on that, [`OWN`].
fn on_a_host_alone<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    // The namespace is this thread's; passt is started from it.
    let alone = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .expect("this test needs root (CAP_SYS_ADMIN) to make a network namespace");
        let own = format!("{OWN}/32");
        for words in [
            &["link", "set", "lo", "up"][..],
            &["addr", "add", &own, "dev", "lo"],
        ] {
            let done = Command::new("ip").args(words).status();
            assert!(done.expect("this test needs iproute2").success());
        }
        test()
    });
    alone
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn udp_forward() -> (u16, Vec<PortForward>) {
    let free = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let host = free.local_addr().unwrap().port();
    let forward = PortForward {
        protocol: Protocol::Udp,
        host,
        guest: GUEST_PORT,
    };
    (host, vec![forward])
}

#[test]
fn blocked_guest_connects_neither_to_the_loopback_nor_to_the_hosts_own_addresses() {
    on_a_host_alone(|| {
        // passt maps the gateway to the loopback for the second card only.
        for forward in [Vec::new(), udp_forward().1] {
            let spec = walled(forward);
            let passt = start(&spec).unwrap();
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            for (count, to) in (1..).zip(["10.0.2.2", "127.0.0.1", OWN]) {
                assert!(!connects(&passt, address(to), &listener), "{to}");
                assert_eq!(filtered(&spec), count, "{to}");
            }
        }
    });
}

#[test]
fn guest_that_may_reach_the_host_connects_to_it() {
    on_a_host_alone(|| {
        for to in ["10.0.2.2", OWN] {
            let spec = PasstSpec {
                mac: MAC,
                ..PasstSpec::default()
            };
            let passt = start(&spec).unwrap();
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            assert!(connects(&passt, address(to), &listener), "{to}");
        }
    });
}

#[test]
fn blocked_guest_replies_at_a_forwarded_udp_port_and_sends_nowhere_else() {
    on_a_host_alone(|| {
        let (port, forward) = udp_forward();
        let spec = walled(forward);
        let passt = start(&spec).unwrap();
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let service = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        // Datagrams may be lost: the client sends again until there is a reply.
        client.set_read_timeout(Some(ASK_AGAIN)).unwrap();
        let is_question = |datagram: &Datagram| {
            matches!(
                datagram.payload,
                Payload::Udp {
                    destination: GUEST_PORT,
                    ..
                }
            )
        };
        let reply = |to: &UdpSocket, text: &[u8]| {
            let datagram = udp(GUEST_PORT, to.local_addr().unwrap().port(), text);
            send(
                &passt,
                &frame(GUEST_ADDRESS.into(), GATEWAY.into(), UDP, &datagram),
            );
        };
        let mut answer = [0; 64];
        let asked = (1..=ASKED_MAX).find(|_| {
            client.send_to(b"?", (Ipv4Addr::LOCALHOST, port)).unwrap();
            let (question, _) = receive(&passt, is_question).expect("a question reaches the guest");
            assert_eq!(question.source, IpAddr::V4(GATEWAY));
            reply(&service, b"to a service");
            reply(&client, b"!");
            match client.recv(&mut answer) {
                Ok(bytes) => answer[..bytes] == *b"!",
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => false,
                Err(error) => panic!("the client receives nothing: {error}"),
            }
        });
        let asked = asked.expect("an answer reaches the client");
        service.set_nonblocking(true).unwrap();
        assert!(service.recv(&mut answer).is_err());
        // The filter writes the count after it has forwarded the other frames.
        let deadline = std::time::Instant::now() + START_LIMIT;
        while filtered(&spec) != asked && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(filtered(&spec), asked);
    });
}

#[test]
fn passt_maps_the_gateway_only_where_it_must() {
    let maps = |maps| {
        let arguments = arguments(&PasstSpec::default(), true, maps);
        !arguments.iter().any(|argument| argument == "--no-map-gw")
    };
    assert!(maps(true) && !maps(false));
}

#[test]
fn a_guest_gets_its_address_by_dhcp() {
    let passt = start(&walled(Vec::new())).unwrap();
    assert_eq!(dhcp(&passt), Some(GUEST_ADDRESS.octets()));
}

#[test]
fn passt_ends_when_the_guests_socket_closes() {
    let Passt { socket, child } = start(&walled(Vec::new())).unwrap();
    assert!(socket.as_raw_fd() >= 0);
    drop(socket);
    wait(child.passt().pidfd(), Duration::from_secs(2)).expect("passt ends within 2 s");
}

#[test]
fn a_host_with_nothing_but_loopback_still_gets_a_network() {
    let address = on_a_host_alone(|| dhcp(&start(&walled(Vec::new())).unwrap()));
    assert_eq!(address, Some(GUEST_ADDRESS.octets()));
}

#[test]
fn port_in_use_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let host = taken.local_addr().unwrap().port();
    let forward = vec![PortForward {
        protocol: Protocol::Tcp,
        host,
        guest: 80,
    }];
    let error = start(&walled(forward)).unwrap_err();
    assert!(
        matches!(error, SubnetError::PortInUse { port, .. } if port == host),
        "{error}"
    );
    assert!(error.to_string().contains(&host.to_string()));
}

#[test]
fn forwarded_ports_listen_on_the_host() {
    let free = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let host = free.local_addr().unwrap().port();
    drop(free);
    let forward = vec![PortForward {
        protocol: Protocol::Tcp,
        host,
        guest: 80,
    }];
    let _passt = start(&walled(forward)).unwrap();
    std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, host)).expect("passt listens");
}

#[test]
fn output_of_passt_becomes_an_error_with_its_port() {
    let error = explain("Don't run as root.\nFailed to bind any port for '-u 5353:53', exiting\n");
    assert!(
        matches!(
            error,
            SubnetError::PortInUse {
                port: 5353,
                protocol: "udp"
            }
        ),
        "{error}"
    );
    let error =
        explain("Failed to send 3 bytes to syslog\nFailed to bind any port for '-t 81:80', exiting\n");
    assert!(
        matches!(
            error,
            SubnetError::PortPermission {
                port: 81,
                protocol: "tcp"
            }
        ),
        "{error}"
    );
    assert!(matches!(explain("nonsense"), SubnetError::PasstFailed(_)));
}

#[test]
fn passt_of_two_vms_of_root_are_two_users_and_serve_their_cards() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test needs root to give passt a user"
    );
    let users = [(1_900_000_103, 1_900_000_203), (1_900_000_104, 1_900_000_204)];
    let passts = users.map(|user| {
        let spec = PasstSpec {
            user: Some(user),
            ..walled(Vec::new())
        };
        start(&spec).unwrap()
    });
    for (passt, (uid, gid)) in passts.iter().zip(users) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", passt.child.id())).unwrap();
        for (field, id) in [("Uid", uid), ("Gid", gid)] {
            let line = format!("{field}:\t{id}\t{id}\t{id}\t{id}\n");
            assert!(status.contains(&line), "{line:?} in {status}");
        }
        assert_eq!(dhcp(passt), Some(GUEST_ADDRESS.octets()));
    }
}

#[test]
fn ports_below_1024_fail_for_lack_of_a_privilege_and_others_because_they_are_in_use() {
    let failure = |port: u16| explain(&format!("Failed to bind any port for '-t {port}:80', exiting\n"));
    assert!(matches!(
        failure(1023),
        SubnetError::PortPermission { port: 1023, .. }
    ));
    assert!(matches!(failure(1024), SubnetError::PortInUse { port: 1024, .. }));
}

#[test]
fn a_port_that_needs_a_privilege_is_named() {
    on_a_host_alone(|| {
        drop_capabilities();
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let forward = PortForward {
                protocol,
                host: 80,
                guest: 80,
            };
            let error = start(&walled(vec![forward])).unwrap_err();
            assert!(
                matches!(error, SubnetError::PortPermission { port: 80, .. }),
                "{error}"
            );
        }
    });
}

#[test]
fn a_default_route_has_neither_destination_nor_mask() {
    let table = |lines: &[&str]| {
        let header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT";
        [&[header], lines].concat().join("\n")
    };
    let default = "eth0 00000000 0202000A 0003 0 0 100 00000000 0 0 0";
    let network = "eth0 0002000A 00000000 0001 0 0 100 00FFFFFF 0 0 0";
    let lower_half = "eth0 00000000 0202000A 0003 0 0 100 00000080 0 0 0";
    let masked_to_nothing = "eth0 0002000A 00000000 0001 0 0 100 00000000 0 0 0";
    assert!(names_default_route(&table(&[network, default])));
    for other in [&[][..], &[network], &[lower_half], &[masked_to_nothing]] {
        assert!(!names_default_route(&table(other)), "{other:?}");
    }
    assert!(!names_default_route(default), "the first line is the header");
}

/// Returns the process ids of a card.
fn ids(child: &PasstChild) -> impl Iterator<Item = u32> + '_ {
    child.processes().map(ServiceProcess::id)
}

#[test]
fn processes_that_are_reported_are_passt_and_its_filter() {
    let passt = start(&walled(Vec::new())).unwrap();
    let [first, second] = ids(&passt.child).collect::<Vec<_>>()[..] else {
        panic!("{:?}", passt.child);
    };
    let name = std::fs::read_to_string(format!("/proc/{first}/comm")).unwrap();
    // passt runs a variant of itself for processors with AVX2.
    assert!(name.starts_with("passt"), "{name}");
    let line = std::fs::read_to_string(format!("/proc/{second}/cmdline")).unwrap();
    assert!(
        line.starts_with("subnet\0") && line.contains("\0--frame-filter\0"),
        "{line}"
    );
    drop(passt);
    for pid in [first, second] {
        assert!(
            !std::fs::exists(format!("/proc/{pid}")).unwrap(),
            "{pid} still runs"
        );
    }
    let reaching = PasstSpec {
        mac: MAC,
        ..PasstSpec::default()
    };
    assert_eq!(start(&reaching).unwrap().child.processes().count(), 1);
}

#[test]
fn passt_that_ends_closes_its_card_and_is_named() {
    let (egress, lines) = egress(HashSet::new);
    let spec = PasstSpec {
        egress: Some(egress),
        ..walled(Vec::new())
    };
    let passt = start(&spec).unwrap();
    let pid = nix::unistd::Pid::from_raw(passt.child.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert_eq!(lines.recv_timeout(START_LIMIT).unwrap(), "passt has ended");
    assert_eq!(socket(&passt).read(&mut [0]).unwrap(), 0);
}

#[test]
fn adopted_card_serves_its_guest_and_ends_with_its_adopter() {
    let spec = walled(Vec::new());
    let Passt { socket, child } = start(&spec).unwrap();
    let left = LeftCard {
        passt: child.passt().handle().unwrap(),
        filter: child.filter().map(left_filter),
    };
    let adopted = PasstChild::adopt(left, &spec).unwrap();
    assert!(ids(&adopted).eq(ids(&child)));
    let passt = Passt {
        socket,
        child: adopted,
    };
    assert_eq!(dhcp(&passt), Some(GUEST_ADDRESS.octets()));
    drop(passt);
    for process in child.processes() {
        wait(process.pidfd(), Duration::ZERO).expect("both have ended");
    }
}

#[test]
fn card_whose_filter_is_missing_or_unwanted_is_not_adopted_and_ends() {
    let reaching = PasstSpec {
        mac: MAC,
        ..PasstSpec::default()
    };
    for (started, adopted) in [
        (walled(Vec::new()), &reaching),
        (reaching.clone(), &walled(Vec::new())),
    ] {
        let passt = start(&started).unwrap();
        let left = LeftCard {
            passt: passt.child.passt().handle().unwrap(),
            filter: passt.child.filter().map(left_filter),
        };
        assert!(PasstChild::adopt(left, adopted).is_err());
        for process in passt.child.processes() {
            wait(process.pidfd(), Duration::ZERO).expect("its processes have ended");
        }
    }
}
