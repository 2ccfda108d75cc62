//! A file in persistent memory as the buffer of another device.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use guest_tests::pattern::Digest;

use crate::Fault;

/// Maps the first `mib` MiB of `file`, lets `device` write its own first bytes there, changes them, and lets
/// the device read them from there, all without the page cache. Returns the digest of the device's first
/// contents.
pub fn through_a_device(file: &str, device: &str, mib: usize) -> Result<String, Fault> {
    let length = mib << 20;
    let file = OpenOptions::new().read(true).write(true).open(file)?;
    if file.metadata()?.len() < length as u64 {
        return Err("the file is too short".into());
    }
    let mut options = OpenOptions::new();
    let disk = options
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping where the kernel likes; nothing else is touched.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            protection,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the whole mapping, which lives to the end of the process; no other program uses the file.
    let mapped = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), length) };
    disk.read_exact_at(mapped, 0)?;
    let mut first = Digest::default();
    first.add(mapped);
    mapped.iter_mut().for_each(|byte| *byte = !*byte);
    disk.write_all_at(mapped, 0)?;
    disk.sync_all()?;
    Ok(first.finish())
}
