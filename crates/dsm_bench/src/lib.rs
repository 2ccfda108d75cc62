//! Commands of `mirrorball dsm`: benches, litmus tests and programs in one memory for processes on several
//! hosts.
//!
//! The crate [`dsm`] is the memory, which also serves guests in a shard. A shard does not link this crate
//! (`make lint` checks it).
//!
//! - [`stream`]: streams between nodes, plain or with TLS; [`rendezvous`]: how nodes join a session over
//!   them;
//! - [`session`]: node 0 has the nodes run jobs; [`work`]: the jobs: accesses to pages, litmus tests,
//!   programs;
//! - [`shared`]: barriers and locks for threads of all nodes, in the memory itself;
//! - [`baseline`]: the parts of a remote page access.

pub mod baseline;
mod rendezvous;
mod session;
mod shared;
mod stream;
pub mod work;

pub use rendezvous::{Joined, coordinate, join};
pub use session::{Session, SessionError, serve};
pub use stream::{Peer, Security, StreamError, StreamOptions, listen};
