//! The guest's address map: physical addresses, I/O ports and interrupt numbers.
//!
//! ```text
//! 0               real-mode area, boot data: GDT, zero page, page tables, command line
//! 0x000A_0000     legacy hole: ACPI tables (from 0xE_0000: the RSDP, then the rest), reset stub
//! 0x0010_0000     RAM: the kernel, and the initramfs at its top
//!   ...           end of low RAM: at most 0xC000_0000 (3 GiB)
//! 0xC000_0000     PCI memory window, 32 bits                             512 MiB
//! 0xE000_0000     PCI configuration space (ECAM), one bus                  1 MiB
//! 0xFEC0_0000     IOAPIC                                                   4 KiB
//! 0xFEE0_0000     local APICs                                              4 KiB
//! 0xFFFB_C000     KVM's identity map page and task-state pages (Intel)    16 KiB
//! 0x1_0000_0000   RAM beyond 3 GiB, if any
//! [`Layout::pmem`]  persistent memory, each region from a multiple of 1 GiB
//! [`Layout::mmio64`] PCI memory window, 64 bits                           64 GiB
//! ```
//!
//! The memory's file has page g at offset g (ARCHITECTURE.md), so the file has the same holes.

use std::ops::Range;

/// End of the range for low RAM; the rest continues at [`HIGH_RAM_START`].
pub const LOW_RAM_END: u64 = MMIO32_START;
/// Start of the RAM that does not fit below the hole.
pub const HIGH_RAM_START: u64 = 1 << 32;

/// Start of the window for memory BARs with 32-bit addresses.
pub const MMIO32_START: u64 = 0xC000_0000;
/// Size of the 32-bit window, bytes.
pub const MMIO32_BYTES: u64 = 512 << 20;
/// Memory-mapped PCI configuration space: bus 0 of segment 0.
pub const ECAM_START: u64 = 0xE000_0000;
/// Size of 32 devices of 8 functions of 4 KiB, bytes.
pub const ECAM_BYTES: u64 = 1 << 20;
/// The I/O interrupt controller (KVM's own).
pub const IOAPIC_START: u64 = 0xFEC0_0000;
/// The local interrupt controllers (KVM's own).
pub const LAPIC_START: u64 = 0xFEE0_0000;
/// A page KVM needs on Intel hosts without unrestricted guest.
pub const IDENTITY_MAP_START: u64 = 0xFFFB_C000;
/// Three pages KVM needs on Intel hosts.
pub const TSS_START: u64 = 0xFFFB_D000;
/// Size of the 64-bit window, bytes.
pub const MMIO64_BYTES: u64 = 64 << 30;
/// Alignment of ranges above RAM, bytes: the guest can map them with the largest pages.
pub const ABOVE_RAM_ALIGN: u64 = 1 << 30;

/// End of conventional memory: below is RAM, above the legacy hole.
pub const LEGACY_HOLE_START: u64 = 0x000A_0000;
/// First address above the legacy hole: RAM begins again.
pub const LEGACY_HOLE_END: u64 = 0x0010_0000;
/// ACPI tables, the RSDP first (the BIOS area, which a kernel without another hint searches).
pub const ACPI_START: u64 = 0x000E_0000;
/// Room for ACPI tables.
pub const ACPI_BYTES: u64 = GENERATION_ID - ACPI_START;
/// The VM's generation id, 16 bytes.
pub const GENERATION_ID: u64 = RESET_VECTOR - 16;
/// Address of the jump by which a kernel restarts the machine in real mode, as its last resort.
pub const RESET_VECTOR: u64 = 0x000F_FFF0;

/// The global descriptor table.
pub const GDT_START: u64 = 0x500;
/// The interrupt descriptor table (empty).
pub const IDT_START: u64 = 0x520;
/// PVH start information, its module list and its memory map.
pub const PVH_INFO_START: u64 = 0x6000;
/// `struct boot_params` of the Linux boot protocol.
pub const ZERO_PAGE_START: u64 = 0x7000;
/// The initial stack pointer.
pub const BOOT_STACK: u64 = 0x8FF0;
/// Page tables: one top level, one of 512 GiB, four of 1 GiB in 2 MiB pages.
pub const PAGE_TABLES_START: u64 = 0x9000;
/// The kernel command line.
pub const CMDLINE_START: u64 = 0x2_0000;
/// Longest command line with its final zero byte; a kernel may allow less.
pub const CMDLINE_BYTES_MAX: usize = 64 << 10;
/// Load address of a kernel that does not request one.
pub const KERNEL_START: u64 = LEGACY_HOLE_END;

