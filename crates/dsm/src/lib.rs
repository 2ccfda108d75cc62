//! One shared memory for ordinary processes on several hosts, and the memory of a VM that spans cells or hosts.
//!
//! The protocol is the crate `coherence`; this one drives it. Benches and programs on it are the crate `dsm_bench`:
//!
//! - [`region`]: the memory, with what each page allows;
//! - [`userfault`]: how the kernel tells of threads that wait, and is told to let them go on;
//! - [`page_server`]: the threads that serve faults and messages, each a part of the pages;
//! - [`link`], [`wire`]: streams between nodes, and what carries them;
//! - [`min_residency`]: how long a page that has come stays; [`heat`]: which come most often; [`prefetch`]: which are asked for before anybody wants them;
//! - [`merging`]: page tables of a guest, which are open to all nodes at once; [`causal`]: what that asks of other threads; [`batches`]: what their
//!   messages come after;
//! - [`discards`]: pages whose contents nobody needs any more;
//! - [`node`]: all of it together.
//!
//! What holds: a thread's access to a page completes only while the protocol grants its node that right; a node that can't go on
//! ends, and all others with it, each with the reason. Other nodes are trusted with the memory, and with nothing else.

mod prefetch;
mod batches;
mod calibration;
mod causal;
mod clock;
mod discards;
mod driver;
mod shutdown;
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
mod region;
mod server_thread;
mod shape;
mod userfault;
mod wire;

pub use batches::{Batches, SHARERS_MAX};
pub use calibration::{with_fault_server, touch};
pub use causal::Causal;
pub use clock::{now_ns, ran_ns};
pub use discards::Discards;
pub use shutdown::End;
pub use frame::FRAME_BYTES;
pub use latency::Latency;
pub use link::{Link, PAGE_FRAME_BYTES};
pub use meter::{Meter, Stalls};
pub use node::{Node, NodeError, Polls, Prepared, Settings, Site, Spawn, Step};
pub use region::{Method, PAGES_MAX, Region, RegionError, RegionOptions};
pub use server_thread::prepare_server_thread;
pub use shape::{LANES_MAX, Shape};
pub use userfault::{DEVICE as USERFAULT_DEVICE, FaultDelivery, SERVING as USERFAULT_SERVING};
pub use wire::Pipes;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
