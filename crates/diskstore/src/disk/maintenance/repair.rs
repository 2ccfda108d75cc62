//! Counts clusters that a killed process had begun to use in a qcow2 file and not yet counted.
//!
//! A process that dies between naming a new table and counting its cluster leaves a used cluster with a
//! refcount of zero. The next process would allocate it again and overwrite its content. Only refcounts of
//! zero are raised; counted but unused clusters only cost space.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::qcow2_map::{Entry, Map, Place};

/// Maximum entries read: more than a guest can make, but another program might.
const ENTRIES_MAX: u64 = 1 << 24;
/// Largest table that is read, in bytes: that of a disk of 512 TiB.
const TABLE_BYTES_MAX: u64 = 8 << 20;
/// The only refcount width that is repaired here, and the width in new files.
const COUNT_BYTES: u64 = 2;

/// Repairs the refcounts of a file that no other process uses; returns the number of repaired clusters. A
/// file with anything unusual (internal snapshots, bitmaps, another refcount width, compressed clusters) is
/// left to `check`.
pub fn repair(file: &File) -> io::Result<usize> {
    let Ok(map) = Map::read(file) else {
        return Ok(0);
    };
    if !map.snapshots.is_empty()
        || map.bitmaps
        || map.counts_of_a_block() as u64 != map.cluster_bytes / COUNT_BYTES
    {
        return Ok(0);
    }
    if map.l1.bytes.max(map.refcount_table.bytes) > TABLE_BYTES_MAX {
        return Ok(0);
    }
    let Some(used) = used(&map)? else {
        return Ok(0);
    };
    let blocks = map.table(map.refcount_table)?;
    let (mut repaired, mut loaded) = (0, (u64::MAX, Vec::new()));
    for cluster in used {
        let (number, index) = (
            cluster / map.counts_of_a_block() as u64,
            cluster % map.counts_of_a_block() as u64,
        );
        let block = blocks.get(number as usize).map_or(0, |word| word & !0x1FF);
        if block == 0 || block.saturating_add(map.cluster_bytes) > map.length {
            // No block for its count yet, or an invalid one; `check` reports it.
            continue;
        }
        if loaded.0 != block {
            loaded = (block, map.refcounts(block)?);
        }
        if loaded.1.get(index as usize) == Some(&0) {
            file.write_all_at(&1_u16.to_be_bytes(), block + index * COUNT_BYTES)?;
            repaired += 1;
        }
    }
    Ok(repaired)
}

/// Returns the clusters of L2 tables and data; `None` for a file that is not repaired here.
fn used(map: &Map<'_>) -> io::Result<Option<BTreeSet<u64>>> {
    let inside = |offset: u64| offset.is_multiple_of(map.cluster_bytes) && offset < map.length;
    let (mut used, mut entries) = (BTreeSet::new(), 0);
    for word in map.table(map.l1)? {
        let Entry::At { offset, .. } = map.l1_entry(word) else {
            continue;
        };
        entries += map.cluster_bytes / 8;
        if !inside(offset) || entries > ENTRIES_MAX || !used.insert(offset / map.cluster_bytes) {
            return Ok(None);
        }
        let place = Place {
            offset,
            bytes: map.cluster_bytes,
        };
        for word in map.table(place)? {
            match map.l2_entry(word) {
                Entry::Nothing => {}
                Entry::At { offset, .. } if inside(offset) => {
                    used.insert(offset / map.cluster_bytes);
                }
                _ => return Ok(None),
            }
        }
    }
    Ok(Some(used))
}
