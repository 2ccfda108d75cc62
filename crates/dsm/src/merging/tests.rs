//! One real node, and others whose frames a test writes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use coherence::{Access, Body, Payload};

use super::*;
use crate::frame::{DriverKind, FRAME_BYTES, KIND_AT};
use crate::link::Link;
use crate::node::{Node, Settings};
use crate::shape::Shape;
use crate::shutdown::End;

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Long enough for an error to show.
const SETTLE_TIME: Duration = Duration::from_millis(30);
const PAGES: u32 = 128;

/// The remote ends of a node's streams.
struct RemoteNode {
    control: UnixStream,
    bulk: UnixStream,
}

/// Node 0 of a memory.
struct World {
    node: Node,
    /// Remote nodes, from node 1 on.
    others: Vec<RemoteNode>,
    ends: mpsc::Receiver<End>,
}

impl World {
    fn of(nodes: u16) -> Self {
        let mut links = vec![None];
        let mut others = Vec::new();
        for _ in 1..nodes {
            let (control, far_control) = UnixStream::pair().unwrap();
            let (bulk, far_bulk) = UnixStream::pair().unwrap();
            for stream in [&far_control, &far_bulk] {
                stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
            }
            links.push(Some(Link::new([control.into(), bulk.into()], None)));
            others.push(RemoteNode {
                control: far_control,
                bulk: far_bulk,
            });
        }
        let shape = Shape {
            nodes,
            pages: PAGES,
            lanes: 1,
            migratory: false,
            method: None,
        };
        let settings = Settings {
            processors: 1,
            ..Settings::default()
        };
        let names = (0..nodes).map(|node| format!("node {node}")).collect();
        let (send_op, ends) = mpsc::channel();
        let hook = Box::new(move |end: &End| drop(send_op.send(end.clone())));
        let node = Node::start(0, shape, vec![links], names, &settings, hook).unwrap();
        Self { node, others, ends }
    }

    fn other(&mut self, node: usize) -> &mut RemoteNode {
        &mut self.others[node - 1]
    }

    /// Returns a page that a node manages.
    fn page_of(&self, node: u16) -> u32 {
        (0..PAGES).find(|page| self.node.manager(*page) == node).unwrap()
    }

    /// Starts a thread that waits for a page of another node, which has received the request.
    fn reader(&mut self, node: u16, page: u32) -> JoinHandle<[u8; PAGE_LEN]> {
        let at = self.node.view() as usize + page as usize * PAGE_LEN;
        // SAFETY: a page of the view, which lives until the node is dropped at the test's end.
        let reader = thread::spawn(move || unsafe { (at as *const [u8; PAGE_LEN]).read_volatile() });
        let mut asked = [0; FRAME_BYTES];
        self.other(usize::from(node)).bulk.read_exact(&mut asked).unwrap();
        assert_eq!(Message::decode(&asked).unwrap().page, Page(page));
        reader
    }

    /// Starts a thread with a packet of a node that follows `count` batches of another one.
    fn after(&self, from: usize, node: usize, count: u32) -> JoinHandle<()> {
        let causal = self.node.causal().unwrap().clone();
        thread::spawn(move || causal.after(from, &Batches::only(node, count)))
    }

    /// Returns the reason of the end.
    fn end(&self) -> String {
        match self.ends.recv_timeout(TEST_TIMEOUT).expect("it goes on") {
            End::ProtocolError(why) => why,
            other => panic!("{other:?}"),
        }
    }
}

impl RemoteNode {
    /// Sends a batch without diffs, with the number in its stamp.
    fn batch(&mut self, stamp: &[u64]) {
        self.control.write_all(&batch(stamp)).unwrap();
    }
}

fn message(page: u32, body: Body) -> Frame {
    Message {
        page: Page(page),
        body,
    }
    .encode()
}

