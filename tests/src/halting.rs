//! Guests of a few instructions, and the end of the cells that have them. Any KVM runs them, a debug build
//! too.

use std::path::Path;

/// An ELF kernel of three instructions: it disables interrupts and halts forever.
pub fn halting_guest() -> Vec<u8> {
    elf(&[0xfa, 0xf4, 0xeb, 0xfd])
}

/// Memory that [`numbering_guest`] uses, bytes: from 16 to 80 MiB.
pub const NUMBERED_BYTES: u64 = 64 << 20;

/// An ELF kernel that writes another number to both ends of each page of its memory in each round, reads them
/// back, and prints `r`. A wrong number prints `B` and ends that.
pub fn numbering_guest() -> Vec<u8> {
    numbering_guest_of(NUMBERED_BYTES)
}

/// The same for another amount of memory, bytes: from 16 MiB, up to 3 GiB at most.
pub fn numbering_guest_of(bytes: u64) -> Vec<u8> {
    let end = u32::try_from((16 << 20) + bytes).expect("it ends below 4 GiB");
    let [e0, e1, e2, e3] = end.to_le_bytes();
    elf(&[
        0xfa, // cli
        0x31, 0xed, // xor ebp, ebp
        0xff, 0xc5, // round: inc ebp
        0xbf, 0x00, 0x00, 0x00, 0x01, // mov edi, 16 MiB
        0x89, 0xf8, // write: mov eax, edi
        0x31, 0xe8, // xor eax, ebp
        0x89, 0x07, // mov [rdi], eax
        0x89, 0x87, 0xfc, 0x0f, 0x00, 0x00, // mov [rdi + 4092], eax
        0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
        0x81, 0xff, e0, e1, e2, e3, // cmp edi, end
        0x72, 0xe6, // jb write
        0xbf, 0x00, 0x00, 0x00, 0x01, // mov edi, 16 MiB
        0x89, 0xf8, // read: mov eax, edi
        0x31, 0xe8, // xor eax, ebp
        0x39, 0x07, // cmp [rdi], eax
        0x75, 0x1f, // jne wrong
        0x39, 0x87, 0xfc, 0x0f, 0x00, 0x00, // cmp [rdi + 4092], eax
        0x75, 0x17, // jne wrong
        0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
        0x81, 0xff, e0, e1, e2, e3, // cmp edi, end
        0x72, 0xe2, // jb read
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, b'r', // mov al, 'r'
        0xee, // out dx, al
        0xeb, 0xb3, // jmp round
        0x66, 0xba, 0xf8, 0x03, // wrong: mov dx, 0x3f8
        0xb0, b'B', // mov al, 'B'
        0xee, // out dx, al
        0xf4, // stop: hlt
        0xeb, 0xfd, // jmp stop
    ])
}

/// Memory that [`filling_guest`] fills, bytes: from 16 to 80 MiB.
pub const FILLED_BYTES: u64 = 64 << 20;

/// An ELF kernel that writes to each page of its memory the page's own address, prints `f`, and halts. No two
/// pages of a guest are equal, and each page equals that of another guest.
pub fn filling_guest() -> Vec<u8> {
    let end = u32::try_from((16 << 20) + FILLED_BYTES).expect("it ends below 4 GiB");
    let [e0, e1, e2, e3] = end.to_le_bytes();
    elf(&[
        0xfa, // cli
        0xbf, 0x00, 0x00, 0x00, 0x01, // mov edi, 16 MiB
        0x89, 0x3f, // fill: mov [rdi], edi
        0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
        0x81, 0xff, e0, e1, e2, e3, // cmp edi, end
        0x72, 0xf0, // jb fill
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, b'f', // mov al, 'f'
        0xee, // out dx, al
        0xf4, // stop: hlt
        0xeb, 0xfd, // jmp stop
    ])
}

