//! Single steps.

use proptest::prelude::*;

use crate::link::{Header, Link, LinkError, WINDOW};

const TIMEOUT_NS: u64 = 1000;

fn link() -> Link<u32> {
    Link::new(TIMEOUT_NS, 0)
}

fn header(number: u64, before: u64, beyond: u64) -> Header {
    Header {
        number,
        before,
        beyond,
    }
}

/// What a tick sends: numbers and items.
fn tick(link: &mut Link<u32>, now_ns: u64) -> Vec<(u64, Option<u32>)> {
    let mut sent = Vec::new();
    link.tick(now_ns, |header, item| sent.push((header.number, item.copied())));
    sent
}

#[test]
fn the_window_is_full_until_the_oldest_is_acknowledged() {
    let mut link = link();
    for item in 0..64 {
        assert!(link.send(item, 0).is_ok());
    }
    assert_eq!(link.send(64, 0), Err(64));
    // All but the oldest have come.
    assert_eq!(link.receive(header(0, 1, u64::MAX >> 1), 1), Ok(false));
    assert_eq!(link.send(64, 1), Err(64));
    assert_eq!(link.receive(header(0, 65, 0), 1), Ok(false));
    assert_eq!(link.send(64, 1).map(|header| header.number), Ok(65));
}

#[test]
fn only_what_has_not_come_is_sent_again_and_only_in_time() {
    let mut link = link();
    for item in 0..4 {
        link.send(item, 10 * u64::from(item)).expect("room");
    }
    // The first and the third.
    link.receive(header(0, 2, 0b1), 50).expect("honest");
    assert_eq!(link.due_ns(), Some(TIMEOUT_NS + 10));
    assert_eq!(tick(&mut link, TIMEOUT_NS + 9), []);
    assert_eq!(tick(&mut link, TIMEOUT_NS + 10), [(2, Some(1))]);
    assert_eq!(tick(&mut link, TIMEOUT_NS + 30), [(4, Some(3))]);
    assert_eq!(tick(&mut link, 2 * TIMEOUT_NS + 10), [(2, Some(1))]);
    assert_eq!(link.silent_since_ns(), Some(50));
    link.receive(header(0, 5, 0), 60).expect("honest");
    assert_eq!((link.due_ns(), link.silent_since_ns()), (None, None));
}

#[test]
fn what_comes_is_acknowledged_by_what_goes_or_alone() {
    let mut link = link();
    assert_eq!(link.receive(header(3, 1, 0), 0), Ok(true));
    assert_eq!(link.receive(header(3, 1, 0), 0), Ok(false));
    assert_eq!(link.receive(header(1, 1, 0), 0), Ok(true));
    assert_eq!(link.send(7, 0), Ok(header(1, 2, 0b1)));
    assert_eq!(tick(&mut link, 0), []);
    // A double: what told of it may have been lost.
    assert_eq!(link.receive(header(1, 1, 0), 0), Ok(false));
    assert_eq!(tick(&mut link, 0), [(0, None)]);
    assert_eq!(tick(&mut link, 0), []);
    assert_eq!(link.receive(header(2, 1, 0), 0), Ok(true));
    assert_eq!(link.send(8, 0), Ok(header(2, 4, 0)));
}

#[test]
fn items_past_the_window_and_acknowledgements_of_nothing_are_refused() {
    let mut link = link();
    link.send(0, 0).expect("room");
    let before = link.clone();
    let past = WINDOW as u64 + 1;
    assert_eq!(
        link.receive(header(past, 1, 0), 0),
        Err(LinkError::PastWindow(past))
    );
    assert_eq!(link.receive(header(1, 3, 0), 0), Err(LinkError::NeverSent(2)));
    assert_eq!(link.receive(header(1, 1, 0b1), 0), Err(LinkError::NeverSent(2)));
    assert_eq!(link, before);
}

proptest! {
    /// Whatever comes, nothing panics, and no item is taken twice.
    #[test]
    fn any_headers(headers in proptest::collection::vec((0_u64..200, 0_u64..80, any::<u64>(), any::<bool>()), 0..200)) {
        let mut link = link();
        let mut taken = std::collections::BTreeSet::new();
        for (number, before, beyond, sends) in headers {
            if sends {
                let _ = link.send(0, 0);
            }
            let was = link.clone();
            let header = header(number, before, beyond >> (before % 64));
            match link.receive(header, 0) {
                Ok(true) => prop_assert!(taken.insert(number)),
                Ok(false) => {}
                Err(_) => prop_assert_eq!(&link, &was),
            }
            link.tick(u64::MAX, |_, _| {});
            prop_assert_eq!(Header::decode(&header.encode()), header);
        }
    }
}
