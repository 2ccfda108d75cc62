//! The ELF kernel inside a bzImage that a user imports.

pub fn fuzz(kernel: &[u8]) {
    if let Some(elf) = diskstore::image::extract(kernel) {
        assert!(elf.starts_with(b"\x7fELF"));
    }
}
