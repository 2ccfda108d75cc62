//! A qcow2 file that a user names: its header, its tables, and reads and writes by them.

use crate::file::file_of;
use diskstore::disk::{Format, SECTOR_BYTES, Segments, Store, assemble};

const PIECE_BYTES: u64 = 4096;

fn exercise(store: &dyn Store, writable: bool) {
    let size = store.size();
    let mut memory = vec![0_u8; PIECE_BYTES as usize];
    let sector = |at: u64| at / SECTOR_BYTES * SECTOR_BYTES;
    for offset in [
        0,
        sector(size / 3),
        sector(size / 2),
        sector(size.saturating_sub(PIECE_BYTES)),
    ] {
        let bytes = PIECE_BYTES.min(size.saturating_sub(offset));
        let mut segments = Segments::new();
        // SAFETY: `memory` outlives every use of the segments and is not used otherwise.
        unsafe { segments.push(memory.as_mut_ptr(), bytes as usize) };
        let _ = store.read(&segments, offset);
        if bytes > 0 {
            let origin = store.origin(offset, bytes);
            assert!((1..=bytes).contains(&origin.bytes()), "{origin:?}");
        }
        if writable {
            let _ = store.write(&segments, offset);
            let _ = store.discard(offset, bytes);
            let _ = store.write_zeroes(offset, bytes, true);
        }
    }
    let _ = store.write_back();
}

pub fn fuzz(bytes: &[u8]) {
    for read_only in [true, false] {
        if let Ok(store) = assemble(vec![(file_of(bytes), Format::Qcow2)], read_only) {
            exercise(&*store, !read_only);
        }
    }
}
