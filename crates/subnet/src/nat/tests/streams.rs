use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::SndBuf;
use nix::sys::socket::{Backlog, listen, setsockopt};
use smoltcp::socket::tcp::{RecvError, State};

use super::world::{CARD, World, ipv4, ipv6, listener};
use crate::host_socket as socket;

/// Reads the host's bytes until the end, while the guest runs.
fn read_host(world: &mut World, host: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut part = vec![0; 65_536];
    world.until("end of the host's bytes", |_| {
        match host.read(&mut part) {
            Ok(0) => return true,
            Ok(count) => bytes.extend(&part[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        false
    });
    bytes
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 7 + at / 251) % 256) as u8).collect()
}

/// Whether the host's connection was reset.
fn is_reset(host: &mut TcpStream) -> bool {
    let error = host.read(&mut [0; 16]).unwrap_err();
    let kind = error.kind();
    assert!(
        [ErrorKind::WouldBlock, ErrorKind::ConnectionReset].contains(&kind),
        "{error}"
    );
    kind == ErrorKind::ConnectionReset
}

/// A guest with offloads leaves its checksums to the receiver; the translator's own are right.
#[test]
fn bytes_of_a_guest_without_checksums_pass() {
    let mut world = World::without_checksums();
    let (guest, mut host) = world.connected(ipv4());
    world.write(guest, b"request");
    world.until("request", |_| {
        let mut bytes = [0; 16];
        let read = host.read(&mut bytes);
        read.is_ok_and(|count| &bytes[..count] == b"request")
    });
    host.write_all(b"answer").unwrap();
    world.until("answer", |world| world.read(guest) == b"answer");
}

#[test]
fn bytes_pass_in_both_directions_over_both_versions() {
    for gateway in [ipv4(), ipv6()] {
        let mut world = World::new();
        let (guest, mut host) = world.connected(gateway);
        world.write(guest, b"request");
        world.until("request", |_| {
            let mut bytes = [0; 16];
            let read = host.read(&mut bytes);
            read.is_ok_and(|count| &bytes[..count] == b"request")
        });
        host.write_all(b"answer").unwrap();
        world.until("answer", |world| world.read(guest) == b"answer");
        assert_eq!(world.counts().connections, 1);
    }
}

#[test]
fn answer_after_the_guests_half_close_arrives_once_and_ends() {
    let mut world = World::new();
    let (guest, mut host) = world.connected(ipv4());
    world.write(guest, b"request");
    world.socket(guest).close();
    assert_eq!(read_host(&mut world, &mut host), b"request");
    world.run_for(Duration::from_millis(300));
    host.write_all(b"answer").unwrap();
    drop(host);
    assert_eq!(world.read_to_end(guest), b"answer");
    assert_eq!(world.socket(guest).recv_slice(&mut [0]), Err(RecvError::Finished));
    world.until("end", |world| world.counts().connections == 0);
}

#[test]
fn guest_goes_on_sending_after_the_hosts_half_close() {
    let mut world = World::new();
    let (guest, mut host) = world.connected(ipv6());
    host.write_all(b"greeting").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    assert_eq!(world.read_to_end(guest), b"greeting");
    world.write(guest, b"late");
    world.run_for(Duration::from_millis(100));
    world.socket(guest).close();
    assert_eq!(read_host(&mut world, &mut host), b"late");
    world.until("end", |world| world.counts().connections == 0);
}

#[test]
fn bytes_that_the_host_has_not_read_survive_the_end_of_both_directions() {
    let mut world = World::new();
    let guest = world.listen(80);
    let (ours, mut host) = UnixStream::pair().unwrap();
    setsockopt(&ours, SndBuf, &4096).unwrap();
    host.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    world.add_connection(ours.into(), 80);
    world.until("connection", |world| world.state(guest) == State::Established);
    let block = pattern(60_000);
    // The side that ends first is the one that waits.
    host.shutdown(Shutdown::Write).unwrap();
    world.until("end of the host", |world| world.state(guest) == State::CloseWait);
    world.write(guest, &block);
    world.socket(guest).close();
    world.until("end of the guest", |world| world.state(guest) == State::Closed);
    // Longer than the stack stays in the state TIME-WAIT.
    world.run_for(Duration::from_millis(50));
    world.skip(Duration::from_secs(15));
    world.run_for(Duration::from_millis(50));
    assert_eq!(world.counts().connections, 1);
    let reader = std::thread::spawn(move || {
        let mut received = Vec::new();
        host.read_to_end(&mut received).unwrap();
        received
    });
    world.until("end", |world| world.counts().connections == 0);
    assert!(reader.join().unwrap() == block);
}

