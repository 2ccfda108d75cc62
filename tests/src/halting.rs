//! A guest that halts at once. Any KVM runs it within milliseconds, a debug build too.

/// An ELF kernel of three instructions: it disables interrupts and halts for ever.
pub fn halting_guest() -> Vec<u8> {
    const BASE: u64 = 0x10_0000;
    const CODE: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];
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
    let bytes = HEADERS + CODE.len() as u64;
    for field in [0, BASE, BASE, bytes, bytes, 0x1000] {
        elf.extend(field.to_le_bytes());
    }
    elf.extend(CODE);
    elf
}
