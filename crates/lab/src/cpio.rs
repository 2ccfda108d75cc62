//! A writer of cpio archives in the "newc" format, which Linux unpacks as an initramfs.
//!
//! `Documentation/driver-api/early-userspace/buffer-format.rst`: several archives may follow one another,
//! each starting at a multiple of 4 bytes.

use std::io::{self, Write};

/// An archive being written.
pub struct Archive<W: Write> {
    out: W,
    inode: u32,
}

/// The name that ends an archive.
const TRAILER: &str = "TRAILER!!!";

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const CHARACTER: u32 = 0o020_000;

impl<W: Write> Archive<W> {
    /// Starts an archive.
    pub fn new(out: W) -> Self {
        Self { out, inode: 1 }
    }

    /// Adds a directory.
    pub fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a character device, `major` and `minor` being its number.
    pub fn character_device(&mut self, name: &str, mode: u32, major: u32, minor: u32) -> io::Result<()> {
        self.entry(name, CHARACTER | mode, (major, minor), &[])
    }

    /// Adds a file.
    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entry(name, REGULAR | mode, (0, 0), content)
    }

    /// Ends the archive and returns the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.entry(TRAILER, 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "too long for a cpio archive");
        let size = u32::try_from(content.len()).map_err(too_long)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_long)?;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        // inode, mode, uid, gid, links, mtime, size, device (2), device of a special file (2), name size,
        // checksum
        let fields = [
            self.inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0,
        ];
        self.inode = self.inode.wrapping_add(1);
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(header.len() + name.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, length: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..length.next_multiple_of(4) - length])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An independent reader: names, modes and contents up to the trailer, and the bytes used.
    fn read(bytes: &[u8]) -> (Vec<(String, u32, Vec<u8>)>, usize) {
        let mut entries = Vec::new();
        let mut at = 0;
        loop {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |index: usize| {
                let start = at + 6 + index * 8;
                u32::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[at + 110..at + 110 + name_size - 1].to_vec()).unwrap();
            assert_eq!(bytes[at + 110 + name_size - 1], 0);
            let start = (at + 110 + name_size).next_multiple_of(4);
            let content = bytes[start..start + size].to_vec();
            at = (start + size).next_multiple_of(4);
            if name == TRAILER {
                return (entries, at);
            }
            entries.push((name, mode, content));
        }
    }

    proptest! {
        #[test]
        fn archive_reads_back_as_written(
            files in prop::collection::vec(
                ("[a-z/._-]{1,40}", 0u32..0o1000, prop::collection::vec(any::<u8>(), 0..200)),
                0..20
            )
        ) {
            let mut archive = Archive::new(Vec::new());
            archive.directory("dev").unwrap();
            for (name, mode, content) in &files {
                archive.file(name, *mode, content).unwrap();
            }
            let bytes = archive.finish().unwrap();
            let (entries, used) = read(&bytes);
            prop_assert_eq!(used, bytes.len());
            prop_assert_eq!(bytes.len() % 4, 0);
            prop_assert_eq!(&entries[0], &("dev".to_string(), 0o040_755, Vec::new()));
            for (entry, (name, mode, content)) in entries[1..].iter().zip(&files) {
                prop_assert_eq!(entry, &(name.clone(), REGULAR | *mode, content.clone()));
            }
            prop_assert_eq!(entries.len(), files.len() + 1);
        }
    }
}
