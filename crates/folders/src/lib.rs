//! Shared folders: a process serves one folder of the host to one guest.
//!
//! The guest's requests are FUSE messages. Its shard takes them from a virtio queue and sends each as one
//! packet of a socket; the process replies with one packet ([`packet`]). The process parses a guest's bytes,
//! so it may be in the guest's hands: its sandbox confines it to the folder, the shard checks its
//! replies.
//!
//! - [`process`]: starts the process, from the side of the code that opens a VM's files.
//! - `server` (feature `server`): serves requests, in the process.
//! - `lend` (feature `server`): passes open files to the shard, whose pages the guest shares with others.
//! - [`request`]: decides which requests are served, and removes what a guest may not choose.

pub mod arguments;
#[cfg(any(test, feature = "guest"))]
pub mod guest;
pub mod init;
#[cfg(feature = "server")]
pub mod lend;
#[cfg(feature = "server")]
mod link;
pub mod packet;
pub mod process;
pub mod request;
#[cfg(feature = "server")]
pub mod server;

pub use arguments::{Arguments, Cache};
pub use process::{FolderProcess, FolderSpec, LeftFolder};
