use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use nix::poll::{PollFd, PollFlags, poll};

use super::message::tests::{query, reply};
use super::*;

/// A resolver that asks these servers.
fn resolver(servers: &[SocketAddr]) -> Resolver {
    let mut resolver = Resolver::new("").unwrap();
    resolver.servers = servers.to_vec();
    resolver
}

fn server() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

fn receive(server: &UdpSocket) -> (Vec<u8>, SocketAddr) {
    let mut buffer = [0; 512];
    let (bytes, client) = server.recv_from(&mut buffer).unwrap();
    (buffer[..bytes].to_vec(), client)
}

/// Turns the resolver until a query is finished.
fn finish(resolver: &mut Resolver, now: Instant) -> (QueryId, Option<Vec<u8>>) {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let mut finished = None;
        resolver.turn(now, &mut |id, reply| {
            finished = Some((id, reply.map(<[u8]>::to_vec)))
        });
        if let Some(finished) = finished {
            return finished;
        }
        assert!(Instant::now() < end);
        poll(&mut [PollFd::new(resolver.as_fd(), PollFlags::POLLIN)], 100_u8).unwrap();
    }
}

fn turn_without_end(resolver: &mut Resolver, now: Instant) {
    resolver.turn(now, &mut |id, _| panic!("{id:?} has ended"));
}

#[test]
fn reply_is_passed_on_and_foreign_messages_are_not() {
    let (server, address) = server();
    let mut resolver = resolver(&[address]);
    let now = Instant::now();
    let asked = query(9, "example.org");
    resolver.ask(QueryId(1), 1, &asked, now).unwrap();
    let (received, client) = receive(&server);
    assert_eq!(received, asked);
    // Another program's message, another query's reply, and the query itself.
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.send_to(&reply(&asked, 3), client).unwrap();
    server
        .send_to(&reply(&query(9, "example.net"), 0), client)
        .unwrap();
    server.send_to(&asked, client).unwrap();
    server.send_to(&reply(&asked, 0), client).unwrap();
    let finished = finish(&mut resolver, now);
    assert_eq!(finished, (QueryId(1), Some(reply(&asked, 0))));
    assert_eq!(resolver.deadline(), None);
}

#[test]
fn silent_servers_are_followed_by_the_next_ones_and_then_by_none() {
    let (first, first_address) = server();
    let (second, second_address) = server();
    let mut resolver = resolver(&[first_address, second_address]);
    let mut now = Instant::now();
    let asked = query(9, "example.org");
    resolver.ask(QueryId(1), 1, &asked, now).unwrap();
    for (try_number, server) in [&first, &second, &first, &second].into_iter().enumerate() {
        assert_eq!(receive(server).0, asked);
        assert_eq!(resolver.deadline(), Some(now + REPLY_LIMIT));
        turn_without_end(&mut resolver, now + REPLY_LIMIT - Duration::from_millis(1));
        now += REPLY_LIMIT;
        if try_number < 3 {
            turn_without_end(&mut resolver, now);
        }
    }
    assert_eq!(finish(&mut resolver, now), (QueryId(1), None));
}

#[test]
fn failing_and_closed_servers_are_followed_by_the_next_ones() {
    let (_, closed) = server();
    let (failing, failing_address) = server();
    let (working, working_address) = server();
    let mut resolver = resolver(&[closed, failing_address, working_address]);
    let now = Instant::now();
    let asked = query(9, "example.org");
    resolver.ask(QueryId(1), 1, &asked, now).unwrap();
    let serving = std::thread::spawn(move || {
        let (asked, client) = receive(&failing);
        failing.send_to(&reply(&asked, 2), client).unwrap();
        let (asked, client) = receive(&working);
        working.send_to(&reply(&asked, 0), client).unwrap();
    });
    assert_eq!(finish(&mut resolver, now).1, Some(reply(&asked, 0)));
    serving.join().unwrap();
}

#[test]
fn failure_of_all_servers_is_passed_on() {
    let (failing, address) = server();
    let mut resolver = resolver(&[address]);
    let asked = query(9, "example.org");
    resolver.ask(QueryId(1), 1, &asked, Instant::now()).unwrap();
    let serving = std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            let (asked, client) = receive(&failing);
            failing.send_to(&reply(&asked, 5), client).unwrap();
        }
    });
    assert_eq!(finish(&mut resolver, Instant::now()).1, Some(reply(&asked, 5)));
    serving.join().unwrap();
}

#[test]
fn truncated_reply_is_requested_by_tcp() {
    let (server, address) = server();
    let listener = TcpListener::bind(address).unwrap();
    let mut resolver = resolver(&[address]);
    let now = Instant::now();
    let asked = query(9, "example.org");
    resolver.ask(QueryId(1), 1, &asked, now).unwrap();
    let mut whole = reply(&asked, 0);
    whole.extend([7; 40_000]);
    let expected = whole.clone();
    let serving = std::thread::spawn(move || {
        let (asked, client) = receive(&server);
        let mut truncated = reply(&asked, 0);
        truncated[2] |= 2;
        server.send_to(&truncated, client).unwrap();
        let (mut stream, _): (TcpStream, _) = listener.accept().unwrap();
        let mut request = vec![0; 2 + asked.len()];
        stream.read_exact(&mut request).unwrap();
        assert_eq!(request[2..], asked);
        let length = u16::try_from(whole.len()).unwrap();
        stream.write_all(&length.to_be_bytes()).unwrap();
        let (first, second) = whole.split_at(1000);
        stream.write_all(first).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        stream.write_all(second).unwrap();
    });
    assert_eq!(finish(&mut resolver, now).1, Some(expected));
    serving.join().unwrap();
}

#[test]
fn queries_without_a_reply_are_bounded() {
    let (_server, address) = server();
    let mut resolver = resolver(&[address]);
    let now = Instant::now();
    let asked = query(9, "example.org");
    for number in 0..QUERIES_PER_SOURCE_MAX as u64 {
        resolver.ask(QueryId(number), 1, &asked, now).unwrap();
    }
    let refused = resolver.ask(QueryId(1000), 1, &asked, now);
    assert_eq!(refused, Err(QueryRefusal::Busy));
    for number in 0..(QUERIES_MAX - QUERIES_PER_SOURCE_MAX) as u64 {
        resolver
            .ask(QueryId(number), 2 + number / 50, &asked, now)
            .unwrap();
    }
    let refused = resolver.ask(QueryId(1000), 100, &asked, now);
    assert_eq!(refused, Err(QueryRefusal::Busy));
}

#[test]
fn query_without_servers_or_question_is_refused() {
    let mut resolver = Resolver::new("search example.org\n").unwrap();
    let now = Instant::now();
    let asked = query(9, "example.org");
    assert_eq!(
        resolver.ask(QueryId(1), 1, &asked, now),
        Err(QueryRefusal::NoServer)
    );
    assert_eq!(
        resolver.ask(QueryId(1), 1, &asked[..9], now),
        Err(QueryRefusal::Malformed)
    );
    resolver.set_servers("nameserver 127.0.0.1\n");
    assert_eq!(resolver.servers, ["127.0.0.1:53".parse().unwrap()]);
}
