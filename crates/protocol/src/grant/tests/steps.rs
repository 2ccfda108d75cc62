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
        ledger.take(id(number), Message::Hello { given, held: None });
    }
    ledger
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
    let (given, held) = (0, Some(5));
    let hello = Effect::Send(next, Message::Hello { given, held });
    assert_eq!(ledger.link(next), [hello]);
    ledger.take(next, Message::Hello { given: 7, held: None });
    assert_eq!(ledger.free(), 3);
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