/// Adds the number of the sender's batches that precede the message.
fn numbered(mut frame: Frame, number: u32) -> Frame {
    frame[NUMBER_AT..].copy_from_slice(&number.to_le_bytes());
    frame
}

/// Returns a copy full of sevens.
fn copy(page: u32, number: u32) -> Vec<u8> {
    let frame = message(
        page,
        Body::Copy {
            bytes: Payload::Attached,
        },
    );
    [&numbered(frame, number)[..], &[7; PAGE_LEN]].concat()
}

fn stamp(counts: &[u64]) -> VectorTime {
    (0..)
        .zip(counts)
        .fold(VectorTime::default(), |stamp, (node, count)| {
            stamp.with(NodeId(node), *count)
        })
}

fn batch(counts: &[u64]) -> Vec<u8> {
    let batch = Batch {
        from: NodeId(0),
        stamp: stamp(counts),
        diffs: &[],
    };
    fragments::batch(&batch, counts.len())
}

fn merge_message(page: u32, op: MergeOp, counts: &[u64]) -> Vec<u8> {
    let merge_message = MergeMessage {
        stamp: stamp(counts),
        page: Page(page),
        round: 1,
        op,
    };
    fragments::message(&merge_message, None, counts.len())
}

/// Returns an announcement of a third node's batches.
fn said_before(node: u8, with_page: u8, count: u64) -> Frame {
    let mut frame = [
        node,
        0,
        0,
        0,
        DriverKind::Stamp.byte(),
        with_page,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ];
    frame[8..].copy_from_slice(&count.to_le_bytes());
    frame
}

#[test]
fn bytes_of_a_buffered_message_stay_intact() {
    const PAGE: u32 = 100;
    let mut world = World::of(2);
    let reader = world.reader(1, PAGE);
    // The message arrives before its predecessor, and other messages follow at once.
    let mut sent = copy(PAGE, 1);
    for page in [1, 2] {
        sent.extend(message(page, Body::Request { access: Access::Read }));
    }
    let far = world.other(1);
    far.bulk.write_all(&sent).unwrap();
    for _ in [1, 2] {
        far.control.read_exact(&mut [0; FRAME_BYTES]).unwrap();
    }
    assert!(!reader.is_finished());
    far.batch(&[0, 1]);
    assert_eq!(reader.join().unwrap(), [7; PAGE_LEN]);
}

#[test]
fn offered_page_is_not_used_as_a_receive_buffer() {
    const PAGE: u32 = 100;
    const ROUND: u64 = 1;
    let mut world = World::of(2);
    let offer = MergeMessage {
        stamp: stamp(&[0, 0]),
        page: Page(PAGE),
        round: ROUND,
        op: MergeOp::Offer(Level(4)),
    };
    let far = world.other(1);
    far.control
        .write_all(&fragments::message(&offer, Some(&[7; PAGE_LEN]), 2))
        .unwrap();
    let mut accepted = Reassembly::new();
    let accepted = std::iter::repeat_with(|| {
        let mut frame = [0; FRAME_BYTES];
        far.control.read_exact(&mut frame).unwrap();
        accepted.add(&frame, 2).unwrap()
    });
    let said = accepted.flatten().next();
    assert!(
        matches!(
            said,
            Some(MergePayload::Message(
                MergeMessage {
                    op: MergeOp::Accept { .. },
                    ..
                },
                None
            ))
        ),
        "{said:?}"
    );
    // The page has all its bytes here; a thread that needs it before it is open requests it all the same.
    let reader = world.reader(1, PAGE);
    let both = [1, 2].map(|page| message(page, Body::Request { access: Access::Read }));
    let far = world.other(1);
    far.bulk.write_all(both.as_flattened()).unwrap();
    for _ in both {
        far.control.read_exact(&mut [0; FRAME_BYTES]).unwrap();
    }
    far.control
        .write_all(&merge_message(PAGE, MergeOp::Begin, &[0, 0]))
        .unwrap();
    let wrong = reader.join().unwrap().iter().position(|byte| *byte != 7);
    assert_eq!(wrong, None, "the first byte that is not as it was offered");
}

