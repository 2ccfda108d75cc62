//! Multicasts that one scenario each describes, from the first packet to the last.

use super::super::{Effect, Hop, LATE_TICKS, Packet};
use super::world::World;
use crate::CellId;

fn id(number: u16) -> CellId {
    CellId { number, life: 1 }
}

fn hop(number: u16, below: u16) -> Hop {
    Hop {
        cell: id(number),
        below,
    }
}

/// Returns the packets of cell 0 of five for a multicast along a tree: receiver, and whether relayed.
fn told(tree: &[Hop]) -> Vec<(u16, bool)> {
    let mut world = World::new(5, true);
    let effects = world.cells.get_mut(&id(0)).unwrap().send_to_all(&9, tree, false);
    let sent = effects.effects.into_iter().map(|effect| match effect {
        Effect::Send(to, packet) => (to.number, matches!(packet, Packet::Relayed { .. })),
        Effect::Deliver(..) => panic!("to itself"),
    });
    sent.collect()
}

#[test]
fn source_sends_to_first_cells_in_tree_order_then_to_the_rest() {
    assert_eq!(
        told(&[hop(3, 1), hop(1, 0), hop(2, 0)]),
        [(3, true), (2, false), (4, false)]
    );
    let one_by_one = [(4, false), (3, false), (2, false), (1, false)];
    assert_eq!(told(&[4, 3, 2, 1].map(|cell| hop(cell, 0))), one_by_one);
}

#[test]
fn malformed_tree_is_ignored() {
    let direct = [(1, false), (2, false), (3, false), (4, false)];
    assert_eq!(told(&[hop(3, 1), hop(3, 0)]), direct);
    assert_eq!(told(&[hop(1, 1), hop(7, 0)]), direct);
    // It claims more below it than there is.
    assert_eq!(told(&[hop(1, 9), hop(2, 0)]), [(1, true), (3, false), (4, false)]);
}

#[test]
fn unicast_keeps_no_copies() {
    let mut world = World::new(3, true);
    world.send_to_all(id(0), |cells| {
        cells.into_iter().map(|cell| Hop { cell, below: 0 }).collect()
    });
    world.deliver_all();
    assert!(!world.missing());
    assert!(world.cells.values().all(|cell| !cell.needs_tick()));
}

#[test]
fn hung_relay_is_bypassed_after_late_ticks_and_excluded_from_trees() {
    let mut world = World::new(3, true);
    let tree = vec![hop(1, 1), hop(2, 0)];
    world.send_to_all(id(0), |_| tree.clone());
    for _ in 0..LATE_TICKS {
        assert_eq!(world.sent[&(id(0), id(2))].1, 1, "only the hello");
        world.tick(id(0));
        world.deliver(id(0), id(2));
    }
    assert_eq!(world.sent[&(id(0), id(2))].1, 2);
    assert_eq!(world.cells[&id(0)].fit().count(), 0);
    world.send_to_all(id(0), |_| tree.clone());
    world.deliver(id(0), id(2));
    assert_eq!(world.sent[&(id(0), id(2))].1, 3);
    // The relay is awake again.
    world.deliver_all();
    world.send(id(1), id(0));
    world.deliver_all();
    assert_eq!(world.cells[&id(0)].fit().collect::<Vec<_>>(), [id(1)]);
    assert!(!world.missing() && world.broken.is_none());
}

#[test]
fn pending_acknowledgements_are_sent_in_one_packet() {
    let mut world = World::new(3, true);
    for _ in 0..5 {
        world.send_to_all(id(0), |_| vec![hop(1, 1), hop(2, 0)]);
    }
    world.deliver_all();
    world.tick(id(2));
    let packets: Vec<_> = world.links.packets().collect();
    assert!(matches!(packets[..], [Packet::Heard { .. }]), "{packets:?}");
    world.deliver_all();
    assert!(world.cells.values().all(|cell| !cell.needs_tick()));
}

