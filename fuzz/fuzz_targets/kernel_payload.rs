//! The ELF kernel inside a bzImage that a user imports.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|kernel: &[u8]| {
    if let Some(elf) = diskstore::image::extract(kernel) {
        assert!(elf.starts_with(b"\x7fELF"));
    }
});
