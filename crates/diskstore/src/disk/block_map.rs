//! Bitmap of the blocks in a temporary overlay's file; bits are set and never cleared.
//!
//! The bits are in this process's memory, and are written to the file before they take effect, because the
//! next shard of the VM reads them there. They are not a mapping of the file: a write to a mapping on a full
//! file system raises a signal instead of an error, which ends the VM.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use locks::IgnorePoison;

use super::scratch::data_from;

/// Words per part, allocated when its first bit is set: a sparsely written disk takes little memory.
const PART_WORDS: usize = 512;
const PART_BLOCKS: u64 = PART_WORDS as u64 * 64;
/// Words per write to the file.
const WRITE_WORDS: u64 = 8192;

type Part = [AtomicU64; PART_WORDS];

/// The bits, in memory and in the file.
pub(super) struct BlockMap {
    parts: Box<[OnceLock<Box<Part>>]>,
    blocks: u64,
    /// Offset of the bits in the file.
    offset: u64,
    /// Held while words are written to the file, so that no write omits bits that another thread has set.
    writing: Mutex<()>,
}

impl BlockMap {
    /// Size of a bitmap for this many blocks, in bytes.
    pub fn bytes(blocks: u64) -> u64 {
        blocks.div_ceil(64) * 8
    }

    /// Reads the bits of `blocks` blocks at `offset` in the file.
    pub fn read(file: &File, offset: u64, blocks: u64) -> io::Result<Self> {
        let parts = usize::try_from(blocks.div_ceil(PART_BLOCKS));
        let parts = parts.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let map = Self {
            parts: (0..parts).map(|_| OnceLock::new()).collect(),
            blocks,
            offset,
            writing: Mutex::new(()),
        };
        let (mut at, end) = (offset, offset + Self::bytes(blocks));
        let mut buffer = vec![0; PART_WORDS * 8];
        // Skips holes, which were never written.
        while let Some((start, data_end)) = data_from(file, at, end)? {
            let start = (start - offset) / 8 * 8 + offset;
            at = start;
            while at < data_end {
                let bytes = buffer.len().min((end - at) as usize);
                file.read_exact_at(&mut buffer[..bytes], at)?;
                for (index, word) in ((at - offset) / 8..).zip(buffer[..bytes].chunks_exact(8)) {
                    let word = word.try_into().map_or(0, u64::from_le_bytes);
                    if word != 0 {
                        map.or(index, word);
                    }
                }
                at += bytes as u64;
            }
        }
        Ok(map)
    }

    /// Whether a block is in the file.
    pub fn get(&self, block: u64) -> bool {
        self.word(block / 64) >> (block % 64) & 1 == 1
    }

    /// Whether block `first` is in the file, and the end (at most `end`) of the run of blocks like it.
    pub fn run(&self, first: u64, end: u64) -> (bool, u64) {
        let end = end.min(self.blocks);
        let value = first < end && self.get(first);
        let mut block = first;
        while block < end {
            if !value && self.part(block / 64).is_none() {
                block = (block / PART_BLOCKS + 1) * PART_BLOCKS;
                continue;
            }
            let word = self.word(block / 64);
            let differs = if value { !word } else { word } >> (block % 64);
            if differs != 0 {
                return (value, (block + u64::from(differs.trailing_zeros())).min(end));
            }
            block = (block / 64 + 1) * 64;
        }
        (value, end)
    }

    /// Counts the blocks from `first` to `end` that are in the file.
    pub fn count(&self, first: u64, end: u64) -> u64 {
        let (mut count, mut at) = (0, first);
        while at < end.min(self.blocks) {
            let (here, to) = self.run(at, end);
            count += if here { to - at } else { 0 };
            at = to;
        }
        count
    }

    /// Marks the blocks from `first` to `end` as in the file; returns the number of newly marked blocks.
    pub fn set(&self, file: &File, first: u64, end: u64) -> io::Result<u64> {
        let _writing = self.writing.lock().ignore_poison();
        let mut added = 0;
        let (mut at, end_word) = (first / 64, end.div_ceil(64));
        while at < end_word {
            let to = (at + WRITE_WORDS).min(end_word);
            let masks = (at..to).map(|index| mask(index, first, end));
            let bytes: Vec<u8> = (at..to)
                .zip(masks.clone())
                .flat_map(|(index, mask)| (self.word(index) | mask).to_le_bytes())
                .collect();
            file.write_all_at(&bytes, self.offset + at * 8)?;
            for (index, mask) in (at..to).zip(masks) {
                let before = self.or(index, mask);
                added += u64::from((mask & !before).count_ones());
            }
            at = to;
        }
        Ok(added)
    }

    fn part(&self, word: u64) -> Option<&Part> {
        assert!(word * 64 < self.blocks, "block outside the disk");
        Some(self.parts[word as usize / PART_WORDS].get()?)
    }

    fn word(&self, index: u64) -> u64 {
        let part = self.part(index);
        part.map_or(0, |part| {
            part[index as usize % PART_WORDS].load(Ordering::Acquire)
        })
    }

    /// Sets bits of a word; returns its old value.
    fn or(&self, index: u64, bits: u64) -> u64 {
        let empty = || Box::new([const { AtomicU64::new(0) }; PART_WORDS]);
        let part = self.parts[index as usize / PART_WORDS].get_or_init(empty);
        part[index as usize % PART_WORDS].fetch_or(bits, Ordering::AcqRel)
    }
}

/// Bits of a word for blocks from `first` to `end`.
fn mask(word: u64, first: u64, end: u64) -> u64 {
    let (start, stop) = (word * 64, (word + 1) * 64);
    let low = first.saturating_sub(start).min(64);
    let high = stop.saturating_sub(end).min(64);
    if low + high >= 64 {
        return 0;
    }
    (u64::MAX << low) & (u64::MAX >> high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_that_were_set_here_and_in_the_next_process() {
        let file = tempfile::tempfile().unwrap();
        let (offset, blocks) = (65_536, PART_BLOCKS * 3 + 100);
        file.set_len(offset + BlockMap::bytes(blocks)).unwrap();
        let map = BlockMap::read(&file, offset, blocks).unwrap();
        let runs = [
            (0, 1),
            (63, 65),
            (200, 200 + 64 * 3),
            (PART_BLOCKS * 2 - 5, PART_BLOCKS * 2 + 5),
            (blocks - 1, blocks),
        ];
        for (first, end) in runs {
            assert_eq!(map.set(&file, first, end).unwrap(), end - first);
            assert_eq!(map.set(&file, first, end).unwrap(), 0, "set already");
        }
        let total: u64 = runs.iter().map(|(first, end)| end - first).sum();
        for map in [&map, &BlockMap::read(&file, offset, blocks).unwrap()] {
            assert_eq!(map.count(0, blocks), total);
            let mut at = 0;
            for (first, end) in runs {
                if at < first {
                    assert_eq!(map.run(at, blocks), (false, first));
                }
                assert_eq!(map.run(first, blocks), (true, end));
                assert!(map.get(first) && map.get(end - 1));
                at = end;
            }
        }
    }

    #[test]
    fn no_bit_is_lost_in_the_file_when_threads_set_bits_of_one_word() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BlockMap::bytes(64)).unwrap();
        let map = BlockMap::read(&file, 0, 64).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (map, file) = (&map, &file);
                scope.spawn(move || {
                    (0..64)
                        .filter(|block| block % 4 == thread)
                        .for_each(|block| assert_eq!(map.set(file, block, block + 1).unwrap(), 1))
                });
            }
        });
        assert_eq!(BlockMap::read(&file, 0, 64).unwrap().run(0, 64), (true, 64));
    }
}
