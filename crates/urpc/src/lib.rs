//! Messages between cells (Multikernel, SOSP '09, section 4.6).
//!
//! A channel carries messages of one cache line from one sender to one receiver:
//!
//! - [`message`]: the 64 bytes;
//! - [`ring`]: a channel in shared memory, tuned to the cache-coherence protocol;
//! - [`pipe`]: bytes in shared memory, in one direction, for users with their own means to wake a side;
//! - [`fragment`]: longer byte strings as several messages;
//! - [`published`]: the latest value of one writer, for any number of readers;
//! - [`poll`]: how long a reader polls before it blocks, as a pure decision;
//! - `host` (feature `host`): rings in memory that processes share, and blocking;
//! - `tls` (feature `tls`): byte streams between hosts;
//! - `version` (feature `host`): which versions of a protocol two programs have in common.
//!
//! The other modules need no operating system. Sending and receiving allocate no memory.
//!
//! A channel does not trust its other side: arbitrary writes to the shared memory cause at worst an error or
//! wrong messages.

#![cfg_attr(not(any(feature = "host", test, loom)), no_std)]

pub mod fragment;
#[cfg(all(feature = "host", not(loom)))]
pub mod host;
pub mod message;
pub mod pipe;
pub mod poll;
pub mod published;
pub mod ring;
mod side;
mod sync;
#[cfg(all(feature = "tls", not(loom)))]
pub mod tls;
#[cfg(feature = "host")]
pub mod version;

pub use message::Message;
pub use ring::{Receiver, RecvError, Ring, SendError, Sender};
