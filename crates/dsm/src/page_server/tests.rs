use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use coherence::{Access, Body, Message, Page, Payload};

use crate::PAGE_LEN;
use crate::frame::FRAME_BYTES;
use crate::link::Link;
use crate::node::{Node, Settings};
use crate::shape::Shape;

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Pages, of which each of three nodes manages a third.
const PAGES: u32 = 3 * 1024;
const NODE_1S: u32 = PAGES / 3 + 5;

fn ask(page: u32) -> [u8; FRAME_BYTES] {
    let body = Body::Request { access: Access::Read };
    Message {
        page: Page(page),
        body,
    }
    .encode()
}

#[test]
fn partly_received_page_is_not_another_nodes_receive_buffer() {
    let pairs = || std::array::from_fn(|_| UnixStream::pair().unwrap());
    let [(control_1, _far_control_1), (bulk_1, mut far_bulk_1)]: [_; 2] = pairs();
    let [(control_2, _far_control_2), (bulk_2, mut far_bulk_2)]: [_; 2] = pairs();
    for far in [&far_bulk_1, &far_bulk_2] {
        far.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    }
    let shape = Shape {
        nodes: 3,
        pages: PAGES,
        lanes: 1,
        migratory: false,
        method: None,
    };
    let link_1 = Link::new([control_1.into(), bulk_1.into()], None);
    let link_2 = Link::new([control_2.into(), bulk_2.into()], None);
    let names = ["this", "first", "second"].map(str::to_owned).into();
    let node = Node::start(
        0,
        shape,
        vec![vec![None, Some(link_1), Some(link_2)]],
        names,
        &Settings::default(),
        Box::new(|_| {}),
    )
    .unwrap();
    let mut frame = [0; FRAME_BYTES];
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            let page = node.view().wrapping_add(NODE_1S as usize * PAGE_LEN);
            // SAFETY: a page of the view, which lives until the end of this function.
            unsafe { page.cast::<[u8; PAGE_LEN]>().read_volatile() }
        });
        far_bulk_1.read_exact(&mut frame).unwrap();
        assert_eq!(frame, ask(NODE_1S));
        let body = Body::Copy {
            bytes: Payload::Attached,
        };
        let page = Page(NODE_1S);
        far_bulk_1.write_all(&Message { page, body }.encode()).unwrap();
        far_bulk_1.write_all(&[7; 100]).unwrap();
        // Long enough for the page server to have handled it; a later one is correct in any case.
        std::thread::sleep(Duration::from_millis(50));
        // Two requests at once: the bytes after the first one are received somewhere.
        far_bulk_2.write_all(&[ask(1), ask(2)].concat()).unwrap();
        for page in [1, 2] {
            far_bulk_2.read_exact(&mut frame).unwrap();
            assert_eq!(Message::decode(&frame).unwrap().page, Page(page));
        }
        far_bulk_1.write_all(&[7; PAGE_LEN - 100]).unwrap();
        let read = reads.join().unwrap();
        let wrong = read.iter().position(|byte| *byte != 7);
        assert_eq!(wrong, None, "the first byte that is not as it was sent");
    });
}
