//! One VM's part in one cell: guest memory, vCPUs, devices, sandbox.

pub mod arch;
pub mod bus;
pub mod ending;
pub mod launch;
pub mod memory;
pub mod power;
pub mod sandbox;
pub mod virtio;
