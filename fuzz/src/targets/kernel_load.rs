//! A kernel, and an initramfs after it, loaded into guest memory.

use std::sync::Arc;

use crate::file::file_of;
use shard::arch::x86_64::kernel;
use vm_memory::{GuestAddress, GuestMemoryMmap};

const MEMORY_BYTES: usize = 4 << 20;

pub fn fuzz(bytes: &[u8]) {
    let ranges = [(GuestAddress(0), MEMORY_BYTES)];
    let memory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).expect("guest memory"));
    if let Ok(loaded) = kernel::load(&memory, &mut file_of(bytes), false) {
        let _ = kernel::load_initrd(&memory, &mut file_of(&[1; 5000]), &loaded);
        let _ = kernel::write_cmdline(&memory, "console=hvc0 root=/dev/vda", &loaded);
    }
}
