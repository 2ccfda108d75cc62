//! A VM that spans several cells: one shard in each cell, this being one of them.
//!
//! ```text
//! vCPU thread --ICR, HLT--> span_vcpu (x2APIC) --> router --> event slot here --kick--> thread of its vCPU
//!                                                     |
//!                                                     +--> link (ring) ==> receiver in another shard
//! vCPU thread --device--> proxy client --> link ==> home: receiver --> proxy server --> bus --> device
//! device at home --MSI--> wiring --> router
//! ```
//!
//! - The shard: [`crate::launch::SpanLaunch`] describes a shard's share of the VM; [`machine`] builds it.
//! - One vCPU: [`span_vcpu`] holds its local APIC and blocks when it halts. [`timer`] is its alarm,
//!   [`timer_throttle`] limits the rate of its timer interrupts, [`clock`] computes its TSC.
//!   [`tsc_step_barrier`] makes the TSC follow other hosts' clocks, [`pv_eoi`] ends interrupts without exits,
//!   and `cr3_reporter` reports the root of its page tables.
//! - Residency: [`residency`] decides whether a vCPU runs in this shard, and which of its events are
//!   forwarded.
//! - Delivery: [`router`], [`event_slot`], [`pending_events`], `run_state`, [`owner_table`],
//!   [`enabled_apics`] and [`startup`] bring an event from its sender to the vCPU's thread, in whichever
//!   shard that is.
//! - Messages: [`link`] is a channel between two shards, [`packet`] defines the messages, and
//!   [`vcpu_migration`] is the state of a vCPU that migrates.
//! - Hosts: [`host`] and [`shard_api::relation`] define what hosts must have in common and how their clocks
//!   relate.
//! - Devices, all of which are in one shard, the home: [`device_proxy_client`], [`device_proxy_server`],
//!   [`ioapic`] and [`wiring`].
//!
//! The model is the Multikernel (SOSP '09, section 3): shards share the guest's memory, as the guest expects,
//! and nothing else. A vCPU's local APIC belongs to the shard that runs it; all other shards send messages.

pub mod clock;
mod cr3_reporter;
pub mod device_proxy_client;
pub mod device_proxy_server;
pub mod enabled_apics;
pub mod event_slot;
pub mod host;
pub mod ioapic;
mod ioctls;
pub mod link;
pub mod machine;
pub mod owner_table;
pub mod packet;
pub mod pending_events;
pub mod pv_eoi;
pub mod residency;
pub mod router;
mod run_state;
pub mod span_vcpu;
pub mod startup;
pub mod timer;
mod timer_throttle;
pub mod tsc_step_barrier;
pub mod vcpu_migration;
pub mod wiring;