#[test]
fn bytes_that_the_host_does_not_read_for_two_hours_are_lost() {
    let mut world = World::new();
    let guest = world.listen(80);
    let (ours, host) = UnixStream::pair().unwrap();
    setsockopt(&ours, SndBuf, &4096).unwrap();
    world.add_connection(ours.into(), 80);
    world.until("connection", |world| world.state(guest) == State::Established);
    world.write(guest, &pattern(60_000));
    world.socket(guest).close();
    world.until("end of the guest", |world| world.state(guest) == State::FinWait2);
    host.shutdown(Shutdown::Write).unwrap();
    world.until("end of the host", |world| world.state(guest) == State::TimeWait);
    world.skip(Duration::from_secs(7500));
    world.until("end", |world| world.counts().connections == 0);
}

#[test]
fn reset_by_the_guest_resets_the_hosts_connection() {
    let mut world = World::new();
    let (guest, mut host) = world.connected(ipv4());
    world.socket(guest).abort();
    world.until("reset", |_| is_reset(&mut host));
    assert_eq!(world.counts().connections, 0);
}

#[test]
fn reset_by_the_host_resets_the_guests_connection() {
    let mut world = World::new();
    let (guest, host) = world.connected(ipv4());
    socket::reset(host.into());
    world.until("reset", |world| world.state(guest) == State::Closed);
    let read = world.socket(guest).recv_slice(&mut [0]);
    assert_eq!(read, Err(RecvError::InvalidState));
    assert_eq!(world.counts().connections, 0);
}

#[test]
fn refused_connection_is_refused_to_the_guest() {
    for gateway in [ipv4(), ipv6()] {
        let mut world = World::new();
        let port = listener(gateway).local_addr().unwrap().port();
        let start = Instant::now();
        let guest = world.connect(gateway, port);
        world.until("refusal", |world| world.state(guest) == State::Closed);
        assert!(start.elapsed() < Duration::from_secs(1));
        assert_eq!(world.counts().connections, 0);
    }
}

#[test]
fn guests_connection_opens_only_when_the_hosts_is_open() {
    let mut world = World::new();
    let listener = listener(ipv4());
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    // The backlog is full: the kernel drops further requests.
    let _filler = TcpStream::connect(address).unwrap();
    let guest = world.connect(ipv4(), address.port());
    world.run_for(Duration::from_millis(500));
    assert_eq!(world.state(guest), State::SynSent);
    assert_eq!(world.counts().connections, 1);
    let _ = listener.accept().unwrap();
    // The host's kernel repeats its request after a second.
    world.until("connection", |world| world.state(guest) == State::Established);
}