#[test]
fn message_waits_for_its_senders_batches_of_a_third_node() {
    let mut world = World::of(3);
    for round in 0..3 {
        // Node 2 has applied that many batches of node 1, which have not arrived here.
        let page = world.page_of(2) + round;
        let reader = world.reader(2, page);
        let count = u64::from(round) * 2 + 2;
        let sent = [&said_before(1, 1, count)[..], &copy(page, 0)].concat();
        world.other(2).bulk.write_all(&sent).unwrap();
        for number in [count - 1, count] {
            thread::sleep(SETTLE_TIME);
            assert!(!reader.is_finished(), "round {round}");
            world.other(1).batch(&[0, number, 0]);
        }
        assert_eq!(reader.join().unwrap(), [7; PAGE_LEN]);
    }
}

#[test]
fn announcement_holds_for_its_stream_until_the_next() {
    let mut world = World::of(3);
    let page = world.page_of(2);
    // A message with a page has overtaken the predecessors of messages without one.
    let reader = world.reader(2, page);
    world.other(2).control.write_all(&said_before(1, 0, 1)).unwrap();
    thread::sleep(SETTLE_TIME);
    world.other(2).bulk.write_all(&copy(page, 0)).unwrap();
    assert_eq!(reader.join().unwrap(), [7; PAGE_LEN]);
    // The announcement also holds for the next message.
    let fresh = Body::Copy { bytes: Payload::Zero };
    let readers = [page + 1, page + 2].map(|page| {
        let reader = world.reader(2, page);
        world.other(2).control.write_all(&message(page, fresh)).unwrap();
        reader
    });
    thread::sleep(SETTLE_TIME);
    assert!(!readers.iter().any(JoinHandle::is_finished));
    world.other(1).batch(&[0, 1, 0]);
    for reader in readers {
        assert_eq!(reader.join().unwrap(), [0; PAGE_LEN]);
    }
}

#[test]
fn batches_wait_for_their_causal_predecessors() {
    let mut world = World::of(4);
    let causal = world.node.causal().unwrap().clone();
    let waits = world.after(3, 3, 1);
    // Batch 3 follows 2 and 2 follows 1; they arrive in reverse order, with node 3's fragments among those of
    // node 2.
    let fragments =
        [batch(&[0, 1, 1, 1]), batch(&[0, 1, 1, 0])].map(|all| all.as_chunks::<FRAME_BYTES>().0.to_vec());
    for (first, second) in fragments[0].iter().zip(&fragments[1]) {
        world.other(3).control.write_all(first).unwrap();
        thread::sleep(Duration::from_millis(2));
        world.other(2).control.write_all(second).unwrap();
        thread::sleep(Duration::from_millis(2));
    }
    thread::sleep(SETTLE_TIME);
    assert!(!waits.is_finished());
    world.other(1).batch(&[0, 1, 0, 0]);
    waits.join().unwrap();
    // All three are applied, and this node's next message follows them.
    let before = causal.before();
    assert_eq!([0, 1, 2, 3].map(|node| before.of(node)), [0, 1, 1, 1]);
    assert!(world.ends.try_recv().is_err());
}

