//! Loads the kernel and the initramfs into guest memory.
//!
//! A bzImage is entered by the 64-bit boot protocol. An ELF kernel is entered by PVH if it has the note, else
//! at its 64-bit entry (`Documentation/arch/x86/boot.rst`, `x86/pvh` of Xen's documentation). The files are
//! untrusted: a user may name any file.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PF_W, PT_LOAD};
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::elf::PvhBootCapability;
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use page::PAGE_BYTES;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryBackend};

use super::layout::{CMDLINE_BYTES_MAX, CMDLINE_START, KERNEL_START, LOW_RAM_END};
use crate::memory::{GuestRam, fill_with_huge_pages};

/// How the first vCPU enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit mode, `boot_params` in RSI.
    Linux64(u64),
    /// 32-bit protected mode, `hvm_start_info` in EBX.
    Pvh(u64),
}

/// A loaded kernel.
#[derive(Debug)]
pub struct Kernel {
    /// Where the first vCPU enters the kernel.
    pub entry: Entry,
    /// The bzImage's header, for `boot_params`.
    pub header: Option<setup_header>,
    /// First byte that the kernel uses.
    pub start: u64,
    /// One past the last byte that the kernel uses before it knows the memory map.
    pub end: u64,
    /// Longest command line with its zero byte.
    pub cmdline_bytes_max: usize,
    /// Segments whose bytes in memory equal those in the file.
    pub segments: Vec<Segment>,
}

impl Kernel {
    /// Returns whether the kernel is entered as Linux is: from a bzImage, or by PVH.
    pub fn is_linux(&self) -> bool {
        self.header.is_some() || matches!(self.entry, Entry::Pvh(_))
    }
}

/// A segment of the kernel's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address.
    pub at: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub bytes: u64,
    /// Whether the kernel means to write to it.
    pub writable: bool,
}

/// Where the initramfs is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initrd {
    /// First address.
    pub start: u64,
    /// Size, bytes.
    pub bytes: u64,
}

/// Why the VM can't boot from these files.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Neither bzImage nor ELF.
    #[error("not a kernel: the file is neither a bzImage nor an x86-64 ELF file")]
    NotAKernel,
    /// The file ends early or contradicts itself.
    #[error("the kernel's file is damaged, or the kernel does not fit in the VM's memory")]
    Load(#[source] linux_loader::loader::Error),
    /// The bzImage has no 64-bit entry.
    #[error("the kernel is not a 64-bit one")]
    Not64Bit,
    /// Too little memory.
    #[error("kernel and initramfs need {needed_mib} MiB of memory; make `memory` larger")]
    NoRoom {
        /// Memory that kernel and initramfs need, MiB.
        needed_mib: u64,
    },
    /// The command line is too long.
    #[error(
        "the kernel's command line has {bytes} bytes; this kernel takes {bytes_max}: say less in `cmdline`"
    )]
    CmdlineTooLong {
        /// Length of the command line, bytes.
        bytes: usize,
        /// Longest command line of this kernel, bytes.
        bytes_max: usize,
    },
    /// The command line has a zero byte.
    #[error("the kernel's command line has a zero byte")]
    CmdlineZero,
    /// A file can't be read.
    #[error("cannot read the {what}")]
    Read {
        /// The file, for the error text.
        what: &'static str,
        /// Reason of the failure.
        #[source]
        source: std::io::Error,
    },
    /// Guest memory can't be written; a bug of the layout.
    #[error("cannot write boot data to guest memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
}

/// `struct setup_header` fields are read from here (`boot.rst`).
const HEADER_MAGIC_OFFSET: usize = 0x202;
const HEADER_MAGIC: [u8; 4] = *b"HdrS";
const ELF_MAGIC: [u8; 4] = *b"\x7FELF";
/// `xloadflags`: the kernel has the 64-bit entry at 0x200.
const XLF_KERNEL_64: u16 = 1;
const ENTRY_64_OFFSET: u64 = 0x200;
const ELF_CMDLINE_BYTES_MAX: usize = 2048;

/// Loads `file` at the addresses that it requests. Segments that are mapped from the file (`map`) stay in
/// small pages.
pub fn load(memory: &GuestRam, file: &mut File, map: bool) -> Result<Kernel, KernelError> {
    let read = |source| KernelError::Read {
        what: "kernel",
        source,
    };
    let mut start = [0; HEADER_MAGIC_OFFSET + 4];
    file.rewind().map_err(read)?;
    let mut filled = 0;
    while filled < start.len() {
        match file.read(&mut start[filled..]).map_err(read)? {
            0 => break,
            bytes => filled += bytes,
        }
    }
    file.rewind().map_err(read)?;
    if start[..4] == ELF_MAGIC {
        load_elf(memory, file, map)
    } else if start[HEADER_MAGIC_OFFSET..] == HEADER_MAGIC {
        load_bzimage(memory, file)
    } else {
        Err(KernelError::NotAKernel)
    }
}

fn load_elf(memory: &GuestRam, file: &mut File, map: bool) -> Result<Kernel, KernelError> {
    // The loader refuses a file that is no ELF file after all.
    for part in segments(file).unwrap_or_default() {
        if part.writable || !map {
            fill_with_huge_pages(memory, part.at..part.at.saturating_add(part.bytes));
        }
    }
    let loaded = Elf::load(memory.as_ref(), None, file, Some(GuestAddress(KERNEL_START)))
        .map_err(KernelError::Load)?;
    let entry = match loaded.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(entry) => Entry::Pvh(entry.0),
        _ => Entry::Linux64(loaded.kernel_load.0),
    };
    let segments = segments(file)?;
    let start = segments.iter().map(|part| part.at).min().unwrap_or(u64::MAX);
    let end = loaded.kernel_end;
    Ok(Kernel {
        entry,
        header: None,
        start,
        end,
        cmdline_bytes_max: ELF_CMDLINE_BYTES_MAX,
        segments,
    })
}

