//! Red-black successive over-relaxation: each half of the points is computed from the other half's values, so
//! that the result does not depend on the order. Threads share the rows between their parts of the grid.

use super::{Sum, ThreadShare};
use crate::shared::{get, set};

const TURNS: usize = 20;
const FACTOR: f64 = 1.25;

pub fn run<'a>(share: &ThreadShare<'a>) -> Sum<'a> {
    let size = share.size;
    let pages = super::Kernel::Sor.pages(size as u32) - 1;
    let grid = &share.words.pages(share.first..share.first + pages)[..size * size];
    // Each thread has its own rows; the edges of the grid are fixed.
    for row in share.part(size) {
        for column in 0..size {
            let edge = row == 0 || column == 0 || row == size - 1 || column == size - 1;
            set(
                &grid[row * size + column],
                if edge { (row + 2 * column) as f64 } else { 0.0 },
            );
        }
    }
    share.begin();
    let rows = share.part(size);
    let rows = rows.start.max(1)..rows.end.min(size - 1);
    for half in 0..2 * TURNS {
        for row in rows.clone() {
            for column in (1 + (row + half) % 2..size - 1).step_by(2) {
                let at = row * size + column;
                let around =
                    get(&grid[at - 1]) + get(&grid[at + 1]) + get(&grid[at - size]) + get(&grid[at + size]);
                let old = get(&grid[at]);
                set(&grid[at], old + FACTOR * (around / 4.0 - old));
            }
        }
        share.end_phase();
    }
    Box::new(move || {
        grid.iter()
            .fold(0, |sum, word| (sum ^ get(word).to_bits()).rotate_left(1))
    })
}