#[test]
fn batches_of_third_nodes_are_announced_once_on_each_stream() {
    let mut world = World::of(3);
    world.other(1).batch(&[0, 1, 0]);
    world.after(1, 1, 1).join().unwrap();
    let page = world.page_of(0);
    // Node 2 requests pages that no node has written: the replies have no bytes and use the control stream.
    let ask = |page| message(page, Body::Request { access: Access::Read });
    let mut came = [0; FRAME_BYTES];
    for (page, is_said) in [(page, true), (page + 1, false)] {
        let far = world.other(2);
        far.bulk.write_all(&ask(page)).unwrap();
        if is_said {
            far.control.read_exact(&mut came).unwrap();
            assert_eq!(came, said_before(1, 0, 1));
        }
        far.control.read_exact(&mut came).unwrap();
        assert_eq!(came, message(page, Body::Copy { bytes: Payload::Zero }));
    }
    // A written page has its bytes attached and uses the other stream.
    let word = world.node.view().wrapping_add((page as usize + 2) * PAGE_LEN);
    // SAFETY: within the view.
    unsafe { word.write_volatile(9) };
    let far = world.other(2);
    far.bulk.write_all(&ask(page + 2)).unwrap();
    far.bulk.read_exact(&mut came).unwrap();
    assert_eq!(came, said_before(1, 1, 1));
    far.bulk.read_exact(&mut came).unwrap();
    assert_eq!(
        came,
        message(
            page + 2,
            Body::Copy {
                bytes: Payload::Attached
            }
        )
    );
    let mut bytes = [0; PAGE_LEN];
    far.bulk.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[0], 9);
    // The sender of a batch needs no announcement of it.
    let far = world.other(1);
    far.bulk.write_all(&ask(page)).unwrap();
    far.control.read_exact(&mut came).unwrap();
    assert_eq!(came, message(page, Body::Copy { bytes: Payload::Zero }));
}

#[test]
fn impossible_stamp_ends_the_memory_with_the_reason() {
    let far = u64::from(AHEAD_MAX) + 1;
    let fresh = |number| {
        let frame = message(100, Body::Copy { bytes: Payload::Zero });
        numbered(frame, number).to_vec()
    };
    let hostile: [(&str, Vec<u8>); 15] = [
        ("of its own, more than there can be", fresh(far as u32)),
        ("of its own, as many as can be said", fresh(u32::MAX / 2)),
        (
            "of a third, more than there can be",
            said_before(1, 0, far).to_vec(),
        ),
        (
            "of a third, as many as can be said",
            said_before(1, 1, u64::MAX).to_vec(),
        ),
        ("of a node that there is not", said_before(3, 0, 1).to_vec()),
        ("of this node", said_before(0, 0, 1).to_vec()),
        ("its second batch first", batch(&[0, 0, 2])),
        ("a batch without a number", batch(&[0, 0, 0])),
        (
            "a batch after one of ours that we did not send",
            batch(&[1, 0, 1]),
        ),
        ("a batch after too many of a third node", batch(&[0, far, 1])),
        ("a batch after as many as can be said", batch(&[0, u64::MAX, 1])),
        (
            "a merge_message before its own batch",
            merge_message(0, MergeOp::Leave, &[0, 0, 1]),
        ),
        (
            "a merge_message after one of ours that we did not send",
            merge_message(0, MergeOp::Leave, &[1, 0, 0]),
        ),
        (
            "what only another manager may say",
            merge_message(0, MergeOp::Drop, &[0, 0, 0]),
        ),
        (
            "of a page that there is not",
            merge_message(u32::MAX, MergeOp::Leave, &[0, 0, 0]),
        ),
    ];
    for (what, bytes) in hostile {
        let mut world = World::of(3);
        let waits = world.after(1, 1, 1);
        world.other(2).control.write_all(&bytes).unwrap();
        let why = world.end();
        assert!(
            why.starts_with("node 2: ") && !why.contains("do not come"),
            "{what}: {why}"
        );
        // No thread waits forever, and the others receive the reason.
        waits.join().unwrap();
        let mut told = [0; FRAME_BYTES];
        world.other(1).control.read_exact(&mut told).unwrap();
        assert_eq!(told[4], 0xff, "{what}");
    }
}

