//! Channels between threads and processes of one host, and hosts that share memory.
//!
//! - [`memory`]: a ring or a pipe in a memory file, or in a part of a device's memory;
//! - [`channel`]: blocking send and receive, which poll before they block;
//! - [`block`]: how a blocked side waits and is woken, and the measured cost of that.

pub mod block;
pub mod channel;
pub mod memory;
#[cfg(test)]
mod tests;

pub use block::{Block, Doorbell, measure_block_ns};
pub use channel::{BlockingReceiver, BlockingSender, channel, end};
pub use memory::{MemoryError, SharedPipe, SharedRing};
