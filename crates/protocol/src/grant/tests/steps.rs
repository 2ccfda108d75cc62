//! Single steps of the protocol.

use proptest::prelude::*;

use super::super::{Amounts, Effect, Ledger, Message, Refusal};
use super::world::vm;
use crate::CellId;

fn id(number: u16) -> CellId {
    CellId { number, life: 1 }
}

/// Cell 0 with so much of its own, which has met cells 1 and 2 and holds of theirs.
fn ledger(own: u64, of_first: u64, of_second: u64) -> Ledger {
    let mut ledger = Ledger::new(id(0), own, Amounts::new());
    for (number, given) in [(1, of_first), (2, of_second)] {
        ledger.link(id(number));
        ledger.take(id(number), hello(given, None));
    }
    ledger
}

/// A hello without memory on request.
fn hello(given: u64, held: Option<u64>) -> Message {
    Message::Hello {
        given,
        held,
        given_on_request: 0,
        held_on_request: 0,
    }
}

#[test]
fn grant_is_persisted_before_it_is_announced() {
    let mut ledger = ledger(10, 0, 0);
    let expected = vec![
        Effect::Keep([(1, 4)].into()),
        Effect::Send(id(1), Message::Give { bytes: 4 }),
    ];
    assert_eq!(ledger.give(1, 4), Ok(expected));
    assert_eq!(ledger.own_free(), 6);
    assert_eq!(ledger.give(2, 7), Err(Refusal::Short(6)));
    assert_eq!(ledger.recall(1, 5), Err(Refusal::Short(4)));
    assert_eq!(ledger.give(3, 1), Err(Refusal::NotMet));
}

#[test]
fn own_memory_is_used_first_then_the_fewest_lenders() {
    let mut ledger = ledger(4, 1, 5);
    assert_eq!(ledger.occupy(vm(1), 3), Some(&[(0, 3)].into()));
    assert_eq!(ledger.occupy(vm(2), 5), Some(&[(0, 1), (2, 4)].into()));
    assert_eq!(ledger.occupy(vm(3), 3), None);
    assert_eq!(ledger.occupy(vm(3), 2), Some(&[(1, 1), (2, 1)].into()));
    ledger.vacate(&vm(1));
    assert_eq!((ledger.own_free(), ledger.free()), (3, 3));
}

#[test]
fn memory_of_one_vm_goes_to_no_other() {
    let mut ledger = ledger(4, 0, 0);
    assert!(ledger.occupy(vm(1), 3).is_some());
    assert_eq!(ledger.occupy(vm(1), 1), None);
    assert_eq!(ledger.occupy(vm(2), 2), None);
    assert_eq!(ledger.own_free(), 1);
    ledger.vacate(&vm(1));
    assert_eq!(ledger.own_free(), 4);
    assert!(ledger.occupy(vm(2), 2).is_some());
}

#[test]
fn write_off_returns_a_dead_holders_memory() {
    let mut ledger = ledger(10, 0, 0);
    ledger.give(1, 4).unwrap();
    assert_eq!(ledger.write_off(1), [], "it lives");
    ledger.dead(id(1));
    assert_eq!(ledger.own_free(), 6);
    assert_eq!(ledger.write_off(1), [Effect::Keep(Amounts::new())]);
    assert_eq!(ledger.own_free(), 10);
    assert_eq!(ledger.write_off(1), []);
}

#[test]
fn memory_of_a_dead_home_is_not_allocated() {
    let mut ledger = ledger(0, 5, 0);
    assert!(ledger.occupy(vm(1), 2).is_some());
    ledger.dead(id(1));
    assert_eq!(ledger.occupy(vm(2), 2), None);
    // Its next incarnation receives the count of this one, in use or not.
    let next = CellId { number: 1, life: 2 };
    assert_eq!(ledger.link(next), [Effect::Send(next, hello(0, Some(5)))]);
    ledger.take(next, hello(7, None));
    assert_eq!(ledger.free(), 3);
}

#[test]
fn requested_memory_is_persisted_before_it_is_sent_and_is_counted_apart() {
    let mut home = ledger(10, 0, 0);
    home.give(1, 3).unwrap();
    let asked = home.take(id(1), Message::Request { bytes: 4 });
    assert_eq!(asked, [Effect::Requested(1, 4)]);
    let expected = [
        Effect::Keep([(1, 7)].into()),
        Effect::Send(id(1), Message::Lent { bytes: 4 }),
    ];
    assert_eq!(home.reply(1, 4, true), expected);
    assert_eq!(home.given_on_request(), &[(1, 4)].into());
    let declined = |bytes| [Effect::Send(id(1), Message::Declined { bytes })];
    assert_eq!(home.reply(1, 4, true), declined(4), "only 3 bytes are free");
    assert_eq!(home.reply(1, 2, false), declined(2));
    // The next incarnation of the holder learns both counts.
    let next = CellId { number: 1, life: 2 };
    let hello = Message::Hello {
        given: 7,
        held: None,
        given_on_request: 4,
        held_on_request: 0,
    };
    assert_eq!(home.link(next), [Effect::Send(next, hello)]);
}