/// An ELF kernel that writes a letter to the start of its first persistent memory, then prints what it reads
/// there, again and again. The VM has at most 3 GiB of memory, so that the persistent memory is at 4 GiB. The
/// page table that maps it is at 0x60000. Its entry, the first beyond the 4 GiB that are mapped at the start,
/// is at 0xa020.
pub fn region_guest(letter: u8) -> Vec<u8> {
    elf(&[
        0xfa, // cli
        0xc7, 0x04, 0x25, 0x00, 0x00, 0x06, 0x00, 0x83, 0x00, 0x00, 0x00, // mov dword [0x60000], 0x83
        0xc7, 0x04, 0x25, 0x04, 0x00, 0x06, 0x00, 0x01, 0x00, 0x00, 0x00, // mov dword [0x60004], 1
        0xc7, 0x04, 0x25, 0x20, 0xa0, 0x00, 0x00, 0x03, 0x00, 0x06, 0x00, // mov dword [0xa020], 0x60003
        0xbf, 0x01, 0x00, 0x00, 0x00, // mov edi, 1
        0x48, 0xc1, 0xe7, 0x20, // shl rdi, 32
        0xc6, 0x07, letter, // mov byte [rdi], letter
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0x8a, 0x07, // print: mov al, [rdi]
        0xee, // out dx, al
        0xb9, 0x00, 0x00, 0x04, 0x00, // mov ecx, 0x40000
        0xff, 0xc9, // wait: dec ecx
        0x75, 0xfc, // jnz wait
        0xeb, 0xf2, // jmp print
    ])
}

/// An ELF kernel whose first two vCPUs spin forever. The first one writes an endless loop to 0x50000, where
/// it starts the second one by the interrupt command register of its x2APIC: INIT, then a start-up IPI (Intel
/// SDM, volume 3, section 11.12).
pub fn spinning_guest() -> Vec<u8> {
    elf(&[
        0x66, 0xc7, 0x04, 0x25, 0x00, 0x00, 0x05, 0x00, 0xeb, 0xfe, // mov word [0x50000], 0xfeeb
        0xb9, 0x1b, 0x00, 0x00, 0x00, 0x0f, 0x32, // mov ecx, IA32_APIC_BASE; rdmsr
        0x0d, 0x00, 0x0c, 0x00, 0x00, 0x0f, 0x30, // or eax, enabled and x2APIC; wrmsr
        0xb9, 0x30, 0x08, 0x00, 0x00, // mov ecx, x2APIC ICR
        0xba, 0x01, 0x00, 0x00, 0x00, // mov edx, APIC id 1
        0xb8, 0x00, 0x45, 0x00, 0x00, 0x0f, 0x30, // mov eax, INIT; wrmsr
        0xb8, 0x50, 0x46, 0x00, 0x00, 0x0f, 0x30, // mov eax, start-up at 0x50000; wrmsr
        0xeb, 0xfe, // jmp to itself
    ])
}

/// An ELF kernel of this code, which is entered in 64-bit mode.
fn elf(code: &[u8]) -> Vec<u8> {
    const BASE: u64 = 0x10_0000;
    const HEADERS: u64 = 64 + 56;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // An executable for x86-64, with one program header and no section.
    elf.extend([2, 0, 0x3e, 0, 1, 0, 0, 0]);
    for address in [BASE + HEADERS, 64, 0] {
        elf.extend(address.to_le_bytes());
    }
    elf.extend(0_u32.to_le_bytes());
    for count in [64_u16, 56, 1, 64, 0, 0] {
        elf.extend(count.to_le_bytes());
    }
    // One segment: all of the file, to read and to execute.
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    let bytes = HEADERS + code.len() as u64;
    for field in [0, BASE, BASE, bytes, bytes, 0x1000] {
        elf.extend(field.to_le_bytes());
    }
    elf.extend(code);
    elf
}

/// Kills all VMs of a runtime directory and ends its two cells, by a function that runs `mirrorball`. In a
/// test that fails it prints the logs of the cells first.
pub fn end_cells(runtime: &Path, call: impl Fn(&[&str])) {
    if std::thread::panicking() {
        for number in 0..2 {
            let log = std::fs::read_to_string(runtime.join(format!("cells/{number}/log")));
            eprintln!("--- the log of cell {number}\n{}", log.unwrap_or_default());
        }
    }
    for vm in std::fs::read_dir(runtime.join("vms"))
        .into_iter()
        .flatten()
        .flatten()
    {
        // An entry that is no VM's is no error here.
        call(&["kill", &vm.file_name().to_string_lossy()]);
    }
    call(&["cluster", "down", "--leave"]);
}
