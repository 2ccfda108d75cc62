//! The size of a page of memory on x86-64: 4 KiB, of hosts and guests alike (Intel SDM, volume 3A).
//!
//! One number with two types: [`PAGE_BYTES`] for addresses and files, [`PAGE_LEN`] for arrays and slices.

pub mod program;

/// Length of a page, bytes.
pub const PAGE_BYTES: u64 = 4096;

/// Length of a page as that of an array or slice, bytes.
pub const PAGE_LEN: usize = PAGE_BYTES as usize;
