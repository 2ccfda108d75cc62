//! Tables of a qcow2 file, read one at a time.
//!
//! ```text
//!   header -> L1 table -> L2 tables -> clusters of data
//!          -> refcount table -> refcount blocks: how often each cluster is used
//!          -> snapshot table -> an L1 table for each internal snapshot
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::disk::header::{Header, HeaderError};

/// Offset bits of an entry.
const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
/// Maximum that qemu makes.
const SNAPSHOTS_MAX: u32 = 65_536;
/// Largest L1 table of a snapshot that is read.
const L1_BYTES_MAX: u64 = 32 << 20;
const AUTOCLEAR_BITMAPS: u64 = 1;

/// A range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub offset: u64,
    pub bytes: u64,
}

/// An entry of an L1 or L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Nothing,
    /// A table or a cluster, and whether the entry has the flag that nothing else uses it.
    At {
        offset: u64,
        alone: bool,
    },
    Compressed(Place),
}

/// A fault of the tables. The text follows the file's name.
#[derive(Debug, thiserror::Error)]
pub(super) enum MapError {
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    #[error("has refcounts of 2^{0} bits; it is damaged, so restore it from a copy")]
    RefcountBits(u32),
    #[error("has an L1 table that is too short for its size; it is damaged, so restore it from a copy")]
    ShortL1,
    #[error("says that it holds {0} snapshots; it is damaged, so restore it from a copy")]
    SnapshotCount(u32),
    #[error("has a damaged snapshot table; restore it from a copy")]
    SnapshotTable,
}

/// The tables of a file.
pub(super) struct Map<'a> {
    file: &'a File,
    pub length: u64,
    pub cluster_bytes: u64,
    version: u32,
    pub l1: Place,
    pub refcount_table: Place,
    refcount_bits: u32,
    pub snapshot_table: Place,
    /// L1 tables of internal snapshots.
    pub snapshots: Vec<Place>,
    /// Whether the file has bitmaps, whose clusters are not found here.
    pub bitmaps: bool,
}

impl<'a> Map<'a> {
    /// Reads the header; an error describes its fault.
    pub fn read(file: &'a File) -> Result<Self, MapError> {
        let header = Header::read(file, false)?;
        let mut bytes = [0; 104];
        let version = {
            file.read_exact_at(&mut bytes[..72], 0)
                .map_err(MapError::Unreadable)?;
            big_u32(&bytes, 4)
        };
        if version >= 3 {
            file.read_exact_at(&mut bytes, 0).map_err(MapError::Unreadable)?;
        }
        let order = if version >= 3 { big_u32(&bytes, 96) } else { 4 };
        if order > 6 {
            return Err(MapError::RefcountBits(order));
        }
        let mut map = Self {
            file,
            length: file.metadata().map_err(MapError::Unreadable)?.len(),
            cluster_bytes: header.cluster_bytes,
            version,
            l1: Place {
                offset: big_u64(&bytes, 40),
                bytes: u64::from(big_u32(&bytes, 36)) * 8,
            },
            refcount_table: Place {
                offset: big_u64(&bytes, 48),
                bytes: u64::from(big_u32(&bytes, 56)) * header.cluster_bytes,
            },
            refcount_bits: 1 << order,
            snapshot_table: Place {
                offset: big_u64(&bytes, 64),
                bytes: 0,
            },
            snapshots: Vec::new(),
            bitmaps: version >= 3 && big_u64(&bytes, 88) & AUTOCLEAR_BITMAPS != 0,
        };
        map.read_snapshots(big_u32(&bytes, 60))?;
        let l1_needed = header
            .size
            .div_ceil(header.cluster_bytes * (header.cluster_bytes / 8))
            * 8;
        if map.l1.bytes < l1_needed {
            return Err(MapError::ShortL1);
        }
        Ok(map)
    }

    fn read_snapshots(&mut self, count: u32) -> Result<(), MapError> {
        if count > SNAPSHOTS_MAX {
            return Err(MapError::SnapshotCount(count));
        }
        let mut at = self.snapshot_table.offset;
        for _ in 0..count {
            let mut fixed = [0; 40];
            self.file
                .read_exact_at(&mut fixed, at)
                .map_err(|_| MapError::SnapshotTable)?;
            let l1 = Place {
                offset: big_u64(&fixed, 0),
                bytes: u64::from(big_u32(&fixed, 8)) * 8,
            };
            if l1.bytes > L1_BYTES_MAX {
                return Err(MapError::SnapshotTable);
            }
            self.snapshots.push(l1);
            let (names, extra) = (big_u32(&fixed, 12), big_u32(&fixed, 36));
            let variable = u64::from(names >> 16) + u64::from(names & 0xFFFF) + u64::from(extra);
            at = at.saturating_add((40 + variable).next_multiple_of(8));
        }
        self.snapshot_table.bytes = at - self.snapshot_table.offset;
        Ok(())
    }

    /// Returns the entries of a table; bytes after the end of the file are zeroes.
    pub fn table(&self, place: Place) -> io::Result<Vec<u64>> {
        let bytes = self.bytes(place)?;
        Ok(bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|word| u64::from_be_bytes(*word))
            .collect())
    }

    /// Returns the refcounts in the refcount block at `offset`.
    pub fn refcounts(&self, offset: u64) -> io::Result<Vec<u64>> {
        let bytes = self.bytes(Place {
            offset,
            bytes: self.cluster_bytes,
        })?;
        Ok(match self.refcount_bits {
            bits @ 1..8 => {
                let each = 8 / bits;
                let mask = (1_u64 << bits) - 1;
                let counts = |byte: &u8| {
                    let byte = u64::from(*byte);
                    (0..each).map(move |index| byte >> (index * bits) & mask)
                };
                bytes.iter().flat_map(counts).collect()
            }
            bits => bytes
                .chunks_exact(bits as usize / 8)
                .map(|count| count.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
                .collect(),
        })
    }

    /// Number of clusters that a refcount block counts.
    pub fn counts_of_a_block(&self) -> usize {
        (self.cluster_bytes * 8 / u64::from(self.refcount_bits)) as usize
    }

    /// Decodes a word of an L1 table.
    pub fn l1_entry(&self, word: u64) -> Entry {
        match word & OFFSET {
            0 => Entry::Nothing,
            offset => Entry::At {
                offset,
                alone: word & COPIED != 0,
            },
        }
    }

    /// Decodes a word of an L2 table.
    pub fn l2_entry(&self, word: u64) -> Entry {
        if word & COMPRESSED == 0 {
            // Only the offset: a zero cluster may keep its location. Version 2 has no zero clusters.
            let zero = if self.version >= 3 { ZERO } else { 0 };
            return self.l1_entry(word & !zero);
        }
        let offset_bits = 62 - (self.cluster_bytes.trailing_zeros() - 8);
        let offset = word & ((1 << offset_bits) - 1);
        let sectors = ((word & (COMPRESSED - 1)) >> offset_bits) + 1;
        Entry::Compressed(Place {
            offset,
            bytes: sectors * 512 - offset % 512,
        })
    }

    fn bytes(&self, place: Place) -> io::Result<Vec<u8>> {
        let length = usize::try_from(place.bytes).map_err(io::Error::other)?;
        let mut bytes = vec![0; length];
        let there = self.length.saturating_sub(place.offset).min(place.bytes) as usize;
        self.file.read_exact_at(&mut bytes[..there], place.offset)?;
        Ok(bytes)
    }
}

fn big_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn big_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from(big_u32(bytes, at)) << 32 | u64::from(big_u32(bytes, at + 4))
}
