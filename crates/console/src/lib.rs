//! A REST API over a unix socket: VMs and cells as resources, events as a stream, metrics for Prometheus.
//!
//! [`serve`] is the process, apart from all that runs VMs: it can be killed and started at any time. [`caller`] decides
//! who may do what, [`api`] has the resources, `guest` those inside a guest, `copies` clones and snapshots, `host` cells and memory,
//! `idempotency` answers those that are repeated,
//! `connections` and `slots` bound what one user has, [`views`] what resources look like, [`problem`] what an error looks like, [`events`] and [`metrics`] the rest. Requests are
//! answered from what any command sees ([`registry`]).

pub mod api;
pub mod caller;
mod connections;
mod copies;
pub mod events;
mod guest;
mod host;
mod idempotency;
pub mod metrics;
pub mod problem;
mod request_body;
pub mod serve;
mod slots;
mod trusted_path;
pub mod views;
