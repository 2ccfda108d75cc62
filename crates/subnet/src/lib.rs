//! Networks: TAP devices and unprivileged user-mode networking.
//!
//! The monitor calls this before a shard starts; what it gets back are open files, which is all that a shard needs.

mod error;
mod forward;
mod mac;
pub mod passt;
pub mod tap;

pub use error::SubnetError;
pub use forward::{PortForward, Protocol};
pub use mac::{mac_address, parse_mac};
