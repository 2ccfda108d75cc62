//! Files without a name that hold the fuzzer's bytes.

use std::fs::File;
use std::io::{Seek, Write};

use nix::sys::memfd::{MFdFlags, memfd_create};

/// A memory file that holds `bytes`, at its start.
pub fn file_of(bytes: &[u8]) -> File {
    let mut file = File::from(memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("a memory file"));
    file.write_all(bytes).expect("memory");
    file.rewind().expect("a file can be rewound");
    file
}

/// A memory file of `bytes` zeroes, without using memory for them.
pub fn sparse_file(bytes: u64) -> File {
    let file = file_of(&[]);
    file.set_len(bytes).expect("a sparse file");
    file
}
