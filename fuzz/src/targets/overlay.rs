//! A temporary overlay's file, whose map of blocks may be anything: its disk opened, read, written and opened
//! again.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::file::{file_of, sparse_file};
use diskstore::disk::{Format, Segments, Store, assemble_within, copy_scratch};

/// Not a multiple of a block.
const DISK_BYTES: u64 = 17 * 4096 + 512;
const BLOCK_BYTES: u64 = 4096;
const MAP_AT: u64 = 2 << 16;
const LENGTH: u64 = MAP_AT + 8;

fn read(store: &dyn Store, offset: u64, bytes: u64) -> Vec<u8> {
    let mut memory = vec![0; bytes as usize];
    let mut segments = Segments::new();
    // SAFETY: `memory` outlives every use of the segments and is not used otherwise.
    unsafe { segments.push(memory.as_mut_ptr(), memory.len()) };
    store.read(&segments, offset).expect("a file in memory");
    let origin = store.origin(offset, bytes);
    assert!((1..=bytes).contains(&origin.bytes()), "{origin:?}");
    memory
}

fn open(file: &File, read_only: bool, limit: Option<u64>) -> std::io::Result<std::sync::Arc<dyn Store>> {
    let file = file.try_clone()?;
    let base = file_of(&[0xBA; DISK_BYTES as usize]);
    assemble_within(
        vec![(file, Format::Scratch), (base, Format::Raw)],
        read_only,
        limit,
    )
}

pub fn fuzz((map, length, limit, steps): (u64, u16, Option<u16>, &[u8])) {
    let file = sparse_file(LENGTH);
    file.write_all_at(&map.to_le_bytes(), MAP_AT)
        .expect("a file in memory");
    if length % 8 == 0 {
        // Of another disk, or cut off: refused.
        file.set_len(u64::from(length) * 16).expect("a file in memory");
        assert_eq!(open(&file, false, None).is_ok(), u64::from(length) * 16 == LENGTH);
        return;
    }
    let mut model = vec![0xBA; DISK_BYTES as usize];
    for (block, bytes) in model.chunks_mut(BLOCK_BYTES as usize).enumerate() {
        bytes.fill(if map >> block & 1 == 1 { 0 } else { 0xBA });
    }
    let store = open(
        &file,
        false,
        limit.map(|pages| u64::from(pages % 32) * BLOCK_BYTES),
    )
    .expect("an overlay");
    for step in steps.chunks_exact(4).take(64) {
        let offset = u64::from(u16::from_le_bytes([step[0], step[1]])) * 512 % DISK_BYTES;
        let bytes = (512 + u64::from(step[2]) * 512).min(DISK_BYTES - offset);
        let range = offset as usize..(offset + bytes) as usize;
        let (mut content, mut segments) = (vec![step[3]; bytes as usize], Segments::new());
        // SAFETY: `content` outlives every use of the segments and is not used otherwise.
        unsafe { segments.push(content.as_mut_ptr(), content.len()) };
        match step[3] % 4 {
            0 if store.write_zeroes(offset, bytes, true).is_ok() => model[range.clone()].fill(0),
            1 | 2 if store.write(&segments, offset).is_ok() => model[range.clone()].fill(step[3]),
            _ => {}
        }
        assert!(
            read(&*store, offset, bytes) == model[range],
            "{bytes} bytes at {offset}"
        );
    }
    let copy = sparse_file(0);
    copy_scratch(&file, &copy).expect("a file in memory");
    for file in [&file, &copy] {
        let again = open(file, true, None).expect("an overlay");
        assert!(read(&*again, 0, DISK_BYTES) == model);
    }
}
