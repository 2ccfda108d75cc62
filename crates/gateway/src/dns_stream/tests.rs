use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::*;

/// A server with one connection of a card, and the guest's end.
struct World {
    streams: DnsStreams,
    guest: UnixStream,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            streams: DnsStreams::new().unwrap(),
            guest: UnixStream::pair().unwrap().0,
            now: Instant::now(),
        };
        world.guest = world.connect(1);
        world
    }

    fn connect(&mut self, card: u64) -> UnixStream {
        let (guest, server) = UnixStream::pair().unwrap();
        guest.set_nonblocking(true).unwrap();
        let end = DnsStream {
            card: CardId(card),
            socket: server.into(),
        };
        self.streams.add(end, self.now);
        guest
    }

    /// A turn in which each query gets this outcome. Returns the queries.
    fn turn(&mut self, outcome: impl Fn(&[u8]) -> Outcome) -> Vec<(StreamId, Vec<u8>)> {
        let mut queries = Vec::new();
        self.streams.turn(self.now, &mut |id, _, query| {
            queries.push((id, query.to_vec()));
            outcome(query)
        });
        queries
    }

    fn send(&mut self, bytes: &[u8]) {
        self.guest.write_all(bytes).unwrap();
    }

    /// Bytes that the guest has received, and whether the connection has ended.
    fn received(&mut self) -> (Vec<u8>, bool) {
        let mut bytes = Vec::new();
        let ended = self.guest.read_to_end(&mut bytes).is_ok();
        (bytes, ended)
    }
}

fn message(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u16).to_be_bytes()[..], text].concat()
}

fn echo(query: &[u8]) -> Outcome {
    Outcome::Answer(query.to_vec())
}

#[test]
fn queries_in_any_pieces_are_answered_each_with_its_length() {
    let mut world = World::new();
    let sent = [message(b"first"), message(b"second")].concat();
    for byte in &sent[..9] {
        world.send(&[*byte]);
        world.turn(echo);
    }
    world.send(&sent[9..]);
    world.turn(echo);
    assert_eq!(world.received(), (sent, false));
}

#[test]
fn later_answers_come_in_their_own_order_and_further_queries_wait_for_them() {
    let mut world = World::new();
    let all: Vec<u8> = (0..20).flat_map(|number| message(&[number])).collect();
    world.send(&all);
    let asked = world.turn(|_| Outcome::Later);
    assert_eq!(asked.len(), PENDING_MAX);
    assert_eq!(asked[7].1, [7]);
    let id = asked[0].0;
    for answer in [&b"b"[..], b"a"] {
        world.streams.answer(id, answer, world.now);
    }
    assert_eq!(world.streams.deadline(world.now), Some(world.now));
    assert_eq!(world.turn(|_| Outcome::Later).len(), 2);
    assert_eq!(world.received().0, [message(b"b"), message(b"a")].concat());
}

#[test]
fn queries_of_a_guest_that_takes_no_answers_wait() {
    let mut world = World::new();
    let query = message(&[7; 4000]);
    let mut sent = 0;
    // The kernel's buffers on both ways, and the bound of this server.
    for _ in 0..2000 {
        match world.guest.write(&query) {
            Ok(bytes) => {
                sent += bytes;
                if bytes < query.len() {
                    break;
                }
            }
            Err(_) => break,
        }
        world.turn(|_| Outcome::Answer(vec![1; 60_000]));
    }
    let stream = world.streams.streams.values().next().unwrap();
    assert!(
        stream.output.len() <= OUTPUT_BYTES_MAX + 60_002,
        "{}",
        stream.output.len()
    );
    assert!(stream.input.len() <= LENGTH_BYTES + QUERY_BYTES_MAX);
    assert!(sent < 4 << 20, "{sent} bytes were taken");
}

#[test]
fn connection_ends_by_an_unknown_message_by_a_long_one_and_after_its_last_answer() {
    let mut world = World::new();
    world.send(&message(b"nonsense"));
    world.turn(|_| Outcome::End);
    assert_eq!(world.received(), (Vec::new(), true));

    let mut world = World::new();
    world.send(&(QUERY_BYTES_MAX as u16 + 1).to_be_bytes());
    world.turn(echo);
    assert!(world.received().1);

    let mut world = World::new();
    world.send(&message(b"last"));
    world.guest.shutdown(std::net::Shutdown::Write).unwrap();
    let asked = world.turn(|_| Outcome::Later);
    assert!(!world.received().1, "its answer is to come");
    world.streams.answer(asked[0].0, b"answer", world.now);
    world.turn(echo);
    assert_eq!(world.received(), (message(b"answer"), true));
    assert_eq!(world.streams.deadline(world.now), None);
}

#[test]
fn connections_without_queries_end_and_their_number_is_bounded() {
    let mut world = World::new();
    let others: Vec<_> = (0..30).map(|_| world.connect(1)).collect();
    world.turn(echo);
    assert_eq!(world.streams.streams.len(), STREAMS_PER_CARD_MAX);
    let of_another = world.connect(2);
    assert_eq!(world.streams.streams.len(), STREAMS_PER_CARD_MAX + 1);
    world.streams.remove_card(CardId(1));
    assert_eq!(world.streams.streams.len(), 1);
    world.now += IDLE_LIMIT / 2;
    world.turn(echo);
    assert_eq!(world.streams.streams.len(), 1);
    world.now += IDLE_LIMIT / 2;
    world.turn(echo);
    assert_eq!(world.streams.streams.len(), 0);
    drop((others, of_another));
}