/// Returns the range of guest memory of an ELF kernel, from its first segment to its last. The range is empty
/// for other files, which unpack themselves.
pub fn image(file: &mut File) -> Range<u64> {
    let mut magic = [0; ELF_MAGIC.len()];
    let is_elf = file.rewind().and_then(|()| file.read_exact(&mut magic)).is_ok() && magic == ELF_MAGIC;
    // Loading reports errors of the file.
    let segments = is_elf.then(|| segments(file).ok()).flatten().unwrap_or_default();
    let start = segments.iter().map(|part| part.at).min().unwrap_or_default();
    let end = segments
        .iter()
        .map(|part| part.at.saturating_add(part.bytes))
        .max();
    start..end.unwrap_or_default()
}

/// Returns the segments that are loaded. The loader has checked the header and read the whole table once.
fn segments(file: &mut File) -> Result<Vec<Segment>, KernelError> {
    let read = |source| KernelError::Read {
        what: "kernel",
        source,
    };
    let mut header = Elf64_Ehdr::default();
    file.rewind().map_err(read)?;
    file.read_exact(header.as_mut_slice()).map_err(read)?;
    file.seek(SeekFrom::Start(header.e_phoff)).map_err(read)?;
    let mut segments = Vec::new();
    for _ in 0..header.e_phnum {
        let mut segment = Elf64_Phdr::default();
        file.read_exact(segment.as_mut_slice()).map_err(read)?;
        if segment.p_type == PT_LOAD {
            segments.push(Segment {
                at: segment.p_paddr,
                offset: segment.p_offset,
                bytes: segment.p_filesz,
                writable: segment.p_flags & PF_W != 0,
            });
        }
    }
    Ok(segments)
}

fn load_bzimage(memory: &GuestRam, file: &mut File) -> Result<Kernel, KernelError> {
    let loaded = BzImage::load(memory.as_ref(), None, file, Some(GuestAddress(KERNEL_START)))
        .map_err(KernelError::Load)?;
    let header = loaded.setup_header.ok_or(KernelError::NotAKernel)?;
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(KernelError::Not64Bit);
    }
    // The kernel unpacks itself at its preferred address.
    let unpacked_end = header.pref_address.saturating_add(u64::from(header.init_size));
    fill_with_huge_pages(memory, header.pref_address..unpacked_end);
    let cmdline_bytes_max = (header.cmdline_size as usize)
        .saturating_add(1)
        .min(CMDLINE_BYTES_MAX);
    Ok(Kernel {
        entry: Entry::Linux64(loaded.kernel_load.0 + ENTRY_64_OFFSET),
        header: Some(header),
        start: loaded.kernel_load.0,
        end: loaded.kernel_end.max(unpacked_end),
        cmdline_bytes_max,
        // The kernel unpacks itself: the code that runs differs from the file.
        segments: Vec::new(),
    })
}

/// Loads the initramfs as high as low RAM allows, or below the kernel when there is room only there.
pub fn load_initrd(memory: &GuestRam, file: &mut File, kernel: &Kernel) -> Result<Initrd, KernelError> {
    let read = |source| KernelError::Read {
        what: "initramfs",
        source,
    };
    let bytes = file.seek(SeekFrom::End(0)).map_err(read)?;
    file.rewind().map_err(read)?;
    let header_max = kernel
        .header
        .map_or(u64::MAX, |header| u64::from(header.initrd_addr_max) + 1);
    let low_end = memory
        .iter()
        .next()
        .map_or(0, ram_end)
        .min(LOW_RAM_END)
        .min(header_max);
    let start = highest_place(kernel.end, low_end, bytes)
        .or_else(|| highest_place(KERNEL_START, kernel.start.min(low_end), bytes))
        .ok_or_else(|| KernelError::NoRoom {
            needed_mib: kernel.end.saturating_add(bytes).div_ceil(1 << 20),
        })?;
    // In small pages: once unpacked it becomes free memory, for page cache that is to be shared.
    memory.read_exact_volatile_from(GuestAddress(start), file, bytes as usize)?;
    Ok(Initrd { start, bytes })
}

/// Returns the highest page between `from` and `to` where `bytes` fit.
fn highest_place(from: u64, to: u64, bytes: u64) -> Option<u64> {
    let start = to.checked_sub(bytes)? / PAGE_BYTES * PAGE_BYTES;
    (start >= from).then_some(start)
}

fn ram_end(region: &impl vm_memory::GuestMemoryRegion) -> u64 {
    region.start_addr().0 + region.len()
}

/// Writes the command line with its zero byte.
pub fn write_cmdline(memory: &GuestRam, cmdline: &str, kernel: &Kernel) -> Result<(), KernelError> {
    let bytes_max = kernel.cmdline_bytes_max - 1;
    if cmdline.len() > bytes_max {
        return Err(KernelError::CmdlineTooLong {
            bytes: cmdline.len(),
            bytes_max,
        });
    }
    if cmdline.as_bytes().contains(&0) {
        return Err(KernelError::CmdlineZero);
    }
    memory.write_slice(cmdline.as_bytes(), GuestAddress(CMDLINE_START))?;
    memory.write_slice(&[0], GuestAddress(CMDLINE_START + cmdline.len() as u64))?;
    Ok(())
}
