//! Parses the header of a qcow2 file as far as it must be validated before use.
//!
//! Bounds all allocations that a later reader makes from the header: a file of a few bytes can't request a
//! large table.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of a version 2 header; version 3 adds the feature bits.
const V2_BYTES: usize = 72;
/// The largest L1 or refcount table accepted, in bytes: 32 MiB of L1 at 64 KiB clusters maps 2 PiB.
const TABLE_BYTES_MAX: u64 = 32 << 20;
/// Bytes of a table per read; a multiple of its entries.
const TABLE_PIECE_BYTES: usize = 64 << 10;
/// The bits of an entry of the refcount table that say where its block is; the others are reserved.
const REFCOUNT_BLOCK_OFFSET: u64 = !0x1FF;
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
const BACKING_NAME_BYTES_MAX: u32 = 1023;

const INCOMPATIBLE_DIRTY: u64 = 1;
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;

/// A fault of a qcow2 file, with the help. The text follows the file's name.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// Another format.
    #[error("is not a qcow2 image; check the path, or say format = \"raw\"")]
    NotQcow2,
    /// Another version than 2 and 3.
    #[error("qcow2 version {0} is not supported; convert it with qemu-img")]
    Version(u32),
    /// Encrypted contents.
    #[error("is encrypted, which is not supported; decrypt it with qemu-img convert")]
    Encrypted,
    /// Internal snapshots, in a file that is to be written.
    #[error(
        "holds {0} internal snapshots, which is not supported for writing; \
         remove them with qemu-img snapshot -d, or use it privately"
    )]
    Snapshots(u32),
    /// A cluster size or disk size that no program makes.
    #[error("has a damaged header; check it with qemu-img check")]
    Damaged,
    /// A table outside the file.
    #[error("its {0} table lies outside the file; check it with qemu-img check")]
    Table(&'static str),
    /// The mark of a program that found damage.
    #[error("is marked corrupt; repair it with qemu-img check -r all")]
    Corrupt,
    /// A separate data file.
    #[error("keeps its data in another file, which is not supported; convert it with qemu-img")]
    DataFile,
    /// Entries of subclusters.
    #[error("has extended L2 entries, which is not supported; convert it with qemu-img")]
    ExtendedL2,
    /// Incompatible feature bits.
    #[error("needs unknown features ({0:#x}); convert it with qemu-img")]
    Features(u64),
    /// The mark of a file that is open or whose writer died, in a file that is to be written.
    #[error("was not closed cleanly; repair it with qemu-img check -r all")]
    Dirty,
    /// A refcount table that no program makes.
    #[error("its refcount table has gaps; copy it with qemu-img convert")]
    RefcountGaps,
    /// An empty refcount table.
    #[error("has no refcounts; copy it with qemu-img convert")]
    NoRefcounts,
    /// A backing file's name that is too long, not in the file, or no UTF-8.
    #[error("names its backing file wrongly; check it with qemu-img check")]
    BackingName,
    /// A failed read.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
}

/// Fields of a qcow2 header that matter before the file is opened.
#[derive(Debug)]
pub(super) struct Header {
    /// Size of the disk, bytes.
    pub size: u64,
    /// Length of a cluster, bytes.
    pub cluster_bytes: u64,
    /// Backing file.
    pub backing: Option<String>,
}

