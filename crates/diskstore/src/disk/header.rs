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

/// Fields of a qcow2 header that matter before the file is opened.
#[derive(Debug)]
pub(super) struct Header {
    /// Size of the disk, bytes.
    pub size: u64,
    /// Bytes of a cluster.
    pub cluster_bytes: u64,
    /// Backing file.
    pub backing: Option<String>,
}

impl Header {
    /// Reads and validates the header. An error has the cause and the help.
    pub fn read(file: &File, writable: bool) -> Result<Self, String> {
        let mut bytes = [0_u8; 104];
        let length = file.metadata().map_err(unreadable)?.len();
        let read = read_up_to(file, &mut bytes, 0).map_err(unreadable)?;
        if read < V2_BYTES || &bytes[..4] != b"QFI\xfb" {
            return Err("is not a qcow2 image; check the path, or say format = \"raw\"".into());
        }
        let u32_at = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| (u64::from(u32_at(at)) << 32) | u64::from(u32_at(at + 4));

        let version = u32_at(4);
        if !(2..=3).contains(&version) || (version == 3 && read < bytes.len()) {
            return Err(format!(
                "qcow2 version {version} is not supported; convert it with qemu-img"
            ));
        }
        if version == 3 {
            check_features(u64_at(72), writable)?;
        }
        if u32_at(32) != 0 {
            return Err("is encrypted, which is not supported; decrypt it with qemu-img convert".into());
        }
        let snapshots = u32_at(60);
        if snapshots != 0 && writable {
            return Err(format!(
                "holds {snapshots} internal snapshots, which is not supported for writing; \
                 remove them with qemu-img snapshot -d, or use it privately"
            ));
        }
        let cluster_bits = u32_at(20);
        let size = u64_at(24);
        if !CLUSTER_BITS.contains(&cluster_bits) || size > i64::MAX as u64 {
            return Err("has a damaged header; check it with qemu-img check".into());
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
                return Err(format!(
                    "its {name} table lies outside the file; check it with qemu-img check"
                ));
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

fn check_features(incompatible: u64, writable: bool) -> Result<(), String> {
    let known = INCOMPATIBLE_DIRTY | INCOMPATIBLE_COMPRESSION;
    if incompatible & INCOMPATIBLE_CORRUPT != 0 {
        return Err("is marked corrupt; repair it with qemu-img check -r all".into());
    }
    if incompatible & INCOMPATIBLE_DATA_FILE != 0 {
        return Err(
            "keeps its data in another file, which is not supported; convert it with qemu-img".into(),
        );
    }
    if incompatible & INCOMPATIBLE_EXTENDED_L2 != 0 {
        return Err("has extended L2 entries, which is not supported; convert it with qemu-img".into());
    }
    if incompatible & !known != 0 {
        return Err(format!(
            "needs unknown features ({incompatible:#x}); convert it with qemu-img"
        ));
    }
    if writable && incompatible & INCOMPATIBLE_DIRTY != 0 {
        return Err("was not closed cleanly; repair it with qemu-img check -r all".into());
    }
    Ok(())
}

/// Refuses a refcount table that is empty or has gaps, which no program makes in normal use: `imago` (0.2)
/// would write a refcount block over the header, and an allocation in a gap recurses until the stack
/// overflows. Found by the fuzzer.
fn check_refcount_table(file: &File, offset: u64, bytes: u64) -> Result<(), String> {
    let mut piece = vec![0; TABLE_PIECE_BYTES];
    let (mut done, mut present, mut ended) = (0, false, false);
    while done < bytes {
        let wanted = piece
            .len()
            .min(usize::try_from(bytes - done).unwrap_or(usize::MAX));
        let read = read_up_to(file, &mut piece[..wanted], offset + done).map_err(unreadable)?;
        for entry in piece[..read].as_chunks::<8>().0 {
            let empty = u64::from_be_bytes(*entry) & REFCOUNT_BLOCK_OFFSET == 0;
            if empty && !present || ended && !empty {
                return Err("its refcount table has gaps; copy it with qemu-img convert".into());
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
        Err("has no refcounts; copy it with qemu-img convert".into())
    }
}

fn backing_name(file: &File, offset: u64, length: u32) -> Result<Option<String>, String> {
    if offset == 0 || length == 0 {
        return Ok(None);
    }
    let damaged = || "names its backing file wrongly; check it with qemu-img check".to_owned();
    if length > BACKING_NAME_BYTES_MAX {
        return Err(damaged());
    }
    let mut name = vec![0; length as usize];
    file.read_exact_at(&mut name, offset).map_err(|_| damaged())?;
    String::from_utf8(name).map(Some).map_err(|_| damaged())
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

fn unreadable(error: io::Error) -> String {
    format!("cannot be read: {error}")
}
