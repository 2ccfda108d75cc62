//! A REST API over a unix socket: VMs and cells as resources, events as a stream, metrics for Prometheus.
//!
//! [`serve`] is the process. It runs no VMs, so it can be killed and restarted at any time. [`caller`]
//! decides rights, [`api`] has the resources, `guest` those inside a guest, `copies` clones and snapshots,
//! `host` cells and memory. `idempotency` replays responses to repeated requests, and `connections` and
//! `slots` bound each user's resources. [`views`] defines the JSON of resources, [`problem`] that of errors;
//! [`events`] and [`metrics`] are the rest. Requests read the same state as any command ([`registry`]).

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
