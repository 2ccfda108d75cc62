//! What `mirrorball dsm` runs: benches, litmus tests and programs on one memory for processes on several hosts.
//!
//! The memory itself is the crate [`dsm`], which a shard serves guests with. A shard does not link this crate (`make lint`
//! checks it).
//!
//! - [`stream`]: streams between nodes, plain or with TLS; [`rendezvous`]: how nodes meet over them;
//! - [`session`]: node 0 has all nodes do jobs; [`work`]: the jobs: accesses to pages, litmus tests, programs;
//! - [`shared`]: what threads of all nodes meet by, in the memory itself;
//! - [`baseline`]: what a remote page is made of, each part by itself.

pub mod baseline;
mod rendezvous;
mod session;
mod shared;
mod stream;
pub mod work;

pub use rendezvous::{Joined, coordinate, join};
pub use session::{Session, SessionError, serve};
pub use stream::{StreamOptions, Peer, Security, StreamError, listen};
