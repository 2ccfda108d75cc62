//! Matrix product C = A x B: each thread computes some rows of C. A and B are fetched from node 0.

use super::{Sum, ThreadShare};
use crate::shared::{get, set};

pub fn run<'a>(share: &ThreadShare<'a>) -> Sum<'a> {
    let size = share.size;
    let pages = (super::Kernel::Matrix.pages(size as u32) - 1) / 3;
    let matrix = |number: u32| {
        let first = share.first + number * pages;
        &share.words.pages(first..first + pages)[..size * size]
    };
    let (a, b, c) = (matrix(0), matrix(1), matrix(2));
    if share.me == 0 {
        for at in 0..size * size {
            set(&a[at], (at % 17) as f64 / 3.0);
            set(&b[at], (at % 23) as f64 / 7.0);
        }
    }
    for row in share.part(size) {
        c[row * size..][..size].iter().for_each(|word| set(word, 0.0));
    }
    share.begin();
    let mut sums = vec![0.0; size];
    for row in share.part(size) {
        sums.fill(0.0);
        for inner in 0..size {
            let factor = get(&a[row * size + inner]);
            let others = &b[inner * size..][..size];
            for (sum, other) in sums.iter_mut().zip(others) {
                *sum += factor * get(other);
            }
        }
        for (sum, word) in sums.iter().zip(&c[row * size..]) {
            set(word, *sum);
        }
    }
    share.end_phase();
    Box::new(move || {
        c.iter()
            .fold(0, |sum, word| (sum ^ get(word).to_bits()).rotate_left(1))
    })
}
