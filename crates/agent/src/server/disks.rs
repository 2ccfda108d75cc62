//! Makes the guest use the disks of its VM in place of those of its template.
//!
//! The devices of the resumed VM report their sizes by an interrupt, after which the kernel changes the sizes
//! of its disks. It reads the partition table of a disk by itself only when it finds the disk.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::protocol::ReplacedDisk;

/// The kernel's directory of disks.
const BLOCK: &str = "/sys/block";
/// Directory of the disks' nodes.
const NODES: &str = "/dev";
/// Time limit for the kernel to change the size of a disk.
const SIZE_LIMIT: Duration = Duration::from_secs(20);
const SIZE_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Requests `BLKFLSBUF` and `BLKRRPART` of `linux/fs.h`.
const FLUSH_BUFFERS: libc::Ioctl = 0x1261;
const READ_PARTITIONS: libc::Ioctl = 0x125f;

/// Waits until the kernel has the sizes of the disks, and makes it read their partition tables. Nothing that
/// was read of the template's disks stays in memory.
pub fn replace(disks: &[ReplacedDisk]) -> io::Result<()> {
    for disk in disks {
        let about = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", disk.serial));
        let place = find(Path::new(BLOCK), &disk.serial).map_err(about)?;
        await_size(&place, disk.template_sectors, SIZE_LIMIT).map_err(about)?;
        read_again(&place, Path::new(NODES)).map_err(about)?;
    }
    Ok(())
}

/// Returns the directory below `block` of the disk with this serial.
fn find(block: &Path, serial: &str) -> io::Result<PathBuf> {
    for entry in fs::read_dir(block)? {
        let place = entry?.path();
        // Other devices than disks of virtio have no such file.
        if fs::read_to_string(place.join("serial")).is_ok_and(|own| own.trim() == serial) {
            return Ok(place);
        }
    }
    Err(io::Error::other("the guest has no disk with this serial"))
}

/// Waits until the size of the disk at `place` is another than that of the template's disk.
fn await_size(place: &Path, template_sectors: u64, limit: Duration) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        let sectors = fs::read_to_string(place.join("size"))?;
        if sectors.trim().parse() != Ok(template_sectors) {
            return Ok(());
        }
        if begun.elapsed() >= limit {
            return Err(io::Error::other(format!(
                "the guest still finds a disk of {} bytes",
                template_sectors.saturating_mul(512)
            )));
        }
        thread::sleep(SIZE_POLL_INTERVAL);
    }
}

/// Forgets what was read of the disk at `place`, reads its partition table, and reports the change to the
/// guest's programs.
fn read_again(place: &Path, nodes: &Path) -> io::Result<()> {
    let name = place.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let node = File::open(nodes.join(name))?;
    for request in [FLUSH_BUFFERS, READ_PARTITIONS] {
        // SAFETY: both requests take no argument.
        if unsafe { libc::ioctl(node.as_raw_fd(), request) } < 0 {
            let error = io::Error::last_os_error();
            // A boot goes on, too, where the first sectors can't be read.
            if error.raw_os_error() != Some(libc::EIO) {
                return Err(error);
            }
        }
    }
    drop(node);
    fs::write(place.join("uevent"), "change")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory of disks, each with its serial and its size.
    fn block(disks: &[(&str, &str, &str)]) -> tempfile::TempDir {
        let block = tempfile::tempdir().unwrap();
        for (name, serial, size) in disks {
            let place = block.path().join(name);
            fs::create_dir(&place).unwrap();
            fs::write(place.join("serial"), serial).unwrap();
            fs::write(place.join("size"), size).unwrap();
        }
        // A loop device.
        fs::create_dir(block.path().join("loop0")).unwrap();
        block
    }

    #[test]
    fn disk_is_found_by_its_whole_serial() {
        let block = block(&[
            ("vda", "disk10", "8\n"),
            ("vdb", "disk1\n", "8\n"),
            ("vdc", "", "8\n"),
        ]);
        assert_eq!(find(block.path(), "disk1").unwrap().file_name().unwrap(), "vdb");
        let error = find(block.path(), "disk2").unwrap_err();
        assert!(error.to_string().contains("no disk with this serial"), "{error}");
    }

    #[test]
    fn size_is_awaited_until_it_is_no_longer_the_templates() {
        let block = block(&[("vda", "disk0", "2048\n"), ("vdb", "disk1", "1\n")]);
        await_size(&block.path().join("vda"), 1, Duration::ZERO).unwrap();
        let late = block.path().join("vdb");
        let error = await_size(&late, 1, Duration::from_millis(20)).unwrap_err();
        assert!(error.to_string().contains("a disk of 512 bytes"), "{error}");
        let size = late.join("size");
        let changer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            // Replaced as a whole: a reader never finds half of it.
            fs::write(size.with_extension("new"), "16\n").unwrap();
            fs::rename(size.with_extension("new"), size).unwrap();
        });
        let begun = Instant::now();
        await_size(&late, 1, Duration::from_secs(20)).unwrap();
        assert!(begun.elapsed() >= Duration::from_millis(40));
        changer.join().unwrap();
    }

    #[test]
    fn node_that_takes_no_request_of_a_disk_is_an_error() {
        let (block, nodes) = (block(&[("vda", "disk0", "8\n")]), tempfile::tempdir().unwrap());
        let place = block.path().join("vda");
        assert!(read_again(&place, nodes.path()).is_err(), "there is no node");
        fs::write(nodes.path().join("vda"), "a file").unwrap();
        assert!(read_again(&place, nodes.path()).is_err());
        assert!(!place.join("uevent").exists());
    }
}
