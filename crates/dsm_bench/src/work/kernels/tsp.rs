//! Shortest tour, by branch and bound: threads take beginnings of tours from one counter, and share the best
//! length.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{Sum, ThreadShare};

/// Largest number of towns: more would take hours.
const TOWNS_MAX: usize = 16;

pub fn run<'a>(share: &ThreadShare<'a>) -> Sum<'a> {
    let words = share.words.pages(share.first..share.first + 1);
    let (next, best) = (&words[0], &words[64]);
    let towns = share.size.clamp(4, TOWNS_MAX);
    if share.me == 0 {
        next.store(0, SeqCst);
        best.store(u64::from(u32::MAX), SeqCst);
    }
    let mut distance = [[0_u64; TOWNS_MAX]; TOWNS_MAX];
    for (from, row) in distance.iter_mut().enumerate() {
        for (to, distance) in row.iter_mut().enumerate() {
            let (low, high) = (from.min(to) as u64, from.max(to) as u64);
            *distance = 10 + (low * 7919 + high * 104_729) % 91;
        }
    }
    share.begin();
    let beginnings = ((towns - 1) * (towns - 2)) as u64;
    loop {
        let number = next.fetch_add(1, SeqCst);
        if number >= beginnings {
            break;
        }
        // The second and the third town of the tour, which begins with town 0.
        let second = 1 + number as usize / (towns - 2);
        let mut third = 1 + number as usize % (towns - 2);
        third += usize::from(third >= second);
        let length = distance[0][second] + distance[second][third];
        let visited = 1 | 1 << second | 1 << third;
        visit(towns, &distance, third, visited, length, &mut |length| {
            if length < best.load(Relaxed) {
                best.fetch_min(length, SeqCst);
            }
            best.load(Relaxed)
        });
    }
    share.end_phase();
    Box::new(move || best.load(SeqCst))
}

/// Visits all continuations from a town. `known` records each whole tour's length and returns the best one.
fn visit(
    towns: usize,
    distance: &[[u64; TOWNS_MAX]; TOWNS_MAX],
    here: usize,
    visited: u32,
    length: u64,
    known: &mut impl FnMut(u64) -> u64,
) {
    if visited == (1 << towns) - 1 {
        known(length + distance[here][0]);
        return;
    }
    let best = known(u64::MAX);
    for (to, &step) in distance[here][..towns].iter().enumerate() {
        if visited & 1 << to == 0 && length + step < best {
            visit(towns, distance, to, visited | 1 << to, length + step, known);
        }
    }
}
