//! The shard: one VM, or its share in one cell, with guest memory, vCPUs, devices and sandbox.

pub mod arch;
pub mod bus;
pub mod card;
pub mod devices;
pub mod ending;
pub mod folder;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod generation;
pub mod interrupt;
pub mod kick;
pub mod kind;
pub mod machine;
pub mod memory;
pub mod paging;
pub mod pci;
pub mod power;
pub mod probe;
pub mod process;
pub mod quiescer;
pub mod rtc;
pub mod sandbox;
mod sealed_process;
pub mod serial;
pub mod sharing;
pub mod snapshot;
pub mod span;
pub mod vcpu;
pub mod vcpu_stop;
pub mod virtio;

use std::io;

pub use shard_api::{chain, cmdline, launch, ports};

/// Functions of this crate that a monitor uses.
pub const PLATFORM: shard_api::Platform = shard_api::Platform {
    processor: || span::host::read().map_err(io::Error::other),
    kernel_image: arch::x86_64::kernel::image,
};
