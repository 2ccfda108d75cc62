//! The monitor of one cell: starts shards, keeps the registry of VMs, serves their consoles and controls.

pub mod console;
pub mod ending;
pub mod link;
pub mod open;
pub mod spawn;
pub mod vm;
