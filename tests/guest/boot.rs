//! Entry of the CPUs: the first one as the boot protocol leaves it, the others from a start-up interrupt.
//!
//! The others begin in real mode at [`TRAMPOLINE`], where the first CPU has copied `trampoline`, and go to
//! 64-bit mode in one step, with the page tables that the boot protocol made. Selectors are the boot
//! protocol's: code 0x10, data 0x18.

use core::arch::global_asm;
use core::ptr::{addr_of, copy_nonoverlapping, write_volatile};

use crate::cpu;
use crate::enumeration::MACHINE_CPUS_MAX;

/// Where the other CPUs start, in real mode: free memory below the legacy hole, past the command line.
pub const TRAMPOLINE: usize = 0x4_0000;
/// The vector of a start-up interrupt that leads there.
pub const STARTUP_VECTOR: u8 = (TRAMPOLINE >> 12) as u8;
/// Interrupts nest as deep as there are priorities; each takes less than a KiB.
const STACK_BYTES: usize = 64 << 10;

#[repr(C, align(4096))]
struct Stacks([[u8; STACK_BYTES]; MACHINE_CPUS_MAX]);

#[unsafe(no_mangle)]
static mut STACKS: Stacks = Stacks([[0; STACK_BYTES]; MACHINE_CPUS_MAX]);

global_asm!(
    ".section .text.start,\"ax\"",
    ".global _start",
    "_start:",
    "cli",
    "mov rax, cr0",
    "and rax, ~4",
    "or rax, 2",
    "mov cr0, rax",
    "mov rax, cr4",
    "or rax, 0x600",
    "mov cr4, rax",
    "lea rsp, [rip + STACKS + {stack}]",
    "mov rdi, rsi",
    "call first_cpu",
    "ud2",
    // Real mode. Addresses count from the trampoline, whose segment CS has.
    ".balign 16",
    ".global trampoline",
    ".global trampoline_pages",
    ".global trampoline_end",
    ".code16",
    "trampoline:",
    "cli",
    "mov ax, cs",
    "mov ds, ax",
    ".byte 0x66, 0x0f, 0x01, 0x16", // lgdt with a base of 32 bits
    ".word trampoline_table - trampoline",
    "mov eax, cr4",
    "or eax, 0x620", // PAE, and what SSE needs
    "mov cr4, eax",
    ".byte 0x66, 0xa1", // mov eax, [trampoline_pages]
    ".word trampoline_pages - trampoline",
    "mov cr3, eax",
    "mov ecx, 0xc0000080", // EFER: long mode
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "mov eax, cr0",
    "and eax, 0x9ffffffb", // caches on, no emulation
    "or eax, 0x80000003",  // paging, protection
    "mov cr0, eax",
    ".byte 0x66, 0xea", // jmp far 0x10:trampoline_64
    ".long {trampoline} + trampoline_64 - trampoline",
    ".word 0x10",
    ".code64",
    "trampoline_64:",
    "mov eax, 0x18",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "mov fs, eax",
    "mov gs, eax",
    // The initial APIC id is the CPU's number.
    "mov eax, 1",
    "cpuid",
    "shr ebx, 24",
    "mov edi, ebx",
    "lea eax, [rdi + 1]",
    "imul rax, rax, {stack}",
    "mov ecx, offset STACKS",
    "lea rsp, [rax + rcx]",
    "mov eax, offset other_cpu",
    "call rax",
    "ud2",
    ".balign 8",
    "trampoline_descriptors:",
    ".quad 0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff",
    "trampoline_table:",
    ".word 31",
    ".long {trampoline} + trampoline_descriptors - trampoline",
    "trampoline_pages:",
    ".long 0",
    "trampoline_end:",
    stack = const STACK_BYTES,
    trampoline = const TRAMPOLINE,
);

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_pages: u8;
    static trampoline_end: u8;
}

/// Copies the trampoline to the target of start-up interrupts.
pub fn lay_trampoline() {
    let (start, pages, end) = (
        addr_of!(trampoline) as usize,
        addr_of!(trampoline_pages) as usize,
        addr_of!(trampoline_end) as usize,
    );
    // SAFETY: the memory there is nobody's, and no other CPU runs yet. The page tables are below 4 GiB.
    unsafe {
        copy_nonoverlapping(start as *const u8, TRAMPOLINE as *mut u8, end - start);
        write_volatile(
            (TRAMPOLINE + pages - start) as *mut u32,
            cpu::page_tables() as u32,
        );
    }
}

/// Address of the ACPI tables, from the boot protocol's structure.
pub fn rsdp(boot_params: usize) -> usize {
    const RSDP: usize = 0x70;
    // SAFETY: the boot protocol's structure, which nothing has overwritten; the field is 8 bytes at a
    // multiple of 8.
    unsafe { *((boot_params + RSDP) as *const usize) }
}

/// The number after `name` in the kernel's command line, or `otherwise`.
pub fn option(boot_params: usize, name: &[u8], otherwise: u32) -> u32 {
    const COMMAND_LINE: usize = 0x228;
    // SAFETY: the boot protocol's structure, which nothing has overwritten; the command line ends with a zero
    // byte.
    unsafe {
        let mut at = *((boot_params + COMMAND_LINE) as *const u32) as usize as *const u8;
        while *at != 0 {
            let mut matched = 0;
            while matched < name.len() && *at.add(matched) == name[matched] {
                matched += 1;
            }
            if matched == name.len() {
                let (mut value, mut digit) = (0, at.add(matched));
                while (*digit).is_ascii_digit() {
                    value = value * 10 + u32::from(*digit - b'0');
                    digit = digit.add(1);
                }
                return value;
            }
            at = at.add(1);
        }
    }
    otherwise
}