#[test]
fn connection_that_the_host_does_not_open_is_unreachable_after_its_time() {
    let mut world = World::new();
    let listener = listener(ipv4());
    listen(&listener, Backlog::new(0).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let _filler = TcpStream::connect(address).unwrap();
    world.connect(ipv4(), address.port());
    world.until("request", |world| world.counts().connections == 1);
    world.keeps_packets = true;
    world.skip(Duration::from_secs(29));
    world.step();
    assert_eq!(world.counts().connections, 1);
    world.skip(Duration::from_secs(1));
    world.step();
    assert_eq!(world.counts().connections, 0);
    assert_eq!(world.counts().unreachable, 1);
    // ICMP with type 3, an unreachable destination, and code 1, the host.
    let (_, packet) = world.wire.packets.pop_back().unwrap();
    assert_eq!((packet[9], packet[20], packet[21]), (1, 3, 1));
}

#[test]
fn host_that_does_not_read_stops_the_guest_and_gets_every_byte() {
    let mut world = World::new();
    let (guest, mut host) = world.connected(ipv4());
    let block = pattern(32 << 20);
    let mut sent = 0;
    let mut quiet = Instant::now();
    world.until("stop", |world| {
        let count = world.socket(guest).send_slice(&block[sent..]).unwrap();
        sent += count;
        if count > 0 {
            quiet = Instant::now();
        }
        quiet.elapsed() > Duration::from_millis(300)
    });
    // The kernel's buffers of a loopback connection hold some MiB at most.
    assert!(sent < 24 << 20, "{sent}");
    let mut received = Vec::<u8>::new();
    let mut part = vec![0; 65_536];
    world.until("bytes", |world| {
        sent += world.socket(guest).send_slice(&block[sent..]).unwrap();
        while let Ok(count) = host.read(&mut part) {
            received.extend(&part[..count]);
        }
        received.len() == block.len()
    });
    assert!(received == block);
}

#[test]
fn guest_that_does_not_read_stops_the_host_and_gets_every_byte() {
    let mut world = World::new();
    world.wire.capacity = 3;
    let (guest, mut host) = world.connected(ipv6());
    let block = pattern(32 << 20);
    let mut sent = 0;
    let mut quiet = Instant::now();
    world.until("stop", |_| {
        while let Ok(count) = host.write(&block[sent..]) {
            sent += count;
            quiet = Instant::now();
        }
        quiet.elapsed() > Duration::from_millis(300)
    });
    assert!(sent < 24 << 20, "{sent}");
    let mut received = Vec::new();
    world.until("bytes", |world| {
        if sent < block.len()
            && let Ok(count) = host.write(&block[sent..])
        {
            sent += count;
        }
        received.extend(world.read(guest));
        received.len() == block.len()
    });
    assert!(received == block);
    assert_eq!(world.wire.lost, 0);
}

#[test]
fn connections_share_a_card_whose_queue_is_often_full() {
    let mut world = World::new();
    world.wire.capacity = 1;
    let connections: Vec<_> = (0..4).map(|_| world.connected(ipv4())).collect();
    let block = pattern(4 << 20);
    let mut sent = [0; 4];
    let mut received = vec![Vec::new(); 4];
    world.until("bytes of all", |world| {
        for (at, (guest, host)) in connections.iter().enumerate() {
            if let Ok(count) = (&*host).write(&block[sent[at]..]) {
                sent[at] += count;
            }
            received[at].extend(world.read(*guest));
        }
        received.iter().all(|bytes| bytes.len() == block.len())
    });
    assert!(received.iter().all(|bytes| *bytes == block));
}

#[test]
fn connection_with_much_to_send_leaves_others_room_in_the_queue() {
    let mut world = World::new();
    world.wire.capacity = 1;
    let (busy, mut busy_host) = world.connected(ipv4());
    let others: Vec<_> = (0..3).map(|_| world.connected(ipv4())).collect();
    let block = pattern(1 << 20);
    let mut passed = 0;
    world.until("bytes", |world| {
        while busy_host.write(&block).is_ok() {}
        passed += world.read(busy).len();
        passed > 1 << 20
    });
    for (_, host) in &others {
        (&*host).write_all(&block[..1000]).unwrap();
    }
    world.until("bytes of the others", |world| {
        while busy_host.write(&block).is_ok() {}
        passed += world.read(busy).len();
        others
            .iter()
            .all(|(guest, _)| world.socket(*guest).recv_queue() == 1000)
    });
    assert!(passed < 16 << 20, "{passed}");
}

#[test]
fn idle_connection_ends_after_two_hours() {
    let mut world = World::new();
    let (guest, _host) = world.connected(ipv4());
    world.skip(Duration::from_secs(7200));
    world.step();
    assert_eq!(world.counts().connections, 1);
    world.skip(Duration::from_secs(300));
    world.until("end", |world| world.counts().connections == 0);
    world.until("reset", |world| world.state(guest) == State::Closed);
}

#[test]
fn request_with_the_ports_of_an_open_connection_replaces_it() {
    let mut world = World::new();
    let listener = listener(ipv4());
    let port = listener.local_addr().unwrap().port();
    let guest = world.connect(ipv4(), port);
    world.until("connection", |world| world.state(guest) == State::Established);
    let mut former = listener.accept().unwrap().0;
    world.forget(guest);
    let guest = world.connect(ipv4(), port);
    world.until("connection", |world| world.state(guest) == State::Established);
    let mut host = listener.accept().unwrap().0;
    assert!(is_reset(&mut former));
    assert_eq!(world.counts().connections, 1);
    host.write_all(b"new").unwrap();
    world.until("bytes", |world| world.read(guest) == b"new");
}

#[test]
fn removed_or_restarted_card_resets_its_connections() {
    let mut world = World::new();
    let (_, mut host) = world.connected(ipv4());
    world.nat.reset_card(CARD);
    assert!(is_reset(&mut host));
    let (_, mut host) = world.connected(ipv4());
    world.nat.remove_card(CARD);
    assert!(is_reset(&mut host));
    assert_eq!(world.nat.counts(CARD), None);
}
