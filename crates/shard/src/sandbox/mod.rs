//! The sandbox of a shard: what it can still do once the guest runs.

mod threads;

pub use threads::{Syscall, ThreadKind, Threads};
