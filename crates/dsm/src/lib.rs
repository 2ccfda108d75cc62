//! Distributed shared memory for ordinary processes on several hosts, and for a VM that spans cells or hosts.
//!
//! The crate `coherence` is the protocol; this crate drives it. The crate `dsm_bench` has benches and
//! programs:
//!
//! - [`region`]: the memory, and the right to each page;
//! - [`userfault`]: faults reported by the kernel, and the mapping of pages;
//! - [`page_server`]: threads that serve faults and messages, one stripe of the pages each;
//! - [`link`], [`wire`]: streams between nodes and their transports;
//! - [`min_residency`]: minimum residency of a page; [`heat`]: pages that move most often; [`prefetch`]:
//!   pages requested before a thread needs them;
//! - [`merging`]: merged page tables of a guest; [`causal`]: causal order of other threads' messages;
//!   [`batches`]: their vector time;
//! - [`discards`]: pages whose contents are discarded;
//! - [`node`]: all of it together.
//!
//! Guarantees: an access to a page completes only while the protocol grants the node that right. A node that
//! can't continue ends, and so do all others, each with the reason. Other nodes are trusted with the memory
//! and with nothing else.

mod batches;
mod calibration;
mod causal;
mod clock;
mod discards;
mod driver;
mod frame;
#[cfg(fuzzing)]
pub mod fuzzing;
mod heat;
mod latency;
mod link;
mod merging;
mod meter;
mod min_residency;
mod node;
mod page_server;
mod prefetch;
mod region;
mod server_thread;
mod shape;
mod shutdown;
mod userfault;
mod wire;

pub use batches::{Batches, SHARERS_MAX};
pub use calibration::{touch, with_fault_server};
pub use causal::Causal;
pub use clock::{now_ns, ran_ns};
pub use discards::Discards;
pub use frame::FRAME_BYTES;
pub use latency::Latency;
pub use link::{Link, PAGE_FRAME_BYTES};
pub use meter::{Meter, Stalls};
pub use node::{Node, NodeError, Polls, Prepared, Settings, Site, Spawn, Step};
pub use page::PAGE_LEN;
pub use region::{Method, PAGES_MAX, Region, RegionError, RegionOptions};
pub use server_thread::prepare_server_thread;
pub use shape::{LANES_MAX, Shape};
pub use shutdown::End;
pub use userfault::{
    DEVICE as USERFAULT_DEVICE, FAULTS_MAX, Fault, FaultDelivery, SERVING as USERFAULT_SERVING, Userfault,
    UserfaultError,
};
pub use wire::Pipes;
