//! The guest's agent: its protocol, its server in the guest, its client on the host.
//!
//! One connection carries one request. The transport is any byte stream: vsock into a VM, TCP into a lab host.

pub mod client;
pub mod protocol;
pub mod server;

/// The vsock port the agent listens on.
pub const VSOCK_PORT: u32 = 1024;
