//! Every order of the steps of a few cells, by model checking, and long random stories.

mod every_order;
mod relays;

use super::{CellId, Effect, Message, Node};

fn id(number: u16) -> CellId {
    CellId { number, life: 1 }
}

#[test]
fn keys_of_a_forgotten_cell_are_free() {
    let mut node = Node::<char, u8>::new(id(0));
    node.find('a', 1, 7);
    node.find('b', 2, 8);
    node.link(id(1));
    let (mine, yours) = ([('a', 7), ('c', 9)].into(), [].into());
    node.take(id(1), Message::Hello { mine, yours }, None);
    // It has a vote for one more, and dies before it reports the result.
    let voted = node.take(id(1), Message::Ask { claim: 1, key: 'd' }, None);
    assert!(matches!(voted[..], [Effect::Reply { .. }]), "{voted:?}");
    node.dead(id(1));
    for (key, taken) in [('a', true), ('b', true), ('c', true), ('d', true), ('e', false)] {
        let (_, effects) = node.claim(key, 0);
        assert_eq!(
            matches!(effects[..], [Effect::Lost { .. }]),
            taken,
            "{key}: {effects:?}"
        );
    }
    node.forget(1, |key| *key != 'c');
    for (key, taken) in [('a', false), ('b', true), ('c', true), ('d', false)] {
        let (_, effects) = node.claim(key, 0);
        assert_eq!(
            matches!(effects[..], [Effect::Lost { .. }]),
            taken,
            "{key}: {effects:?}"
        );
    }
}

/// Two linked cells, each of which has the entry `key` of cell 2.
fn two_that_know(key: char) -> [Node<char, u8>; 2] {
    [0, 1].map(|number| {
        let mut node = Node::new(id(number));
        node.find(key, 2, 7);
        node.link(id(1 - number));
        let (mine, yours) = (Vec::new(), Vec::new());
        node.take(id(1 - number), Message::Hello { mine, yours }, None);
        node
    })
}

#[test]
fn dead_cell_is_forgotten_by_all_and_by_linked_cells_after_link_loss() {
    let [mut first, mut second] = two_that_know('a');
    second.link(id(2));
    let (change, effects) = first.forget_everywhere(id(2)).unwrap();
    let [Effect::Tell(forget)] = &effects[..] else {
        panic!("{effects:?}");
    };
    assert_eq!(first.owner(&'a'), None);
    let receipt = second.take(id(0), forget.clone(), None);
    assert!(matches!(receipt[..], [Effect::Reply { .. }]), "{receipt:?}");
    // It does not know yet that this life is dead.
    assert_eq!(second.owner(&'a'), Some(2));
    second.dead(id(2));
    assert_eq!(second.owner(&'a'), None);
    let heard = first.take(id(1), Message::Receipt { change }, None);
    assert_eq!(heard, [Effect::Heard(change)]);
}

#[test]
fn later_incarnation_keeps_its_entries() {
    let next = CellId { number: 2, life: 2 };
    for comes_first in [true, false] {
        let [mut first, mut second] = two_that_know('a');
        let forget = Message::Forget {
            change: 0,
            cell: id(2),
        };
        second.link(if comes_first { next } else { id(2) });
        second.take(id(0), forget, None);
        second.link(next);
        second.dead(id(2));
        second.dead(next);
        assert_eq!(second.owner(&'a'), Some(2));
        first.link(next);
        assert!(
            first.forget_everywhere(id(2)).is_none(),
            "it has a link to cell 2"
        );
        assert!(first.forget_everywhere(id(0)).is_none(), "it is cell 0");
    }
}

#[test]
fn every_random_run_keeps_the_invariants() {
    let (mut won, mut lost) = (0, 0);
    for seed in 0..30_000 {
        let outcome = super::stories::tell(seed).unwrap_or_else(|what| panic!("{what}"));
        won += u64::from(outcome.won);
        lost += u64::from(outcome.lost);
    }
    // Stories in which nothing happens prove nothing.
    assert!(won > 100_000 && lost > 100_000, "{won} won, {lost} lost");
}