#[test]
fn packet_with_impossible_predecessors_ends_the_memory() {
    for (node, count) in [
        (1, AHEAD_MAX + 1),
        (1, u32::MAX / 2),
        (2, AHEAD_MAX + 1),
        (3, 1),
        (7, u32::MAX),
    ] {
        let world = World::of(3);
        // The reader does not handle it.
        let waits = world.after(2, node, count);
        assert_eq!(
            world.end(),
            "node 2: its packet comes after changes that there can't be",
            "{count} of node {node}"
        );
        waits.join().unwrap();
    }
}

#[test]
fn message_whose_predecessors_never_arrive_ends_the_memory() {
    const WHY: [&str; 3] = [
        "node 2: its packet comes after changes that do not come",
        "node 2: its message comes after changes of page tables that do not come",
        "node 2: its message comes after changes of page tables that do not come",
    ];
    for (way, why) in WHY.into_iter().enumerate() {
        let mut world = World::of(3);
        let waits = match way {
            0 => Some(world.after(2, 1, 1)),
            1 => {
                world.other(2).batch(&[0, 1, 1]);
                None
            }
            _ => {
                let page = world.page_of(2);
                // This thread waits forever.
                drop(world.reader(2, page));
                world.other(2).bulk.write_all(&copy(page, 1)).unwrap();
                None
            }
        };
        assert_eq!(world.end(), why);
        waits.into_iter().for_each(|waits| waits.join().unwrap());
        // Its page stays mapped.
        std::mem::forget(world);
    }
}

#[test]
fn loss_of_a_node_ends_all_waits() {
    let mut world = World::of(3);
    let waits = world.after(2, 1, 1);
    world.other(2).batch(&[0, 1, 1]);
    thread::sleep(SETTLE_TIME);
    assert!(!waits.is_finished());
    world.others.remove(0);
    match world.ends.recv_timeout(TEST_TIMEOUT).unwrap() {
        End::Lost { node, .. } => assert_eq!(node, "node 1"),
        other => panic!("{other:?}"),
    }
    waits.join().unwrap();
}

#[test]
fn memory_that_cannot_merge_reports_why() {
    let notes = |nodes, lanes| {
        let links = (0..lanes).map(|_| (0..nodes).map(|_| None).collect()).collect();
        let shape = Shape {
            nodes,
            pages: PAGES,
            lanes,
            migratory: false,
            method: None,
        };
        let settings = Settings {
            processors: 1,
            ..Settings::default()
        };
        let node = Node::start(0, shape, links, Vec::new(), &settings, Box::new(|_| ())).unwrap();
        let notes: Vec<String> = node
            .notes()
            .iter()
            .filter(|note| note.contains("merged"))
            .cloned()
            .collect();
        (node.causal().is_some(), notes.concat())
    };
    assert_eq!(notes(1, 1), (false, String::new()));
    assert_eq!(notes(2, 1), (true, String::new()));
    assert_eq!(notes(8, 1), (true, String::new()));
    let (merges, note) = notes(9, 1);
    assert!(
        !merges && note.ends_with("there are 9 nodes, of 8 at most"),
        "{note}"
    );
    let (merges, note) = notes(3, 2);
    assert!(
        !merges && note.ends_with("there are 2 lanes, of which one alone could"),
        "{note}"
    );
}

#[test]
fn payload_is_reassembled_from_its_fragments() {
    for length in [0, 1, 10, 11, 15, 200] {
        let said: Vec<u8> = (0..length).collect();
        let frames = fragments::fragments(fragments::PayloadKind::Message, &[&said]);
        assert!(frames.len().is_multiple_of(FRAME_BYTES));
        let mut whole = Vec::new();
        for frame in frames.as_chunks::<FRAME_BYTES>().0 {
            assert_eq!(frame[KIND_AT], DriverKind::Fragment.byte());
            whole.extend_from_slice(&frame[..KIND_AT]);
            whole.extend_from_slice(&frame[KIND_AT + 1..]);
        }
        assert_eq!(whole[..4], (said.len() as u32 + 1).to_le_bytes());
        assert_eq!(whole[5..][..said.len()], said[..]);
    }
}