/// First serial port, 8 ports.
pub const COM1_PORT: u16 = 0x3F8;
/// Ports of the 8254 timer, 4: no timer exists.
pub const TIMER_PORT: u16 = 0x40;
/// The real-time clock of VMs that span cells: index, data.
pub const RTC_PORT: u16 = 0x70;
/// PCI configuration mechanism 1: address at this port, data at the four from 0xCFC.
pub const PCI_CONFIG_PORT: u16 = 0xCF8;
/// Ports of configuration mechanism 1.
pub const PCI_CONFIG_PORTS: u16 = 8;
/// pvpanic: a write reports a panic of the guest's kernel.
pub const PVPANIC_PORT: u16 = 0x505;
/// ACPI sleep control register (one byte).
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI sleep status register (one byte).
pub const SLEEP_STATUS_PORT: u16 = 0x601;
/// ACPI reset register (one byte).
pub const RESET_PORT: u16 = 0x602;
/// Value that the guest writes to the reset register.
pub const RESET_VALUE: u8 = 0x42;
/// I/O ports that PCI BARs could use; no device here has one.
pub const PCI_IO_PORTS: Range<u16> = 0x1000..0x1100;

/// COM1's interrupt, on the IOAPIC.
pub const SERIAL_GSI: u32 = 4;
/// The ACPI generic event device's interrupt, on the IOAPIC.
pub const EVENT_GSI: u32 = 5;
/// The interrupt that reports a change of the VM's generation id, on the IOAPIC.
pub const GENERATION_GSI: u32 = 6;
/// Pins of the IOAPIC; numbers from here on are routes of MSIs.
pub const IOAPIC_PINS: u32 = 24;
/// The first interrupt number of MSI routes.
pub const MSI_GSI_START: u32 = IOAPIC_PINS;
/// One past the last interrupt number KVM routes.
pub const MSI_GSI_END: u32 = 4096;

/// The parts of the address map that depend on the VM's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// RAM in the order of addresses: one region or two.
    pub ram: Vec<Range<u64>>,
    /// Persistent memory, a region for each size given.
    pub pmem: Vec<Range<u64>>,
    /// The 64-bit PCI window.
    pub mmio64: Range<u64>,
}

impl Layout {
    /// Returns the map of a VM with `ram_bytes` of memory and persistent memory regions of `pmem_bytes`.
    /// Returns `None` if it does not fit into 52 bits of address.
    pub fn new(ram_bytes: u64, pmem_bytes: &[u64]) -> Option<Self> {
        let ram = ram_regions(ram_bytes)?;
        let mut next = ram
            .last()
            .map_or(HIGH_RAM_START, |last| last.end)
            .max(HIGH_RAM_START);
        let mut pmem = Vec::with_capacity(pmem_bytes.len());
        for bytes in pmem_bytes {
            let start = next.checked_next_multiple_of(ABOVE_RAM_ALIGN)?;
            next = start.checked_add(*bytes)?;
            pmem.push(start..next);
        }
        let start = next.checked_next_multiple_of(ABOVE_RAM_ALIGN)?;
        let mmio64 = start..start.checked_add(MMIO64_BYTES)?;
        (mmio64.end <= 1 << 52).then_some(Self { ram, pmem, mmio64 })
    }

    /// Returns the end of RAM, which is the size of the memory's file.
    pub fn ram_end(&self) -> u64 {
        self.ram.last().map_or(0, |last| last.end)
    }

    /// Returns the number of address bits with which the guest can reach everything.
    pub fn address_bits(&self) -> u32 {
        u64::BITS - (self.mmio64.end - 1).leading_zeros()
    }
}

/// Splits RAM around the hole below 4 GiB.
fn ram_regions(bytes: u64) -> Option<Vec<Range<u64>>> {
    if bytes <= LOW_RAM_END {
        return Some(vec![Range { start: 0, end: bytes }]);
    }
    let high_end = HIGH_RAM_START.checked_add(bytes - LOW_RAM_END)?;
    Some(vec![0..LOW_RAM_END, HIGH_RAM_START..high_end])
}
