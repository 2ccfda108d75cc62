//! Virtio 1.2 devices over PCI.
//!
//! A device has two halves. Its *front end* ([`VirtioDevice`]) serves the transport on a vCPU's thread:
//! features, configuration space, activation, reset. Its *handler* ([`worker::Handler`]) runs on a thread of
//! the device's own, and is the only code that accesses the queues. Every device's folder has the same files:
//! `mod.rs` (the contract), `device.rs` (the front end), `handler.rs` (the queues), `metrics.rs` (counters),
//! `syscalls.rs` (system calls of its thread), `tests.rs`.

pub mod balloon;
pub mod block;
pub mod device;
pub mod fs;
pub mod net;
mod one_queue;
pub mod pmem;
pub mod rng;
mod segments;
mod serve;
#[cfg(test)]
pub(crate) mod test_driver;
pub mod transport;
pub mod vsock;
pub mod worker;
mod worker_device;

pub use device::{Activation, ActiveQueue, DeviceError, Interrupt, VirtioDevice, VirtioId};
