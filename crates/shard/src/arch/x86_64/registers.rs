//! Registers of the first vCPU at its start. The other vCPUs keep KVM's reset state and wait for a start-up
//! interrupt.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use super::kernel::Entry;
use super::layout::{BOOT_STACK, GDT_START, IDT_START, PAGE_TABLES_START, PVH_INFO_START, ZERO_PAGE_START};

const CR0_PROTECTED: u64 = 1;
const CR0_EXTENSION: u64 = 1 << 4;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_ENABLED: u64 = 1 << 8;
const EFER_LONG_ACTIVE: u64 = 1 << 10;
const RFLAGS_ALWAYS: u64 = 2;

const MSR_MISC_ENABLE: u32 = 0x1A0;
const MISC_FAST_STRINGS: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2FF;
const MTRR_ENABLED_WRITE_BACK: u64 = (1 << 11) | 6;

/// Returns descriptors in the order of their selectors: null, unused, code (0x10), data (0x18), task (0x20).
/// Linux requires `__BOOT_CS` = 0x10 and `__BOOT_DS` = 0x18.
pub fn gdt(entry: Entry) -> [u64; 5] {
    let code = match entry {
        Entry::Linux64(_) => descriptor(0xA09B, 0xF_FFFF),
        Entry::Pvh(_) => descriptor(0xC09B, 0xF_FFFF),
    };
    [0, 0, code, descriptor(0xC093, 0xF_FFFF), descriptor(0x008B, 0x67)]
}

/// Returns a descriptor of base 0 with these flags (as bits 40 to 55) and limit.
fn descriptor(flags: u64, limit: u64) -> u64 {
    ((limit & 0xF_0000) << 32) | (flags << 40) | (limit & 0xFFFF)
}

/// Returns the segment register that the processor caches for descriptor `index`.
fn segment(gdt: &[u64; 5], index: u16) -> kvm_segment {
    let value = gdt[usize::from(index)];
    let bit = |place: u32| ((value >> place) & 1) as u8;
    let granular = bit(55);
    let limit = ((value & 0xFFFF) | ((value >> 32) & 0xF_0000)) as u32;
    kvm_segment {
        base: 0,
        limit: if granular == 1 {
            (limit << 12) | 0xFFF
        } else {
            limit
        },
        selector: index * 8,
        type_: ((value >> 40) & 0xF) as u8,
        present: bit(47),
        dpl: ((value >> 45) & 3) as u8,
        db: bit(54),
        s: bit(44),
        l: bit(53),
        g: granular,
        avl: bit(52),
        unusable: 0,
        padding: 0,
    }
}

/// Returns the general registers at `entry`.
pub fn general(entry: Entry) -> kvm_regs {
    let registers = kvm_regs {
        rflags: RFLAGS_ALWAYS,
        ..Default::default()
    };
    match entry {
        Entry::Linux64(rip) => kvm_regs {
            rip,
            rsp: BOOT_STACK,
            rbp: BOOT_STACK,
            rsi: ZERO_PAGE_START,
            ..registers
        },
        Entry::Pvh(rip) => kvm_regs {
            rip,
            rbx: PVH_INFO_START,
            ..registers
        },
    }
}

/// Changes `special` (KVM's reset state) to the state that `entry` requires.
pub fn special(entry: Entry, special: &mut kvm_sregs) {
    let gdt = gdt(entry);
    special.gdt.base = GDT_START;
    special.gdt.limit = (size_of_val(&gdt) - 1) as u16;
    special.idt.base = IDT_START;
    special.idt.limit = 7;
    special.cs = segment(&gdt, 2);
    for data in [
        &mut special.ds,
        &mut special.es,
        &mut special.fs,
        &mut special.gs,
        &mut special.ss,
    ] {
        *data = segment(&gdt, 3);
    }
    special.tr = segment(&gdt, 4);
    match entry {
        Entry::Linux64(_) => {
            special.cr0 |= CR0_PROTECTED | CR0_EXTENSION | CR0_PAGING;
            special.cr3 = PAGE_TABLES_START;
            special.cr4 |= CR4_PAE;
            special.efer |= EFER_LONG_ENABLED | EFER_LONG_ACTIVE;
        }
        Entry::Pvh(_) => {
            special.cr0 = CR0_PROTECTED | CR0_EXTENSION;
            special.cr4 = 0;
        }
    }
}

/// Returns the model-specific registers whose reset values firmware would have changed.
pub fn model_specific() -> Result<Msrs, vmm_sys_util::fam::Error> {
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    Msrs::from_entries(&[
        entry(MSR_MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK),
        entry(MSR_MISC_ENABLE, MISC_FAST_STRINGS),
    ])
}
