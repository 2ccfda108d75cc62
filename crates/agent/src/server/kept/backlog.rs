//! Output of a kept program that its client has not received: bounded, the oldest bytes are dropped first.
//! Pure.

use std::collections::VecDeque;

use crate::protocol::Kind;

/// Greatest number of bytes that are kept.
pub const BACKLOG_BYTES_MAX: usize = 64 << 10;

/// Bytes of one output of a program, in the order of their arrival.
pub type Chunk = (Kind, Vec<u8>);

/// The output, in the order of its arrival.
#[derive(Debug, Default)]
pub struct Backlog {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    dropped: u64,
}

impl Backlog {
    /// Adds output at the end.
    pub fn push(&mut self, chunk: Chunk) {
        self.bytes += chunk.1.len();
        self.chunks.push_back(chunk);
        self.trim();
    }

    /// Puts the chunk that was taken last back at the front.
    pub fn put_back(&mut self, chunk: Chunk) {
        self.bytes += chunk.1.len();
        self.chunks.push_front(chunk);
        self.trim();
    }

    /// Takes the oldest chunk.
    pub fn take(&mut self) -> Option<Chunk> {
        let chunk = self.chunks.pop_front()?;
        self.bytes -= chunk.1.len();
        Some(chunk)
    }

    /// Returns the number of bytes that were dropped since the last call.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    fn trim(&mut self) {
        while self.bytes > BACKLOG_BYTES_MAX {
            let excess = self.bytes - BACKLOG_BYTES_MAX;
            let Some((_, oldest)) = self.chunks.front_mut() else {
                return;
            };
            let cut = excess.min(oldest.len());
            oldest.drain(..cut);
            if oldest.is_empty() {
                self.chunks.pop_front();
            }
            self.bytes -= cut;
            self.dropped += cut as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(backlog: &mut Backlog) -> Vec<Chunk> {
        std::iter::from_fn(|| backlog.take()).collect()
    }

    #[test]
    fn output_comes_in_its_order_and_a_chunk_that_was_not_sent_comes_first() {
        let mut backlog = Backlog::default();
        backlog.push((Kind::Stdout, b"one".to_vec()));
        backlog.push((Kind::Stderr, b"two".to_vec()));
        let first = backlog.take().unwrap();
        backlog.push((Kind::Stdout, b"three".to_vec()));
        backlog.put_back(first);
        let texts: Vec<_> = all(&mut backlog).into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(texts, [&b"one"[..], b"two", b"three"]);
        assert!(backlog.take().is_none() && backlog.bytes == 0);
        assert_eq!(backlog.take_dropped(), 0);
    }

    #[test]
    fn oldest_bytes_are_dropped_beyond_the_limit_and_counted_once() {
        let mut backlog = Backlog::default();
        backlog.push((Kind::Stderr, vec![1; 100]));
        backlog.push((Kind::Stdout, vec![2; BACKLOG_BYTES_MAX - 50]));
        assert_eq!(backlog.take_dropped(), 50);
        assert_eq!(backlog.take_dropped(), 0);
        backlog.push((Kind::Stdout, vec![3; 60]));
        assert_eq!(backlog.take_dropped(), 60);
        let left = all(&mut backlog);
        let lengths: Vec<usize> = left.iter().map(|(_, bytes)| bytes.len()).collect();
        assert_eq!(lengths, [BACKLOG_BYTES_MAX - 60, 60]);
        assert!(left.iter().all(|(kind, _)| *kind == Kind::Stdout));
        // One chunk above the limit keeps its end.
        backlog.push((Kind::Stdout, [vec![4; 10], vec![5; BACKLOG_BYTES_MAX]].concat()));
        assert_eq!(all(&mut backlog), [(Kind::Stdout, vec![5; BACKLOG_BYTES_MAX])]);
        assert_eq!(backlog.take_dropped(), 10);
    }
}
