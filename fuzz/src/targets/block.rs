//! The block device's queue, over a raw disk or a temporary overlay in memory.

use crate::file::sparse_file;
use crate::guest::Guest;
use crate::script::{Subject, run};
use diskstore::disk::{Format, assemble};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use shard::fuzzing::Bare;

const DISK_BYTES: u64 = 1 << 20;

struct Disk;

impl Subject for Disk {
    /// A header, and the one range that a discard takes.
    fn request(&mut self, u: &mut Unstructured) -> Result<Vec<u8>> {
        let kind = u.arbitrary::<u8>()?;
        let kind = if kind < 0xF0 {
            u32::from(kind % 16)
        } else {
            u.arbitrary()?
        };
        let sector = |u: &mut Unstructured| -> Result<u64> {
            let sector = u.arbitrary::<u16>()?;
            if sector < 0xF000 {
                Ok(u64::from(sector) % 2050)
            } else {
                u.arbitrary()
            }
        };
        let mut request = kind.to_le_bytes().to_vec();
        request.extend([0; 4]);
        request.extend(sector(u)?.to_le_bytes());
        match kind {
            11 | 13 => {
                request.extend(sector(u)?.to_le_bytes());
                request.extend((sector(u)? as u32).to_le_bytes());
                request.extend((u.arbitrary::<u8>()? as u32 & 3).to_le_bytes());
            }
            1 => request.resize(16 + 512 * usize::from(u.arbitrary::<u8>()? % 8), kind as u8),
            _ => request.truncate(if u.ratio(1, 16)? { 15 } else { 16 }),
        }
        Ok(request)
    }

    fn host(&mut self, _: &mut Unstructured) -> Result<()> {
        Ok(())
    }
}

pub fn fuzz(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(choice) = u.arbitrary::<u8>() else { return };
    let base = (sparse_file(DISK_BYTES), Format::Raw);
    let (overlaid, read_only) = (choice & 1 != 0, choice & 6 == 6);
    let layers = if overlaid {
        // Blocks at their own places, then room for the bitmap.
        vec![(sparse_file(2 * DISK_BYTES), Format::Scratch), base]
    } else {
        vec![base]
    };
    let Ok(store) = assemble(layers, read_only) else {
        return;
    };
    let mut device = Bare::block(store, read_only).expect("a block device");
    run(&mut device, &mut Guest::new(1), &mut Disk, &mut u);
}
