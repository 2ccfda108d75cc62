use super::*;
use crate::samples::{SYN, TCP, UDP, address, frame, message, tcp, udp};

const CLUSTER: &str = "198.51.100.3";
const LIMIT: Duration = Duration::from_secs(10);

/// A relay, with the card's end, passt's end, and the count.
fn relay(udp_ports: &[u16]) -> (Relay, UnixStream, UnixStream, Arc<AtomicU64>) {
    let (card, near_card) = UnixStream::pair().unwrap();
    let (passt, near_passt) = UnixStream::pair().unwrap();
    let filtered = Arc::new(AtomicU64::new(0));
    let egress = Egress {
        cluster: Arc::new(|| HashSet::from([address(CLUSTER)])),
        filtered: filtered.clone(),
    };
    let ports = udp_ports.to_vec();
    let relay = Relay::start(near_card, near_passt, egress, Resolvers::default(), ports).unwrap();
    card.set_read_timeout(Some(LIMIT)).unwrap();
    passt.set_read_timeout(Some(LIMIT)).unwrap();
    (relay, card, passt, filtered)
}

fn syn(to: &str, port: u16) -> Vec<u8> {
    frame(address("10.0.2.15"), address(to), TCP, &tcp(port, 2379, SYN))
}

fn receive(mut from: &UnixStream) -> Vec<u8> {
    let mut length = [0; LENGTH_BYTES];
    from.read_exact(&mut length).unwrap();
    let mut frame = vec![0; u32::from_be_bytes(length) as usize];
    from.read_exact(&mut frame).unwrap();
    frame
}

fn is_at_end(mut stream: &UnixStream) -> bool {
    stream.read(&mut [0]).unwrap() == 0
}

#[test]
fn frames_to_the_cluster_are_dropped_and_counted_and_the_rest_keeps_its_order() {
    let (_relay, card, passt, filtered) = relay(&[]);
    let mut stream = Vec::new();
    for port in 0..200 {
        stream.extend(message(&syn(CLUSTER, port)));
        stream.extend(message(&syn("203.0.113.1", port)));
    }
    // In pieces that end anywhere.
    for piece in stream.chunks(37) {
        (&card).write_all(piece).unwrap();
    }
    for port in 0..200 {
        assert_eq!(receive(&passt), syn("203.0.113.1", port));
    }
    assert_eq!(filtered.load(Ordering::Relaxed), 200);
}

#[test]
fn frames_of_any_size_reach_the_card_unchanged() {
    let (_relay, card, passt, _) = relay(&[]);
    let frames: Vec<Vec<u8>> = [14, 60, 1514, 65_535, FRAME_BYTES_MAX, 100]
        .map(|length| (0..length).map(|place| (place % 251) as u8).collect())
        .into();
    let stream: Vec<u8> = frames.iter().flat_map(|frame| message(frame)).collect();
    let sender = std::thread::spawn(move || (&passt).write_all(&stream).map(|()| passt));
    for expected in &frames {
        assert!(receive(&card) == *expected, "{} bytes", expected.len());
    }
    sender.join().unwrap().unwrap();
}

#[test]
fn a_peer_of_a_forwarded_udp_port_is_answered() {
    let (_relay, card, passt, filtered) = relay(&[53]);
    let guest = address("10.0.2.15");
    let answer = frame(guest, address(CLUSTER), UDP, &udp(53, 5000, b"!"));
    (&card).write_all(&message(&answer)).unwrap();
    (&card).write_all(&message(&syn("203.0.113.1", 1))).unwrap();
    assert_eq!(receive(&passt), syn("203.0.113.1", 1));
    assert_eq!(filtered.load(Ordering::Relaxed), 1);
    let question = frame(address(CLUSTER), guest, UDP, &udp(5000, 53, b"?"));
    (&passt).write_all(&message(&question)).unwrap();
    assert_eq!(receive(&card), question);
    (&card).write_all(&message(&answer)).unwrap();
    assert_eq!(receive(&passt), answer);
}

#[test]
fn the_end_of_either_side_ends_both() {
    let (_relay, card, passt, _) = relay(&[]);
    drop(card);
    assert!(is_at_end(&passt));
    let (_relay, card, passt, _) = relay(&[]);
    drop(passt);
    assert!(is_at_end(&card));
    let (relay, card, passt, _) = relay_with_full_pipes();
    drop(relay);
    drop((card, passt));
}

/// A relay both of whose threads are blocked on a receiver that takes nothing.
fn relay_with_full_pipes() -> (Relay, UnixStream, UnixStream, Arc<AtomicU64>) {
    let (relay, card, passt, filtered) = relay(&[]);
    let frame = message(&syn("203.0.113.1", 1));
    for end in [&card, &passt] {
        end.set_nonblocking(true).unwrap();
        let mut end = end;
        while end.write(&frame).is_ok() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    (relay, card, passt, filtered)
}

#[test]
fn a_length_that_no_frame_has_ends_both() {
    for length in [0, FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
        let (_relay, card, passt, _) = relay(&[]);
        (&card).write_all(&length.to_be_bytes()).unwrap();
        assert!(is_at_end(&passt), "{length}");
        assert!(is_at_end(&card), "{length}");
    }
}
