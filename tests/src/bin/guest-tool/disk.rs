//! Patterns on disks, past the guest's page cache.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use guest_tests::pattern::{Digest, DiskWrites};

use crate::Fault;

/// A buffer that direct I/O accepts: its start is a multiple of 4 KiB.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let bytes = vec![0; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Self { bytes, start }
    }

    fn part(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + len]
    }
}

fn open(device: &str) -> Result<(File, u64), Fault> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    let mut file = options.open(device)?;
    let bytes = file.seek(SeekFrom::End(0))?;
    Ok((file, bytes))
}

/// Makes random writes, then a flush.
pub fn write(device: &str, seed: u64, count: u32) -> Result<String, Fault> {
    let (file, disk_bytes) = open(device)?;
    let mut buffer = Aligned::new(64 << 10);
    for write in DiskWrites::new(seed, count, disk_bytes) {
        let part = buffer.part(write.bytes.len());
        part.copy_from_slice(&write.bytes);
        file.write_all_at(part, write.offset)?;
    }
    file.sync_all()?;
    Ok(format!("wrote {count}"))
}

/// Digest of the whole disk.
pub fn read_digest(device: &str) -> Result<String, Fault> {
    let mut options = OpenOptions::new();
    let mut file = options.read(true).custom_flags(libc::O_DIRECT).open(device)?;
    let disk_bytes = file.seek(SeekFrom::End(0))?;
    let mut buffer = Aligned::new(1 << 20);
    let mut digest = Digest::default();
    let mut offset = 0;
    while offset < disk_bytes {
        let part = buffer.part((disk_bytes - offset).min(1 << 20) as usize);
        file.read_exact_at(part, offset)?;
        digest.add(part);
        offset += part.len() as u64;
    }
    Ok(digest.finish())
}

/// Writes block 0, 1, ... with its own number and a flush after each, and prints each number when its flush
/// is done, until `count` or until the power is cut.
pub fn mark(device: &str, count: u64) -> Result<String, Fault> {
    let (file, _) = open(device)?;
    let mut buffer = Aligned::new(4096);
    for number in 0..count {
        let part = buffer.part(4096);
        for word in part.chunks_exact_mut(8) {
            word.copy_from_slice(&(number + 1).to_le_bytes());
        }
        file.write_all_at(part, number * 4096)?;
        file.sync_all()?;
        println!("flushed {number}");
    }
    Ok(format!("flushed all {count}"))
}

/// Number of blocks, from the first on, that hold what [`mark`] writes.
pub fn marks(device: &str) -> Result<String, Fault> {
    let (file, disk_bytes) = open(device)?;
    let mut buffer = Aligned::new(4096);
    let mut number = 0u64;
    while number < disk_bytes / 4096 {
        let part = buffer.part(4096);
        file.read_exact_at(part, number * 4096)?;
        if part
            .chunks_exact(8)
            .any(|word| word != (number + 1).to_le_bytes())
        {
            break;
        }
        number += 1;
    }
    Ok(number.to_string())
}
