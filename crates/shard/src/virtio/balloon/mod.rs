//! The memory balloon (Virtio 1.2, section 5.5): takes memory back from the guest, and free pages as they
//! become free.
//!
//! Returned pages leave the guest's memory file, so the host really has them again; a later touch gives a
//! zero page. Where several shards have copies of the memory, all have forgotten a page when the guest hears
//! that it was taken. If the guest deflates by itself (out of memory), the target follows what is left:
//! asking again at once for what the guest needed would only make both sides spin.

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
pub use release::Release;
#[cfg(test)]
pub(crate) use release::release;
pub use state::BalloonHandle;
pub use syscalls::SYSCALLS;
