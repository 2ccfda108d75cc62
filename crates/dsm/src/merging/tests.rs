use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use coherence::{Access, Body, Bytes};

use super::*;
use crate::link::Link;
use crate::meeting::Shape;
use crate::node::{Node, Settings};

#[test]
fn bytes_that_come_before_what_they_come_after_stay_as_they_are() {
    let (control, mut far_control) = UnixStream::pair().unwrap();
    let (bulk, mut far_bulk) = UnixStream::pair().unwrap();
    for stream in [&far_control, &far_bulk] {
        stream
            .set_read_timeout(Some(std::time::Duration::from_secs(20)))
            .unwrap();
    }
    let shape = Shape {
        nodes: 2,
        pages: 128,
        lanes: 1,
        migratory: false,
        method: None,
    };
    let settings = Settings {
        processors: 1,
        ..Settings::default()
    };
    let link = Link::new(control.into(), bulk.into()).unwrap();
    let names = vec!["this".to_owned(), "the other".to_owned()];
    let node = Node::start(
        0,
        shape,
        vec![vec![None, Some(link)]],
        names,
        &settings,
        Box::new(|_| ()),
    )
    .unwrap();

    // A thread waits for a page of the other node's.
    const PAGE: u32 = 100;
    let at = node.view() as usize + PAGE as usize * PAGE_BYTES;
    // SAFETY: a page of the view, which lives until the node is dropped below.
    let reader = thread::spawn(move || unsafe { (at as *const [u8; PAGE_BYTES]).read_volatile() });
    let mut asked = [0; FRAME_BYTES];
    far_bulk.read_exact(&mut asked).unwrap();
    assert_eq!(Message::decode(&asked).unwrap().page, Page(PAGE));

    // It comes before a batch that it comes after, and with other messages close behind.
    let message = |page, body| {
        Message {
            page: Page(page),
            body,
        }
        .encode()
    };
    let mut copy = message(PAGE, Body::Copy { bytes: Bytes::Beside });
    copy[NUMBER_AT..].copy_from_slice(&1_u32.to_le_bytes());
    let mut sent = copy.to_vec();
    sent.extend([7; PAGE_BYTES]);
    for page in [1, 2] {
        sent.extend(message(page, Body::Ask { access: Access::Read }));
    }
    far_bulk.write_all(&sent).unwrap();
    for _ in [1, 2] {
        far_control.read_exact(&mut asked).unwrap();
    }
    assert!(!reader.is_finished());

    let mut stamp = [0; STAMP_BYTES];
    stamp[8] = 1;
    far_control.write_all(&pieces(BATCH, &[&stamp])).unwrap();
    assert_eq!(reader.join().unwrap(), [7; PAGE_BYTES]);
}

#[test]
fn what_is_said_comes_whole_out_of_its_pieces() {
    for length in [0, 1, 10, 11, 15, 200] {
        let said: Vec<u8> = (0..length).collect();
        let frames = pieces(SAYING, &[&said]);
        assert!(frames.len().is_multiple_of(FRAME_BYTES));
        let mut whole = Vec::new();
        for frame in frames.as_chunks::<FRAME_BYTES>().0 {
            assert_eq!(frame[KIND_AT], KIND_PIECE);
            whole.extend_from_slice(&frame[..KIND_AT]);
            whole.extend_from_slice(&frame[KIND_AT + 1..]);
        }
        assert_eq!(whole[..4], (said.len() as u32 + 1).to_le_bytes());
        assert_eq!(whole[5..][..said.len()], said[..]);
    }
}
