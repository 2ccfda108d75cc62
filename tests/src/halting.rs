//! A guest that halts at once, and the end of the cells that have it. Any KVM runs it within milliseconds, a
//! debug build too.

use std::path::Path;

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
