//! One VM's part in one cell: guest memory, vCPUs, devices, sandbox.

pub mod arch;
pub mod bus;
pub mod chain;
pub mod cmdline;
pub mod devices;
pub mod ending;
mod fault_point;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod gate;
pub mod generation;
pub mod interrupt;
pub mod kick;
pub mod launch;
pub mod machine;
pub mod memory;
pub mod pci;
pub mod ports;
pub mod power;
pub mod probe;
pub mod process;
pub mod rtc;
pub mod sandbox;
pub mod serial;
pub mod sharing;
pub mod snapshot;
pub mod span;
pub mod vcpu;
pub mod virtio;
