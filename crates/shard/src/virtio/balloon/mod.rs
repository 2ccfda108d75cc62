//! The memory balloon (Virtio 1.2, section 5.5): reclaims memory from the guest, and free pages as they
//! become free.
//!
//! Released pages leave the guest's memory file, so that the host can use them; a later access finds a zero
//! page. If several shards have replicas of the memory, all have discarded a page before the guest's request
//! completes. If the guest deflates by itself (out of memory), the target follows the rest: a new request at
//! once for the needed memory would only make both sides spin.

mod device;
mod handler;
mod metrics;
mod release;
mod state;
mod syscalls;
#[cfg(test)]
mod tests;

pub use device::Balloon;
#[cfg(fuzzing)]
pub(crate) use device::bare;
#[cfg(test)]
pub(crate) use release::release;
pub use release::{PlainRelease, Release};
pub use state::BalloonHandle;
pub use syscalls::SYSCALLS;
