//! The network card (Virtio 1.2, section 5.1).
//!
//! There are three backends. A TAP device moves frames by `readv` and `writev` directly between the kernel
//! and guest memory, with checksum and segmentation offloads and several queue pairs. A stream socket (passt)
//! carries each frame after its length, without offloads. A packet socket (the gateway of a subnet) carries
//! each frame in a packet, with the same offloads as a TAP device; a gateway of an older release has none. If
//! the other end closes, the guest sees its link go down and continues.
//!
//! One thread serves all of a card's queues. If the guest has no free receive buffers, the device stops
//! reading, so that the kernel's queue (or passt's socket) holds the frames and applies its own limits.
//!
//! ```text
//!   guest tx chain ── Segments ──► writev(tap) │ length + frame ─► Stream::out ─► send
//!   guest rx chains ◄─ Posted ◄──  readv(tap)  │ length + frame ◄─ Stream::in  ◄─ recv
//! ```

mod control;
mod device;
mod handler;
mod header;
mod metrics;
#[cfg(test)]
mod offload_tests;
mod posted;
mod receiver;
mod stream;
mod syscalls;
mod tap;
#[cfg(test)]
mod tests;
mod window;

#[cfg(fuzzing)]
pub(crate) use device::bare;
pub use device::{Backend, Net};
pub use metrics::NetMetrics;
pub use syscalls::{REQUESTS, SYSCALLS};
