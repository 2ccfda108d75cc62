//! The keeper of one VM: the parent of the VM's processes, so that they outlive the VM's monitor.
//!
//! A monitor starts a keeper ([`client::Keeper::start`]), and has it start the VM's processes. Descriptors
//! that the VM's next monitor needs are copied into the keeper's slot. When the monitor ends, the keeper
//! starts the next one, its successor, which takes the slot's descriptors. Without a slot or a successor the
//! keeper kills the VM's processes and ends.
//!
//! A cell that serves a VM is its monitor, too. It connects to a socket that the VM's first monitor left
//! ([`message::Message::Listen`]). The keeper accepts it when no other monitor is connected, and waits for
//! that for 1 s before it starts a successor.
//!
//! Before a start the keeper kills the former monitor, which may have lost only its connection: two monitors
//! never serve one VM.
//!
//! The first start of a successor within 10 s is at once. The next ones wait for 50 ms, 100 ms and so on up
//! to 1 s. When a monitor is gone after ten starts within 10 s, the keeper ends the VM.

pub mod client;
mod lease;
pub mod limits;
pub mod message;
pub mod server;
pub mod socket;
pub mod spawn;
pub mod state;
