//! Questions of a monitor about KVM and a kernel's file. The program hands it the functions that answer them.

use std::fs::File;
use std::io;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::cpuid::Leaf;
use crate::relation::Counter;

/// Functions of the program's shard that a monitor calls without linking it.
#[derive(Clone, Copy, Debug)]
pub struct Platform {
    /// Reads this host's processor from KVM.
    pub processor: fn() -> io::Result<HostProcessor>,
    /// Finds where the kernel in a file is to lie in guest memory; empty if the kernel decides that itself.
    pub kernel_image: fn(&mut File) -> Range<u64>,
}

/// What a host's processor has that the shards of a VM on several hosts must agree on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostProcessor {
    /// What KVM supports of CPUID.
    pub leaves: Vec<Leaf>,
    /// The time-stamp counter.
    pub counter: Counter,
    /// Whether the host's kernel takes its time from it.
    pub relies_on_counter: bool,
}
