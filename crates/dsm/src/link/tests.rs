use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;
use crate::wire::tests::segments;

fn pair() -> (Link, Link) {
    let (control, far_control) = UnixStream::pair().unwrap();
    let (bulk, far_bulk) = UnixStream::pair().unwrap();
    (
        Link::new([control.into(), bulk.into()], None),
        Link::new([far_control.into(), far_bulk.into()], None),
    )
}

/// Links over sockets alone, and with pipes that hold three pages.
fn pairs() -> [(Link, Link); 2] {
    let ([near, far], [near_pipes, far_pipes], _) = segments(2048);
    let piped = (Link::new(near, Some(near_pipes)), Link::new(far, Some(far_pipes)));
    [pair(), piped]
}

fn send_page(link: &mut Link, number: u8) {
    // SAFETY: a page of this test's.
    unsafe { link.send_page(&[number; FRAME_BYTES], &[number * 11; PAGE_LEN]) }.unwrap();
}

#[test]
fn messages_arrive_complete_and_in_order() {
    for (mut near, mut far) in pairs() {
        assert_eq!(far.next_control().unwrap(), None);
        for number in 0..200_u8 {
            near.send(&[number; FRAME_BYTES], false).unwrap();
        }
        far.fill([true, false]);
        for number in 0..200_u8 {
            assert_eq!(far.next_control().unwrap(), Some([number; FRAME_BYTES]));
        }
        assert_eq!(far.next_control().unwrap(), None);
    }
}

#[test]
fn page_lands_at_its_place_for_any_guess_and_segmentation() {
    for guess_is_right in [true, false] {
        let (control, _far_control) = UnixStream::pair().unwrap();
        let (bulk, mut far) = UnixStream::pair().unwrap();
        let mut link = Link::new([control.into(), bulk.into()], None);
        let mut pages = [[0_u8; PAGE_LEN]; 2];
        let sent: Vec<u8> = (0..PAGE_FRAME_BYTES).map(|at| (at % 251) as u8).collect();
        let [right, wrong] = pages.each_mut().map(|page| page.as_mut_ptr());
        let guess = if guess_is_right { right } else { wrong };
        let mut frame = None;
        for piece in [&sent[..5], &sent[5..300], &sent[300..4000], &sent[4000..]] {
            assert_eq!(frame, None);
            far.write_all(piece).unwrap();
            link.fill([false, true]);
            // SAFETY: pages of this test's, which outlive the link.
            frame = unsafe { link.next_bulk(guess, |_| Ok(Some(right))) }.unwrap();
        }
        assert_eq!(frame.unwrap(), sent[..FRAME_BYTES]);
        assert_eq!(pages[0], sent[FRAME_BYTES..]);
    }
}

#[test]
fn successive_pages_are_separated() {
    for (mut near, mut far) in pairs() {
        send_page(&mut near, 1);
        send_page(&mut near, 2);
        let mut page = [0_u8; PAGE_LEN];
        let at = page.as_mut_ptr();
        for number in [1, 2] {
            // SAFETY: a page of this test's.
            let frame = unsafe { far.next_bulk(at, |_| Ok(Some(at))) }.unwrap();
            assert_eq!(frame, Some([number; FRAME_BYTES]));
            assert_eq!(page, [number * 11; PAGE_LEN]);
        }
    }
}

fn next_page(link: &mut Link) -> Option<Frame> {
    let mut page = [0_u8; PAGE_LEN];
    let at = page.as_mut_ptr();
    // SAFETY: a page of this test's, and all that is sent whole comes whole.
    unsafe { link.next_bulk(at, |_| Ok(Some(at))) }.unwrap()
}

/// Otherwise the page server would poll again instead of sleeping, and keep its CPU from the thread that
/// waited for the page.
#[test]
fn sleep_is_allowed_after_a_complete_page() {
    let (mut near, mut far) = pair();
    send_page(&mut near, 1);
    far.fill([true; 2]);
    assert_eq!(next_page(&mut far), Some([1; FRAME_BYTES]));
    assert!(!far.has_more());
    send_page(&mut near, 2);
    assert!(!far.has_more());
    let mut told = [PollFd::new(far.streams()[1], PollFlags::POLLIN)];
    assert_eq!(poll(&mut told, PollTimeout::ZERO), Ok(1));
    assert_eq!(next_page(&mut far), Some([2; FRAME_BYTES]));
    assert!(!far.has_more());
}

#[test]
fn sleep_is_refused_with_untaken_messages() {
    for (mut near, mut far) in pairs() {
        for with_answers in [true, false] {
            near.send(&[1; 2 * FRAME_BYTES], with_answers).unwrap();
            far.fill([true; 2]);
            let next = |far: &mut Link| {
                let mut guess = [0_u8; PAGE_LEN];
                // SAFETY: a page of this test's, for messages without one.
                let bulk = unsafe { far.next_bulk(guess.as_mut_ptr(), |_| Ok(None)) }.unwrap();
                bulk.or_else(|| far.next_control().unwrap())
            };
            assert_eq!(next(&mut far), Some([1; FRAME_BYTES]));
            assert!(far.has_more(), "with answers: {with_answers}");
            assert_eq!(next(&mut far), Some([1; FRAME_BYTES]));
            assert!(!far.has_more(), "with answers: {with_answers}");
        }
    }
}

#[test]
fn mixed_messages_and_pages_are_separated_for_any_segmentation() {
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..50 {
        let (control, _far_control) = UnixStream::pair().unwrap();
        let (bulk, mut far) = UnixStream::pair().unwrap();
        let mut link = Link::new([control.into(), bulk.into()], None);
        // Even numbers have a page attached.
        let numbers: Vec<u8> = (0..20).map(|_| random.u8(..)).collect();
        let mut sent = Vec::new();
        for number in &numbers {
            sent.extend([*number; FRAME_BYTES]);
            if number % 2 == 0 {
                sent.extend([*number; PAGE_LEN]);
            }
        }
        let (mut guess, mut right) = ([0_u8; PAGE_LEN], [0_u8; PAGE_LEN]);
        let mut came = Vec::new();
        while !sent.is_empty() {
            let piece = random.usize(1..9000).min(sent.len());
            far.write_all(&sent[..piece]).unwrap();
            sent.drain(..piece);
            link.fill([false, true]);
            let right_at = right.as_mut_ptr();
            let place = |frame: &Frame| Ok(frame[0].is_multiple_of(2).then_some(right_at));
            // SAFETY: pages of this test's.
            while let Some(frame) = unsafe { link.next_bulk(guess.as_mut_ptr(), place) }.unwrap() {
                assert_eq!(frame, [frame[0]; FRAME_BYTES]);
                // SAFETY: written through the pointer above, which is not used now.
                let page = unsafe { right_at.cast::<[u8; PAGE_LEN]>().read() };
                assert!(frame[0] % 2 == 1 || page == [frame[0]; PAGE_LEN]);
                came.push(frame[0]);
            }
        }
        assert_eq!(came, numbers);
    }
}

#[test]
fn end_of_the_connection_is_reported() {
    for (near, mut far) in pairs() {
        drop(near);
        assert_eq!(far.next_control().unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut page = [0_u8; PAGE_LEN];
        let at = page.as_mut_ptr();
        // SAFETY: a page of this test's.
        let error = unsafe { far.next_bulk(at, |_| Ok(Some(at))) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert!(far.send(&[0; FRAME_BYTES], false).is_err());
    }
}
