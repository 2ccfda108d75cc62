//! Every order of what a few cells do, by model checking, and long stories by chance.

mod every_order;
mod relays;

use super::{CellId, Effect, Message, Node};

fn id(number: u16) -> CellId {
    CellId { number, life: 1 }
}

#[test]
fn names_of_a_dead_cell_are_free_once_they_are_forgotten() {
    let mut node = Node::<char, u8>::new(id(0));
    node.find('a', 1, 7);
    node.find('b', 2, 8);
    node.link(id(1));
    let (mine, yours) = ([('a', 7), ('c', 9)].into(), [].into());
    node.take(id(1), Message::Hello { mine, yours }, None);
    // It has a vote for one more, and dies before it tells what came of it.
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

#[test]
fn stories_end_well() {
    let (mut won, mut lost) = (0, 0);
    for seed in 0..30_000 {
        let outcome = super::stories::tell(seed).unwrap_or_else(|what| panic!("{what}"));
        won += u64::from(outcome.won);
        lost += u64::from(outcome.lost);
    }
    // Stories in which nothing happens prove nothing.
    assert!(won > 100_000 && lost > 100_000, "{won} won, {lost} lost");
}
