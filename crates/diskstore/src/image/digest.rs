//! Digests of an image's files.
//!
//! Kernels and initramfses have their plain SHA-256. A disk is mostly holes: its digest is the SHA-256 over
//! the number (8 bytes, little endian) and the bytes of each 64 KiB block that is not all zero, in order, and
//! finally the disk's length. Holes are skipped without being read, and a copy without holes has the same
//! digest.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

const BLOCK_BYTES: u64 = 64 << 10;

/// Returns `sha256:…` of a whole file.
pub fn plain(file: &mut File) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            length => hash.update(&buffer[..length]),
        }
    }
    Ok(format!("sha256:{}", HEXLOWER.encode(&hash.finalize())))
}

/// Returns `sha256-nonzero-64k:…` of a disk.
pub fn sparse(file: &File) -> io::Result<String> {
    let length = file.metadata()?.len();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BLOCK_BYTES as usize];
    let mut block = 0;
    while let Some(data) = next_data(file, block * BLOCK_BYTES)? {
        block = data / BLOCK_BYTES;
        let start = block * BLOCK_BYTES;
        if start >= length {
            break;
        }
        let block_bytes = (length - start).min(BLOCK_BYTES) as usize;
        let bytes = &mut buffer[..block_bytes];
        file.read_exact_at(bytes, start)?;
        if bytes.iter().any(|&byte| byte != 0) {
            hash.update(block.to_le_bytes());
            hash.update(&*bytes);
        }
        block += 1;
    }
    hash.update(length.to_le_bytes());
    Ok(format!(
        "sha256-nonzero-64k:{}",
        HEXLOWER.encode(&hash.finalize())
    ))
}

/// Returns the next offset at or after `from` that has data; `None` if there is none.
fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    // SAFETY: lseek touches no memory. The file offset is not used: reads give their own.
    let offset = unsafe { libc::lseek64(file.as_raw_fd(), from as i64, libc::SEEK_DATA) };
    if offset >= 0 {
        return Ok(Some(offset as u64));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENXIO) => Ok(None),
        // A file system without holes: all bytes are data.
        Some(libc::EINVAL) => Ok(Some(from)),
        _ => Err(error),
    }
}
