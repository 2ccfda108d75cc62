//! Files and file systems.

use std::fs::File;
use std::io::{Read, Write};

use guest_tests::pattern::{Digest, Numbers};
use nix::mount::{MsFlags, mount, umount};

use crate::Fault;

const CHUNK_BYTES: usize = 32 << 10;

/// Fills a file with numbers from a seed, and flushes it. Returns the digest.
pub fn fill(path: &str, seed: u64, bytes: usize) -> Result<String, Fault> {
    let mut file = File::create(path)?;
    let (mut numbers, mut digest) = (Numbers::new(seed), Digest::default());
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut left = bytes;
    while left > 0 {
        let part = &mut chunk[..left.min(CHUNK_BYTES)];
        numbers.fill(part);
        file.write_all(part)?;
        digest.add(part);
        left -= part.len();
    }
    file.sync_all()?;
    Ok(digest.finish())
}

/// Digest of a file.
pub fn read_digest(path: &str) -> Result<String, Fault> {
    let mut file = File::open(path)?;
    let (mut digest, mut chunk) = (Digest::default(), vec![0; CHUNK_BYTES]);
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(digest.finish()),
            bytes => digest.add(&chunk[..bytes]),
        }
    }
}

/// Mounts a device's ext4 file system.
pub fn attach(device: &str, place: &str) -> Result<String, Fault> {
    std::fs::create_dir_all(place)?;
    mount(Some(device), place, Some("ext4"), MsFlags::empty(), None::<&str>)?;
    Ok(format!("mounted {place}"))
}

/// Flushes and unmounts a file system. Reads after its next mount come from the disk.
pub fn detach(place: &str) -> Result<String, Fault> {
    umount(place)?;
    Ok(format!("unmounted {place}"))
}
