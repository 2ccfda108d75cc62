//! Boot data of a kernel: `boot_params` or `hvm_start_info`, page tables, descriptor table.

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use page::PAGE_BYTES;
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::kernel::{Entry, Initrd, Kernel, KernelError};
use super::layout::{
    ACPI_START, CMDLINE_START, GDT_START, IDT_START, PAGE_TABLES_START, PVH_INFO_START, RESET_PORT,
    RESET_VALUE, RESET_VECTOR, ZERO_PAGE_START,
};
use super::memory_map::MemoryMapEntry;
use super::registers::gdt;
use crate::memory::GuestRam;

/// `type_of_loader`: undefined (no number is assigned).
const LOADER_UNDEFINED: u8 = 0xFF;
/// `boot_flag` and `header` of a kernel without a header of its own (ELF).
const BOOT_FLAG: u16 = 0xAA55;
const HEADER_MAGIC: u32 = 0x5372_6448;

/// A plain structure of the boot protocols, as bytes.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Plain<T: Copy + Default>(T);
// SAFETY: these are `repr(C)` structures of integers without padding, valid for any bytes.
unsafe impl ByteValued for Plain<hvm_start_info> {}
// SAFETY: as above.
unsafe impl ByteValued for Plain<hvm_modlist_entry> {}
// SAFETY: as above.
unsafe impl ByteValued for Plain<hvm_memmap_table_entry> {}

/// Writes the boot data that `kernel` reads at its entry.
pub fn write(
    memory: &GuestRam,
    kernel: &Kernel,
    initrd: Option<Initrd>,
    cmdline_bytes: usize,
    map: &[MemoryMapEntry],
) -> Result<(), KernelError> {
    for (index, entry) in gdt(kernel.entry).iter().enumerate() {
        memory.write_obj(*entry, GuestAddress(GDT_START + index as u64 * 8))?;
    }
    memory.write_obj(0u64, GuestAddress(IDT_START))?;
    memory.write_slice(&reset_stub(), GuestAddress(RESET_VECTOR))?;
    match kernel.entry {
        Entry::Linux64(_) => {
            write_page_tables(memory)?;
            write_boot_params(memory, kernel, initrd, cmdline_bytes, map)
        }
        Entry::Pvh(_) => write_pvh(memory, initrd, map),
    }
}

/// Returns the only firmware: real-mode code that writes the ACPI reset register and halts.
///
/// Linux 6.1 on hardware-reduced ACPI restarts by EFI even without EFI, and then by a jump to the BIOS.
/// Without this code it would hang there (`efi_reboot_required`, `machine_real_restart`).
fn reset_stub() -> [u8; 9] {
    let [port_low, port_high] = RESET_PORT.to_le_bytes();
    let mov_dx = [0xBA, port_low, port_high];
    let mov_al = [0xB0, RESET_VALUE];
    let (out, hlt, jmp_hlt) = (0xEE, 0xF4, [0xEB, 0xFD]);
    [
        mov_dx[0], mov_dx[1], mov_dx[2], mov_al[0], mov_al[1], out, hlt, jmp_hlt[0], jmp_hlt[1],
    ]
}

fn write_boot_params(
    memory: &GuestRam,
    kernel: &Kernel,
    initrd: Option<Initrd>,
    cmdline_bytes: usize,
    map: &[MemoryMapEntry],
) -> Result<(), KernelError> {
    let mut params = boot_params {
        acpi_rsdp_addr: ACPI_START,
        ..Default::default()
    };
    if let Some(header) = kernel.header {
        params.hdr = header;
    } else {
        params.hdr.boot_flag = BOOT_FLAG;
        params.hdr.header = HEADER_MAGIC;
        params.hdr.kernel_alignment = 16 << 20;
    }
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = CMDLINE_START as u32;
    params.hdr.cmdline_size = cmdline_bytes as u32;
    if let Some(initrd) = initrd {
        // Below 4 GiB: `load_initrd` puts it in low RAM.
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = initrd.bytes as u32;
    }
    let mut count = 0;
    for entry in map.iter().take(params.e820_table.len()) {
        let kind = entry.kind as u32;
        params.e820_table[count] = boot_e820_entry {
            addr: entry.start,
            size: entry.bytes,
            r#type: kind,
        };
        count += 1;
    }
    params.e820_entries = count as u8;
    memory.write_obj(params, GuestAddress(ZERO_PAGE_START))?;
    Ok(())
}

fn write_pvh(memory: &GuestRam, initrd: Option<Initrd>, map: &[MemoryMapEntry]) -> Result<(), KernelError> {
    let modules = PVH_INFO_START + size_of::<hvm_start_info>() as u64;
    let entries = modules + size_of::<hvm_modlist_entry>() as u64;
    let info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        nr_modules: u32::from(initrd.is_some()),
        modlist_paddr: modules,
        cmdline_paddr: CMDLINE_START,
        rsdp_paddr: ACPI_START,
        memmap_paddr: entries,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    memory.write_obj(Plain(info), GuestAddress(PVH_INFO_START))?;
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.bytes,
            ..Default::default()
        };
        memory.write_obj(Plain(module), GuestAddress(modules))?;
    }
    for (index, entry) in map.iter().enumerate() {
        let (addr, size, type_) = (entry.start, entry.bytes, entry.kind as u32);
        let entry = hvm_memmap_table_entry {
            addr,
            size,
            type_,
            reserved: 0,
        };
        let place = entries + (index * size_of::<hvm_memmap_table_entry>()) as u64;
        memory.write_obj(Plain(entry), GuestAddress(place))?;
    }
    Ok(())
}

/// Maps the first 4 GiB one to one in 2 MiB pages.
pub(crate) fn write_page_tables(memory: &GuestRam) -> Result<(), KernelError> {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let directories = PAGE_TABLES_START + 2 * PAGE_BYTES;
    memory.write_obj(
        (PAGE_TABLES_START + PAGE_BYTES) | PRESENT_WRITABLE,
        GuestAddress(PAGE_TABLES_START),
    )?;
    for gib in 0..4 {
        let directory = directories + gib * PAGE_BYTES;
        memory.write_obj(
            directory | PRESENT_WRITABLE,
            GuestAddress(PAGE_TABLES_START + PAGE_BYTES + gib * 8),
        )?;
        for index in 0..512 {
            let entry = (gib << 30) | (index << 21) | PRESENT_WRITABLE | LARGE;
            memory.write_obj(entry, GuestAddress(directory + index * 8))?;
        }
    }
    Ok(())
}
