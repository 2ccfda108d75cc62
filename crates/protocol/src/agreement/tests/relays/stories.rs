//! Long random runs with trees of any shape, relays that die, return or lose links, and ticks that come too
//! early.

use super::world::{Shape, World};
use crate::CellId;
use crate::rng::Rng;

const SHAPES: [Shape; 4] = [Shape::OneByOne, Shape::Star, Shape::Chain, Shape::Halves];
const STEPS: usize = 300;

#[derive(Default)]
struct Counts {
    won: u32,
    lost: u32,
    heard: u32,
    gathered: u32,
    deaths: u32,
}

fn step(world: &mut World, rng: &mut Rng, lives: &mut [u32]) {
    let number = rng.below(lives.len());
    if world.can_start(number as u16) && rng.below(4) == 0 {
        lives[number] += 1;
        let (number, life) = (number as u16, lives[number]);
        world.start(CellId { number, life });
    }
    let cells: Vec<CellId> = world.cells.keys().copied().collect();
    let Some(at) = rng.one_of(cells.iter().copied()) else {
        return;
    };
    match rng.below(20) {
        0..3 => world.claim(at, rng.below(3) as u8),
        3..5 => {
            if let Some(key) = rng.one_of(world.owned(at).into_iter()) {
                let value = (rng.below(2) == 0).then_some(rng.below(9) as u8);
                world.change(at, key, value);
            }
        }
        5 if rng.below(4) == 0 => world.crash(at),
        5 if rng.below(4) == 0 => {
            let other = rng.one_of(cells.iter().copied()).expect("one lives");
            let links = &world.links;
            let linked = [(at, other), (other, at)]
                .iter()
                .all(|(from, to)| links.contains(*from, *to));
            // One that is cut off from another one dies in the end: at most one link is cut at a time.
            if linked && world.cut.is_empty() {
                world.cut(at, other);
            }
        }
        5 => {
            if let Some((cut, _)) = world.cut.first().copied() {
                world.crash(cut);
            }
        }
        6 => world.tick(at),
        7 => {
            if let Some((at, dead)) = rng.one_of(world.links.unknown_deaths().collect::<Vec<_>>().into_iter())
            {
                world.learn(at, dead);
            }
        }
        _ => {
            let links: Vec<_> = world.links.under_way().collect();
            if let Some((from, to)) = rng.one_of(links.into_iter()) {
                world.deliver(from, to);
            }
        }
    }
}

fn tell(seed: u64, counts: &mut Counts) {
    let mut rng = Rng::new(seed);
    let count = 3 + rng.below(5);
    let mut lives = vec![1; count];
    let mut world = World::new(count as u16, Shape::Star);
    for _ in 0..STEPS {
        world.shape = SHAPES[rng.below(SHAPES.len())];
        step(&mut world, &mut rng, &mut lives);
        assert_eq!(world.broken(), None, "seed {seed}");
    }
    if let Some((cut, _)) = world.cut.first().copied() {
        world.crash(cut);
    }
    // Until all that is to come has come.
    for _ in 0..20 {
        for (at, dead) in world.links.unknown_deaths().collect::<Vec<_>>() {
            world.learn(at, dead);
        }
        world.deliver_all();
        for at in world.cells.keys().copied().collect::<Vec<_>>() {
            world.tick(at);
        }
    }
    assert!(world.is_quiet(), "seed {seed}: it does not come to rest");
    assert_eq!(world.broken(), None, "seed {seed}");
    counts.won += world.won;
    counts.lost += world.lost;
    counts.heard += world.heard;
    counts.gathered += world.gathered;
    counts.deaths += world.deaths;
}

#[test]
fn claims_win_only_by_all_votes_though_relays_die() {
    let mut counts = Counts::default();
    for seed in 0..10_000 {
        tell(seed, &mut counts);
    }
    let Counts {
        won,
        lost,
        heard,
        gathered,
        deaths,
    } = counts;
    // Runs in which nothing happens prove nothing.
    let enough = won > 20_000 && lost > 20_000 && heard > 20_000 && gathered > 20_000 && deaths > 10_000;
    assert!(
        enough,
        "{won} won, {lost} lost, {heard} heard, {gathered} gathered, {deaths} deaths"
    );
}
