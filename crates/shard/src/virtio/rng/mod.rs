//! The entropy source (Virtio 1.2, section 5.4): fills the driver's buffers from the host's generator.

mod device;
mod handler;
mod metrics;
mod syscalls;
#[cfg(test)]
mod tests;

pub use device::Rng;
#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use syscalls::SYSCALLS;