/// Two cells that call each other at the same time may have a link, and then another one.
#[test]
fn messages_of_an_earlier_link_are_not_delivered_on_a_new_one() {
    let mut world = World::new(3, true);
    world.send_to_all(id(0), |_| vec![hop(1, 1), hop(2, 0)]);
    world.send_to_all(id(0), |_| vec![hop(1, 1), hop(2, 0)]);
    for (at, to) in [(0, 2), (2, 0)].map(|(at, to)| (id(at), id(to))) {
        world.links.clear(at, to);
        world.act(at, |cell| cell.dead(to));
        world.links.clear(at, to);
        world.link(at, to);
    }
    // The relay forwards the message of the first link.
    world.deliver(id(0), id(1));
    world.deliver(id(1), id(2));
    world.deliver(id(0), id(2));
    world.deliver(id(0), id(1));
    world.deliver_all();
    assert!(!world.missing() && world.broken.is_none(), "{:?}", world.broken);
    assert!(world.cells[&id(2)].peers[&id(0)].early.is_empty());
}

#[test]
fn relay_reports_a_lost_link_at_once() {
    let mut world = World::new(3, true);
    world.cut(id(1), id(2), true);
    world.send_to_all(id(0), |_| vec![hop(1, 1), hop(2, 0)]);
    world.deliver_all();
    assert!(!world.missing() && world.broken.is_none());
}

/// While a program is upgraded, cells of the release before are among the others.
#[test]
fn relays_gather_nothing_while_a_cell_lacks_support() {
    for knows in [true, false] {
        let mut world = World::new(5, true);
        let source = world.cells.get_mut(&id(0)).unwrap();
        source.peers.get_mut(&id(4)).unwrap().gathers = knows;
        let told = source.send_to_all(&9, &[hop(1, 2), hop(2, 0), hop(3, 0)], true);
        assert_eq!(!told.gathered.is_empty(), knows);
        let asks = told
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Send(_, Packet::Relayed { gathers: true, .. })));
        assert_eq!(asks, knows);
    }
}

/// The source sends to cell 1, and to cells 2 and 3 below it. Cell 2 replies 8 at once, the others 7.
#[test]
fn relay_batches_deferrable_replies_and_forwards_urgent_ones() {
    let mut world = World::new(4, true);
    let mut cell = |number: u16| world.cells.remove(&id(number)).unwrap();
    let (mut source, mut relay) = (cell(0), cell(1));
    let mut told = source
        .send_to_all(&9, &[hop(1, 2), hop(2, 0), hop(3, 0)], true)
        .effects;
    let Some(Effect::Send(_, packet)) = told.pop() else {
        panic!("{told:?}")
    };
    let (mut own, mut up) = (None, Vec::new());
    for effect in relay.take(id(0), packet) {
        let (to, packet) = match effect {
            Effect::Deliver(_, _, path) => {
                own = path;
                continue;
            }
            Effect::Send(to, packet) => (to, packet),
        };
        let mut below = cell(to.number);
        let [Effect::Deliver(_, 9, path)] = below.take(id(1), packet)[..] else {
            panic!("{to} has no message");
        };
        let at_once = to == id(2);
        for reply in below.reply(id(0), path, at_once, if at_once { 8 } else { 7 }) {
            let Effect::Send(_, reply) = reply else {
                panic!("{reply:?}")
            };
            up.extend(relay.take(to, reply));
        }
    }
    up.extend(relay.reply(id(0), own, false, 7));
    let sent = up.iter().map(|effect| match effect {
        Effect::Send(to, Packet::Replies { replies, last, .. }) if *to == id(0) => {
            let cells = replies[0].cells.iter().map(|(cell, _)| cell.number);
            (replies[0].body, cells.collect::<Vec<_>>(), *last)
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(
        sent.collect::<Vec<_>>(),
        [(8, vec![2], false), (7, vec![3, 1], true)]
    );
    assert!(relay.gatherings.is_empty());
}
