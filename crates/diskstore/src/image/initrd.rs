//! Initramfses: the agent as `/init`, the modules it loads, and for a tiny guest busybox, as an uncompressed
//! cpio.
//!
//! Uncompressed, because a guest's memory can then share it with the file, and because unpacking costs boot
//! time.

use std::fs;
use std::path::{Path, PathBuf};

use super::{ImageError, failed};

/// Creates an initramfs of the agent, modules in loading order, and busybox if given.
pub fn make(agent: &Path, modules: &[PathBuf], busybox: Option<&Path>) -> Result<Vec<u8>, ImageError> {
    let read = |path: &Path| fs::read(path).map_err(failed("read", path));
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "root", "bin", "modules"] {
        archive.add(folder, 0o040_755, (0, 0), &[]);
    }
    // The kernel gives init this device as its standard streams.
    archive.add("dev/console", 0o020_600, (5, 1), &[]);
    archive.add("init", 0o100_755, (0, 0), &read(agent)?);
    let mut order = String::new();
    for module in modules {
        let name = module.file_name().unwrap_or_default().to_string_lossy();
        archive.add(&format!("modules/{name}"), 0o100_644, (0, 0), &read(module)?);
        order.push_str(&name);
        order.push('\n');
    }
    archive.add("modules/order", 0o100_644, (0, 0), order.as_bytes());
    if let Some(busybox) = busybox {
        archive.add("bin/busybox", 0o100_755, (0, 0), &read(busybox)?);
        archive.add("bin/sh", 0o120_777, (0, 0), b"busybox");
    }
    Ok(archive.finish())
}

/// A cpio archive in the `newc` format (Linux, `Documentation/driver-api/early-userspace/buffer-format.rst`).
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inode += 1;
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        // Time 0 makes the archive reproducible.
        let fields = [
            self.inode,
            mode,
            0,
            0,
            links,
            0,
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.inode = 0;
        self.add("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }
}
