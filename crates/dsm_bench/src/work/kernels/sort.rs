//! Integer sort as in NAS IS: each thread counts its keys and adds its counts to one shared table.

use std::sync::atomic::Ordering::Relaxed;

use super::{Sum, ThreadShare};
use crate::shared::PAGE_WORDS;

const KEYS: usize = 1 << 14;
/// Pages of the table and the lock.
pub const PAGES: u32 = (KEYS / PAGE_WORDS) as u32 + 1;
const TURNS: usize = 10;

pub fn run<'a>(share: &ThreadShare<'a>) -> Sum<'a> {
    let words = share.words.pages(share.first..share.first + PAGES);
    let (lock, table) = (&words[0], &words[PAGE_WORDS..]);
    let keys: Vec<usize> = share.part(share.size * 1000).map(key).collect();
    let mut counts = vec![0_u64; KEYS];
    if share.me == 0 {
        table.iter().for_each(|word| word.store(0, Relaxed));
    }
    share.begin();
    for _ in 0..TURNS {
        counts.fill(0);
        keys.iter().for_each(|&key| counts[key] += 1);
        share.in_turn(lock, || {
            for (count, word) in counts.iter().zip(table) {
                word.store(word.load(Relaxed) + count, Relaxed);
            }
        });
        share.end_phase();
        // Each thread ranks its own keys by the whole table.
        let mut before = 0;
        for (rank, word) in counts.iter_mut().zip(table) {
            *rank = before;
            before += word.load(Relaxed);
        }
        share.end_phase();
    }
    Box::new(move || {
        table
            .iter()
            .fold(0, |sum: u64, word| (sum ^ word.load(Relaxed)).rotate_left(1))
    })
}

/// Returns the key with that number.
fn key(number: usize) -> usize {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) as usize % KEYS
}
