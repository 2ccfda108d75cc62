//! One VM's part in one cell: guest memory, vCPUs, devices, sandbox.

pub mod arch;
pub mod bus;
pub mod card;
pub mod devices;
pub mod ending;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod generation;
pub mod interrupt;
pub mod kick;
pub mod kind;
pub mod machine;
pub mod memory;
pub mod pci;
pub mod power;
pub mod probe;
pub mod process;
pub mod quiescer;
pub mod rtc;
pub mod sandbox;
pub mod serial;
pub mod sharing;
pub mod snapshot;
pub mod span;
pub mod vcpu;
pub mod virtio;

use std::io;

pub use shard_api::{chain, cmdline, launch, ports};

/// What a monitor asks of this crate.
pub const PLATFORM: shard_api::Platform = shard_api::Platform {
    processor: || span::host::read().map_err(io::Error::other),
    kernel_image: arch::x86_64::kernel::image,
};
