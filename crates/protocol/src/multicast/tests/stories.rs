//! Long random runs: up to eight cells, unicasts and multicasts along random trees, lost links, deaths.

use super::super::{Hop, WINDOW};
use super::world::World;
use crate::CellId;
use crate::rng::Rng;

fn tree(cells: &mut Vec<CellId>, rng: &mut Rng) -> Vec<Hop> {
    // Some are left out.
    if rng.below(8) == 0 {
        cells.pop();
    }
    let mut hops = Vec::new();
    let mut left: Vec<CellId> = Vec::new();
    while !cells.is_empty() {
        left.push(cells.remove(rng.below(cells.len())));
    }
    let one_by_one = rng.below(4) == 0;
    let mut ends = vec![left.len()];
    for (place, cell) in left.iter().enumerate() {
        while ends.last() == Some(&place) {
            ends.pop();
        }
        let end = *ends.last().unwrap_or(&left.len());
        let below = if one_by_one { 0 } else { rng.below(end - place) };
        ends.push(place + 1 + below);
        hops.push(Hop {
            cell: *cell,
            below: u16::try_from(below).unwrap(),
        });
    }
    hops
}

#[derive(Default)]
struct Counts {
    relayed: u32,
    again: u32,
}

fn run(seed: u64, counts: &mut Counts) {
    let mut rng = Rng::new(seed);
    let count = 2 + rng.below(7);
    let mut world = World::new(u16::try_from(count).unwrap(), rng.below(2) == 0);
    let told = rng.below(2) == 0;
    let calm = rng.below(3) == 0;
    // Occasionally much is sent before anything comes.
    let pace = if rng.below(8) == 0 { 2 } else { 12 };
    for _ in 0..200 {
        let cells: Vec<CellId> = world.cells.keys().copied().collect();
        let at = rng.one_of(cells.iter().copied()).expect("one lives");
        let busy = rng.below(20);
        if busy < 2 && !calm {
            if busy == 0 && cells.len() > 1 {
                world.crash(at);
            } else if let Some(to) = rng.one_of(world.peers(at).into_iter())
                && world.cells.contains_key(&to)
                && !world.cut.contains_key(&(at, to))
            {
                world.cut(at, to, told);
            }
        } else if busy == 2 && !calm {
            let number = u16::try_from(rng.below(count)).unwrap();
            let is_it = |cell: &CellId| cell.number == number;
            if !world.cells.keys().any(is_it) && world.links.knows_deaths_of(number) {
                let life = world.lives(number) + 1;
                world.start(CellId { number, life });
            }
        } else if busy.is_multiple_of(5) {
            world.tick(at);
        } else if busy % 5 < 3 {
            world.send_to_all(at, |mut cells| {
                let tree = tree(&mut cells, &mut rng);
                counts.relayed += u32::from(tree.iter().any(|hop| hop.below > 0));
                tree
            });
        } else if let Some(to) = rng.one_of(world.peers(at).into_iter()) {
            world.send(at, to);
        }
        for _ in 0..rng.below(pace) {
            let links: Vec<_> = world.under_way().collect();
            if let Some((from, to)) = rng.one_of(links.into_iter()) {
                world.deliver(from, to);
            }
            let unlinked: Vec<_> = world.unlinked.iter().copied().collect();
            if let Some((at, to)) = rng.one_of(unlinked.into_iter()).filter(|_| rng.below(4) == 0) {
                world.link(at, to);
            }
            let unknown: Vec<_> = world.links.unknown_deaths().collect();
            if let Some((at, dead)) = rng.one_of(unknown.into_iter()).filter(|_| rng.below(4) == 0) {
                world.learn(at, dead);
            }
        }
        assert_eq!(world.broken, None, "seed {seed}");
    }
    // All that is to come.
    for (at, dead) in world.links.unknown_deaths().collect::<Vec<_>>() {
        world.learn(at, dead);
    }
    for (at, to) in world.unlinked.clone() {
        world.link(at, to);
    }
    world.deliver_all();
    let mut ticks = 0;
    while world.cells.values().any(super::super::Multicast::needs_tick) {
        let cells: Vec<CellId> = world.cells.keys().copied().collect();
        for at in cells {
            world.tick(at);
        }
        counts.again += u32::from(ticks > 1 && world.under_way().next().is_some());
        world.deliver_all();
        ticks += 1;
        assert!(ticks <= 5, "seed {seed}: it does not come to rest");
    }
    assert_eq!(world.broken, None, "seed {seed}");
    assert!(!world.missing(), "seed {seed}: something is missing");
    for (at, cell) in &world.cells {
        for (from, peer) in &cell.peers {
            let linked = world.cells.contains_key(from) && !world.cut.contains_key(&(*from, *at));
            assert!(
                peer.unacked.is_empty() && (peer.early.is_empty() || !linked),
                "seed {seed}: {at} keeps something of {from}"
            );
        }
    }
}

#[test]
fn every_random_run_delivers_all_messages_once_in_order() {
    let mut counts = Counts::default();
    for seed in 0..10_000 {
        run(seed, &mut counts);
    }
    assert!(
        counts.relayed > 100_000 && counts.again > 150,
        "{} by relays, {} stories with late ones",
        counts.relayed,
        counts.again
    );
}

/// A hung relay delays the messages through it, and no cell buffers more than the window.
#[test]
fn hung_relay_bounds_buffering_to_the_window() {
    let mut world = World::new(3, true);
    let [source, relay, below] = [0, 1, 2].map(|number| CellId { number, life: 1 });
    let tree = |_: Vec<CellId>| {
        vec![
            Hop {
                cell: relay,
                below: 1,
            },
            Hop {
                cell: below,
                below: 0,
            },
        ]
    };
    for _ in 0..10 * WINDOW {
        world.send_to_all(source, tree);
        world.deliver(source, below);
        assert_eq!(world.broken, None);
    }
    let (sent, got) = &world.sent[&(source, below)];
    assert!(sent.len() - got <= WINDOW as usize, "{} of {}", got, sent.len());
    world.deliver_all();
    assert!(!world.missing());
}
