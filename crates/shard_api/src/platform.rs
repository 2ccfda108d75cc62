//! Functions of KVM and kernel files that a monitor calls. The program passes them to it.

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
    /// Returns the addresses in guest memory that the kernel in a file requests; empty if the kernel decides
    /// that itself.
    pub kernel_image: fn(&mut File) -> Range<u64>,
}

/// Properties of a host's processor on which the shards of a VM on several hosts must agree.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostProcessor {
    /// CPUID leaves that KVM supports.
    pub leaves: Vec<Leaf>,
    /// The time-stamp counter.
    pub counter: Counter,
    /// Whether the host's kernel uses this counter as its clock source.
    pub relies_on_counter: bool,
}
