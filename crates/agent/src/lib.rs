//! The guest's agent: its protocol, its server in the guest, its client on the host.
//!
//! One connection carries one request. The transport is any stream socket: vsock into a VM, TCP into a lab
//! host. Neither side trusts the other: frames are bounded, buffers hold one frame, and the client writes
//! only into what its caller gave it.

pub mod client;
pub mod panic;
pub mod protocol;
pub mod server;
mod wire;

/// The vsock port the agent listens on.
pub const VSOCK_PORT: u32 = 1024;

/// This agent's version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
