use std::io::{Read, Write};
use std::iter::once;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::PAGE_LEN;
use crate::frame::{FRAME_BYTES, KIND_AT};
use crate::link::Link;
use crate::node::{Node, Settings};
use crate::shape::Shape;

const PAGES: u32 = 1024;
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Starts node 0 of two, which manages the first half. Returns it, the other's control stream, and the reason
/// of its end.
fn node() -> (Node, [UnixStream; 2], mpsc::Receiver<End>) {
    let (control, far_control) = UnixStream::pair().unwrap();
    let (bulk, far_bulk) = UnixStream::pair().unwrap();
    far_control.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let shape = Shape {
        nodes: 2,
        pages: PAGES,
        lanes: 1,
        migratory: false,
        method: None,
    };
    let link = Link::new([control.into(), bulk.into()], None);
    let (told, ended) = mpsc::channel();
    let node = Node::start(
        0,
        shape,
        vec![vec![None, Some(link)]],
        vec!["this".to_owned(), "the other".to_owned()],
        &Settings::default(),
        Box::new(move |end| drop(told.send(end.clone()))),
    )
    .unwrap();
    (node, [far_control, far_bulk], ended)
}

fn block(first: u32, mask: u64) -> Block {
    Block { first, mask }
}

#[test]
fn requested_block_is_discarded_and_reported() {
    let (node, [mut control, _bulk], ended) = node();
    // SAFETY: a page of the view, which lives until the end of this function.
    unsafe { node.view().add(65 * PAGE_LEN).write_volatile(1) };
    // Its neighbours are claimed with it.
    std::thread::sleep(Duration::from_millis(20));
    let before = node.resident_bytes().unwrap();
    control
        .write_all(&frame(DriverKind::Discard, block(64, 0b1111), 1))
        .unwrap();
    let mut answer = [0; FRAME_BYTES];
    control.read_exact(&mut answer).unwrap();
    assert_eq!(answer, frame(DriverKind::Discarded, block(64, 0b1111), 1));
    assert!(node.resident_bytes().unwrap() < before);
    // SAFETY: as above.
    assert_eq!(unsafe { node.view().add(65 * PAGE_LEN).read_volatile() }, 0);
    assert!(ended.try_recv().is_err());
}

#[test]
fn discard_waits_for_the_manager_of_each_page() {
    let (node, [mut control, _bulk], _ended) = node();
    std::thread::scope(|scope| {
        let given = scope.spawn(|| node.discards().give_back(once(PAGES / 2 - 1..PAGES / 2 + 3)));
        let mut frames = [[0; FRAME_BYTES]; 2];
        for frame in &mut frames {
            control.read_exact(frame).unwrap();
        }
        frames.sort_unstable_by_key(|frame| frame[KIND_AT]);
        // This node's pages are done; the other's are requested.
        assert_eq!(
            frames[0],
            frame(DriverKind::Discarded, block(PAGES / 2 - 64, 1 << 63), 0)
        );
        assert_eq!(frames[1], frame(DriverKind::Discard, block(PAGES / 2, 0b111), 0));
        assert!(!given.is_finished());
        // One of the three is in use there.
        control
            .write_all(&frame(DriverKind::Discarded, block(PAGES / 2, 0b101), 0))
            .unwrap();
        assert_eq!(given.join().unwrap(), 3);
    });
}

#[test]
fn discard_returns_when_the_memory_ends() {
    let (node, [control, bulk], ended) = node();
    std::thread::scope(|scope| {
        let given = scope.spawn(|| node.discards().give_back(once(PAGES - 1..PAGES)));
        drop((control, bulk));
        assert!(matches!(ended.recv_timeout(TEST_TIMEOUT), Ok(End::Lost { .. })));
        assert_eq!(given.join().unwrap(), 0);
    });
}

#[test]
fn malformed_blocks_end_the_memory() {
    let half = PAGES / 2;
    for (name, frames) in [
        ("nothing", vec![frame(DriverKind::Discard, block(64, 0), 1)]),
        (
            "not the first page that could be",
            vec![frame(DriverKind::Discard, block(65, 1), 1)],
        ),
        (
            "another node's pages",
            vec![frame(DriverKind::Discard, block(half, 1), 1)],
        ),
        (
            "past the end",
            vec![frame(DriverKind::Discard, block(PAGES, 1), 1)],
        ),
        (
            "far past the end",
            vec![frame(DriverKind::Discard, block(u32::MAX, u64::MAX), 1)],
        ),
        (
            "done with another's",
            vec![frame(DriverKind::Discarded, block(64, 1), 1)],
        ),
        (
            "an answer to nothing",
            vec![frame(DriverKind::Discarded, block(half, 1), 0)],
        ),
        (
            "too many at once",
            // Node 1 owns these pages and does not release them: none of these requests ends.
            (0..=BLOCKS_MAX as u32)
                .map(|at| frame(DriverKind::Discard, block(64, 1 << at), 1))
                .collect(),
        ),
    ] {
        let (_node, [mut control, mut bulk], ended) = node();
        for page in 64..64 + BLOCKS_MAX as u32 + 1 {
            let body = coherence::Body::Request {
                access: coherence::Access::Write,
            };
            let page = Page(page);
            bulk.write_all(&coherence::Message { page, body }.encode())
                .unwrap();
        }
        std::thread::sleep(Duration::from_millis(20));
        for frame in frames {
            control.write_all(&frame).unwrap();
        }
        let end = ended.recv_timeout(TEST_TIMEOUT);
        assert!(matches!(end, Ok(End::ProtocolError(_))), "{name}: {end:?}");
    }
}
