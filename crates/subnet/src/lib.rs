//! Networks: TAP devices and unprivileged user-mode networking.
//!
//! The monitor calls this before a shard starts, and receives open files, which are all that a shard needs.
//! Between a user-mode card and its passt, a separate [`process`] runs the [`relay`], which drops frames to
//! the host and the cluster by the decisions of [`filter`].

mod error;
pub mod filter;
mod forward;
pub mod frame;
pub mod host;
mod host_socket;
mod listing;
mod mac;
pub mod nat;
pub mod network;
pub mod offload;
pub mod passt;
pub mod pcap;
pub mod process;
pub mod relay;
pub mod resolver;
#[cfg(test)]
mod samples;
pub mod tap;

pub use error::SubnetError;
pub use forward::{PortForward, Protocol};
pub use mac::{mac_address, parse_mac, write_mac};
pub use process::Egress;
