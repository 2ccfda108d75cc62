//! A VM that spans several cells: a shard in each, this being one.
//!
//! ```text
//! vCPU thread --ICR, HLT--> span_vcpu (its x2APIC) --> router --> event slot of another vCPU here --kick--> its thread
//!                                                    |
//!                                                    +--> link (a ring) ==> receiver in another shard --> slot there
//! vCPU thread --device--> device proxy client --> link ==> receiver at home --> device proxy server --> bus --> device
//! device at home --MSI--> wiring --> router
//! ```
//!
//! - [`crate::launch::SpanLaunch`]: what a shard is told of the VM that it is a part of; [`machine`]: how it is made;
//! - [`span_vcpu`]: the vCPU's interrupt controller and its sleep; [`timer`] its alarm, [`timer_throttle`] how often that may ring, [`clock`] its TSC,
//!   [`tsc_step_barrier`] how that follows other hosts', [`pv_eoi`] ends of interrupts without exits, [`cr3_reporter`] its page tables' root;
//! - [`residency`]: whether a vCPU is here, and what follows for its mail;
//! - [`router`], [`event_slot`], [`pending_events`], [`run_state`], [`owner_table`], [`enabled_apics`], [`startup`]: from whoever signals to the vCPU's
//!   thread, wherever that is;
//! - [`link`], [`packet`], [`vcpu_migration`]: what goes between shards, vCPUs that move among it;
//! - [`host`], [`shard_api::relation`]: what hosts must have in common, and how their clocks go together;
//! - [`device_proxy_client`], [`device_proxy_server`], [`wiring`]: devices, which are all in one shard, the home.
//!
//! The Multikernel (SOSP '09, section 3) is the model: shards share the guest's memory, as the guest expects, and nothing
//! else. A vCPU's controller belongs to the shard that runs it, and all others send messages.

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