impl Header {
    /// Reads and validates the header. An error has the cause and the help.
    pub fn read(file: &File, writable: bool) -> Result<Self, HeaderError> {
        let mut bytes = [0_u8; 104];
        let length = file.metadata().map_err(HeaderError::Unreadable)?.len();
        let read = read_up_to(file, &mut bytes, 0).map_err(HeaderError::Unreadable)?;
        if read < V2_BYTES || &bytes[..4] != b"QFI\xfb" {
            return Err(HeaderError::NotQcow2);
        }
        let u32_at = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| (u64::from(u32_at(at)) << 32) | u64::from(u32_at(at + 4));

        let version = u32_at(4);
        if !(2..=3).contains(&version) || (version == 3 && read < bytes.len()) {
            return Err(HeaderError::Version(version));
        }
        if version == 3 {
            check_features(u64_at(72), writable)?;
        }
        if u32_at(32) != 0 {
            return Err(HeaderError::Encrypted);
        }
        let snapshots = u32_at(60);
        if snapshots != 0 && writable {
            return Err(HeaderError::Snapshots(snapshots));
        }
        let cluster_bits = u32_at(20);
        let size = u64_at(24);
        if !CLUSTER_BITS.contains(&cluster_bits) || size > i64::MAX as u64 {
            return Err(HeaderError::Damaged);
        }
        let l1_bytes = u64::from(u32_at(36)) * 8;
        let refcount_bytes = u64::from(u32_at(56)) << cluster_bits;
        for (name, offset, table) in [
            ("L1", u64_at(40), l1_bytes),
            ("refcount", u64_at(48), refcount_bytes),
        ] {
            let end = offset.checked_add(table);
            if table > TABLE_BYTES_MAX
                || end.is_none_or(|end| end > length.next_multiple_of(1 << cluster_bits))
            {
                return Err(HeaderError::Table(name));
            }
        }
        if writable {
            check_refcount_table(file, u64_at(48), refcount_bytes)?;
        }
        Ok(Self {
            size,
            cluster_bytes: 1 << cluster_bits,
            backing: backing_name(file, u64_at(8), u32_at(16))?,
        })
    }
}

fn check_features(incompatible: u64, writable: bool) -> Result<(), HeaderError> {
    let known = INCOMPATIBLE_DIRTY | INCOMPATIBLE_COMPRESSION;
    if incompatible & INCOMPATIBLE_CORRUPT != 0 {
        return Err(HeaderError::Corrupt);
    }
    if incompatible & INCOMPATIBLE_DATA_FILE != 0 {
        return Err(HeaderError::DataFile);
    }
    if incompatible & INCOMPATIBLE_EXTENDED_L2 != 0 {
        return Err(HeaderError::ExtendedL2);
    }
    if incompatible & !known != 0 {
        return Err(HeaderError::Features(incompatible));
    }
    if writable && incompatible & INCOMPATIBLE_DIRTY != 0 {
        return Err(HeaderError::Dirty);
    }
    Ok(())
}

/// Refuses a refcount table that is empty or has gaps, which no program makes in normal use: `imago` (0.2)
/// would write a refcount block over the header, and an allocation in a gap recurses until the stack
/// overflows. Found by the fuzzer.
fn check_refcount_table(file: &File, offset: u64, bytes: u64) -> Result<(), HeaderError> {
    let mut piece = vec![0; TABLE_PIECE_BYTES];
    let (mut done, mut present, mut ended) = (0, false, false);
    while done < bytes {
        let wanted = piece
            .len()
            .min(usize::try_from(bytes - done).unwrap_or(usize::MAX));
        let read = read_up_to(file, &mut piece[..wanted], offset + done).map_err(HeaderError::Unreadable)?;
        for entry in piece[..read].as_chunks::<8>().0 {
            let empty = u64::from_be_bytes(*entry) & REFCOUNT_BLOCK_OFFSET == 0;
            if empty && !present || ended && !empty {
                return Err(HeaderError::RefcountGaps);
            }
            (present, ended) = (true, empty);
        }
        if read < wanted {
            break;
        }
        done += read as u64;
    }
    if present {
        Ok(())
    } else {
        Err(HeaderError::NoRefcounts)
    }
}

fn backing_name(file: &File, offset: u64, length: u32) -> Result<Option<String>, HeaderError> {
    if offset == 0 || length == 0 {
        return Ok(None);
    }
    if length > BACKING_NAME_BYTES_MAX {
        return Err(HeaderError::BackingName);
    }
    let mut name = vec![0; length as usize];
    file.read_exact_at(&mut name, offset)
        .map_err(|_| HeaderError::BackingName)?;
    String::from_utf8(name)
        .map(Some)
        .map_err(|_| HeaderError::BackingName)
}

fn read_up_to(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