#[test]
fn only_requested_memory_that_no_vm_uses_is_returned_without_a_command() {
    let mut holder = ledger(0, 5, 0);
    assert_eq!(
        holder.give_back(1, 1),
        Err(Refusal::Short(0)),
        "a command lent it"
    );
    let lent = holder.take(id(1), Message::Lent { bytes: 4 });
    assert_eq!((lent, holder.returnable(1)), (vec![Effect::Lent(1, 4)], 4));
    assert!(holder.occupy(vm(1), 7).is_some());
    assert_eq!(holder.returnable(1), 2);
    let returned = |bytes| Effect::Send(id(1), Message::Return { bytes });
    assert_eq!(holder.give_back(1, 1), Ok(vec![returned(1)]));
    assert_eq!(holder.take(id(1), Message::Release { bytes: 9 }), [returned(1)]);
    assert_eq!(holder.take(id(1), Message::Release { bytes: 9 }), [returned(0)]);
    assert_eq!(holder.held(), &[(1, 7)].into());
}

#[test]
fn parts_of_a_vm_are_refused_where_a_home_has_less() {
    let mut ledger = ledger(4, 5, 0);
    assert_eq!(ledger.occupy_parts(vm(1), [(0, 1), (1, 6)].into()), None);
    assert_eq!(ledger.occupy_parts(vm(1), [(0, 5)].into()), None);
    assert_eq!(ledger.occupy_parts(vm(1), [(2, 1)].into()), None);
    let parts = [(0, 1), (1, 5)].into();
    assert_eq!(
        ledger.occupy_parts(vm(1), parts).map(|parts| parts.len()),
        Some(2)
    );
    assert_eq!(ledger.occupy_parts(vm(1), [(0, 1)].into()), None, "it has memory");
    assert_eq!((ledger.own_free(), ledger.free()), (3, 3));
}

proptest! {
    /// However uses come and go, each byte is in one use or free, and no use has more of a home than is held
    /// of it.
    #[test]
    fn used_and_free_memory_sum_to_the_total(
        own in 0..20_u64, first in 0..20_u64, second in 0..20_u64,
        uses in prop::collection::vec((0..6_u8, 1..15_u64), 0..40),
    ) {
        let mut ledger = ledger(own, first, second);
        for (number, bytes) in uses {
            if ledger.parts(&vm(number)).is_some() {
                ledger.vacate(&vm(number));
            } else {
                let free = ledger.free();
                let parts = ledger.occupy(vm(number), bytes).cloned();
                prop_assert_eq!(parts.is_some(), bytes <= free);
                prop_assert_eq!(parts.map_or(bytes, |parts| parts.values().sum()), bytes);
            }
            let used = |home| -> u64 {
                let all = (0..6).filter_map(|number| ledger.parts(&vm(number)));
                all.filter_map(|parts| parts.get(&home)).sum()
            };
            prop_assert!(used(0) <= own && used(1) <= first && used(2) <= second);
            prop_assert_eq!(used(0) + used(1) + used(2) + ledger.free(), own + first + second);
        }
    }
}

#[test]
fn memory_changes_its_home_with_both_parts_counted_meanwhile() {
    let mut ledger = ledger(6, 4, 0);
    ledger.occupy(vm(1), 4);
    assert!(!ledger.extend(&vm(1), 1, 5), "cell 1 has lent 4");
    assert!(!ledger.extend(&vm(1), 0, 3), "2 are free");
    assert!(!ledger.extend(&vm(2), 1, 1), "it has no memory");
    assert!(!ledger.extend(&vm(1), 3, 1), "cell 3 has lent nothing");
    assert_eq!(
        (ledger.own_free(), ledger.free()),
        (2, 6),
        "refusals have no effect"
    );
    assert!(ledger.extend(&vm(1), 1, 4));
    assert_eq!(ledger.parts(&vm(1)), Some(&[(0, 4), (1, 4)].into()));
    assert_eq!((ledger.own_free(), ledger.free()), (2, 2));
    assert_eq!(
        ledger.take(id(1), Message::Recall { bytes: 1 }),
        [Effect::Send(id(1), Message::Kept { bytes: 1 })],
        "the loan is in use"
    );
    assert!(!ledger.reduce(&vm(1), [(1, 5)].into()), "more than it has");
    assert!(!ledger.reduce(&vm(2), [(1, 1)].into()), "it has no memory");
    assert!(ledger.reduce(&vm(1), [(1, 4)].into()));
    assert_eq!((ledger.own_free(), ledger.free()), (6, 6));
    assert!(ledger.extend(&vm(1), 0, 4) && ledger.reduce(&vm(1), [(0, 4)].into()));
    let back = ledger.take(id(1), Message::Recall { bytes: 4 });
    assert_eq!(back, [Effect::Send(id(1), Message::Back { bytes: 4 })]);
}
