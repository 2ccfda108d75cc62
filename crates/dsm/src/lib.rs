//! One shared memory for ordinary processes on several hosts, and the memory of a VM that spans cells or hosts.
//!
//! The protocol is the crate `coherence`; this one drives it:
//!
//! - [`region`]: the memory, with what each page allows;
//! - [`userfault`]: how the kernel tells of threads that wait, and is told to let them go on;
//! - [`lane`]: the threads that serve faults and messages, each a part of the pages;
//! - [`link`], [`wire`], [`stream`], [`meeting`]: streams between nodes, what carries them, and how nodes meet;
//! - [`hold`]: how long a page that has come stays; [`heat`]: which come most often; [`ahead`]: which are asked for before anybody wants them;
//! - [`merging`]: page tables of a guest, which are open to all nodes at once; [`causal`]: what that asks of other threads; [`batches`]: what their
//!   messages come after;
//! - [`discards`]: pages whose contents nobody needs any more;
//! - [`node`]: all of it together.
//!
//! What holds: a thread's access to a page completes only while the protocol grants its node that right; a node that can't go on
//! ends, and all others with it, each with the reason. Other nodes are trusted with the memory, and with nothing else.

mod ahead;
pub mod bare;
mod batches;
mod causal;
mod clock;
mod discards;
mod ending;
#[cfg(fuzzing)]
pub mod fuzzing;
mod hands;
mod heat;
mod hold;
mod lane;
mod latency;
mod link;
mod meeting;
mod merging;
mod meter;
mod node;
mod region;
mod session;
mod shared;
mod stream;
mod userfault;
mod wire;
pub mod work;

pub use batches::{Batches, SHARERS_MAX};
pub use causal::Causal;
pub use discards::Discards;
pub use ending::End;
pub use latency::Latency;
pub use link::Link;
pub use meeting::{LANES_MAX, Met, Shape, follow, lead};
pub use meter::{Meter, Stalls};
pub use node::{Node, NodeError, Polls, Prepared, Settings, Site, Spawn, Step};
pub use region::{Method, PAGES_MAX, Region, RegionError};
pub use session::{Session, SessionError, serve};
pub use stream::{Means, Peer, Security, StreamError, listen};
pub use userfault::{DEVICE as USERFAULT_DEVICE, SERVING as USERFAULT_SERVING};
pub use wire::Pipes;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
