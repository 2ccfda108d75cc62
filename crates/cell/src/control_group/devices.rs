//! The block devices to which a VM's I/O limit applies: those that hold its disks.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use config::IoLimitSpec;
use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, fstatfs};

/// The folder in which the kernel lists devices by their numbers.
const BY_NUMBER: &str = "/sys/dev/block";

/// A block device by its numbers, as control groups name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Device {
    major: u64,
    minor: u64,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// The storage of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backing {
    /// A device: the file's own, or that of its file system.
    Device(Device),
    /// Memory: no device does any I/O.
    Memory,
    /// A file system that names no device.
    Elsewhere,
}

impl Device {
    fn of_number(number: u64) -> Self {
        Self {
            major: libc::major(number).into(),
            minor: libc::minor(number).into(),
        }
    }

    /// The device that limits apply to: for a partition, the disk that has it. `by_number` has a link for
    /// each device.
    fn whole(self, by_number: &Path) -> io::Result<Self> {
        let directory = by_number.join(self.to_string()).canonicalize()?;
        if !directory.join("partition").exists() {
            return Ok(self);
        }
        let disk = directory.parent().unwrap_or(&directory);
        let number = fs::read_to_string(disk.join("dev"))?;
        let device = parse(number.trim());
        device.ok_or_else(|| io::Error::other(format!("{number:?} is no device's number")))
    }
}

/// The numbers of a device, as `8:1`.
fn parse(text: &str) -> Option<Device> {
    let (major, minor) = text.split_once(':')?;
    Some(Device {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

fn backing(file: BorrowedFd<'_>) -> io::Result<Backing> {
    let about = fs::File::from(file.try_clone_to_owned()?).metadata()?;
    let is_in_memory = || -> io::Result<bool> {
        let kind = fstatfs(file)?.filesystem_type();
        Ok(kind == TMPFS_MAGIC || kind == HUGETLBFS_MAGIC)
    };
    Ok(if about.file_type().is_block_device() {
        Backing::Device(Device::of_number(about.rdev()))
    } else if libc::major(about.dev()) != 0 {
        Backing::Device(Device::of_number(about.dev()))
    } else if is_in_memory()? {
        Backing::Memory
    } else {
        // A number of the kernel's own, of no device.
        Backing::Elsewhere
    })
}

/// The reason why a limit can't be kept.
#[derive(Debug, thiserror::Error)]
pub enum DevicesError {
    /// The number of the device is unknown.
    #[error(
        "io_limit: {0} lies on a file system that names no block device (as btrfs, overlayfs, NFS, 9p), so \
         its I/O cannot be limited; help: put the disk and MIRRORBALL_SCRATCH on ext4 or XFS, or leave \
         io_limit out"
    )]
    Elsewhere(String),
    /// All disks are in memory.
    #[error(
        "io_limit: the VM has no disk on a device (tmpfs is memory), so there is no I/O to limit; help: \
         leave io_limit out"
    )]
    NoDevice,
    /// The host does not report the device.
    #[error("io_limit: the device of {disk} cannot be told: {source}; help: see whether /sys is mounted")]
    Host {
        /// Name of the disk in the VM.
        disk: String,
        /// Error of the access to /sys.
        source: io::Error,
    },
}

/// The devices that hold the files of disks, which come with the disks' names; each device once.
pub(super) fn of_disks<'a>(
    files: impl Iterator<Item = (&'a str, BorrowedFd<'a>)>,
) -> Result<BTreeSet<Device>, DevicesError> {
    let mut devices = BTreeSet::new();
    for (disk, file) in files {
        let unknown = |source| DevicesError::Host {
            disk: disk.to_owned(),
            source,
        };
        match backing(file.as_fd()).map_err(unknown)? {
            Backing::Device(device) => {
                devices.insert(device.whole(Path::new(BY_NUMBER)).map_err(unknown)?);
            }
            Backing::Memory => {}
            Backing::Elsewhere => return Err(DevicesError::Elsewhere(disk.to_owned())),
        }
    }
    if devices.is_empty() {
        return Err(DevicesError::NoDevice);
    }
    Ok(devices)
}

/// The line of a group's `io.max` for a device.
pub(super) fn line(device: Device, limit: &IoLimitSpec) -> String {
    let value = |number: Option<u64>| number.map_or_else(|| "max".to_owned(), |number| number.to_string());
    format!(
        "{device} rbps={} wbps={} riops={} wiops={}",
        value(limit.read_bytes.map(|size| size.0)),
        value(limit.write_bytes.map(|size| size.0)),
        value(limit.reads),
        value(limit.writes)
    )
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;

    use super::*;

    fn device(major: u64, minor: u64) -> Device {
        Device { major, minor }
    }

    #[test]
    fn a_partition_is_limited_as_the_disk_that_it_is_of() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/pci/block/sda");
        fs::create_dir_all(disk.join("sda2")).unwrap();
        fs::write(disk.join("dev"), "8:0\n").unwrap();
        fs::write(disk.join("sda2/dev"), "8:2\n").unwrap();
        fs::write(disk.join("sda2/partition"), "2\n").unwrap();
        let by_number = sys.path().join("dev/block");
        fs::create_dir_all(&by_number).unwrap();
        symlink("../../devices/pci/block/sda", by_number.join("8:0")).unwrap();
        symlink("../../devices/pci/block/sda/sda2", by_number.join("8:2")).unwrap();
        assert_eq!(device(8, 2).whole(&by_number).unwrap(), device(8, 0));
        assert_eq!(device(8, 0).whole(&by_number).unwrap(), device(8, 0));
        assert!(device(8, 3).whole(&by_number).is_err());
        fs::write(disk.join("dev"), "none\n").unwrap();
        assert!(device(8, 2).whole(&by_number).is_err());
    }

    #[test]
    fn a_line_has_every_limit_and_max_where_there_is_none() {
        let limit: IoLimitSpec = "read_bytes=1M,writes=500".parse().unwrap();
        let line = line(device(259, 3), &limit);
        assert_eq!(line, "259:3 rbps=1048576 wbps=max riops=max wiops=500");
    }

    #[test]
    fn files_in_memory_are_on_no_device() {
        let memory = nix::sys::memfd::memfd_create(c"disk", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        assert_eq!(backing(memory.as_fd()).unwrap(), Backing::Memory);
        let alone = of_disks([("disk0", memory.as_fd())].into_iter()).unwrap_err();
        assert!(alone.to_string().contains("leave io_limit out"), "{alone}");
        let elsewhere = File::open("/proc/self/stat").unwrap();
        let files = [("disk0", memory.as_fd()), ("disk1", elsewhere.as_fd())];
        let error = of_disks(files.into_iter()).unwrap_err().to_string();
        assert!(error.contains("disk1 lies on a file system"), "{error}");
    }
}
