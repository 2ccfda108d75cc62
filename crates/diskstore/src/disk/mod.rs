//! Disks in use: opening their files under locks, and serving their bytes from files that are already open.
//!
//! Two users, two halves. A monitor calls [`open`]: it takes a path and what is wanted, and gives the open files of
//! the disk, top overlay first, with locks that end with the last copy of those files. A shard, inside its sandbox,
//! calls [`assemble`] with those files and gets a [`Store`]; each queue of a disk drives its own [`IoQueue`] over it.
//!
//! Between the runs of VMs, [`maintenance`] works on disks that nobody uses.
//!
//! What holds:
//! * A file in use as a base is never written. Private use takes a shared lock on it, exclusive use an exclusive one,
//!   so that the two exclude each other; a crash of the holder releases both.
//! * A write that was followed by a completed flush survives the death of the process, whatever the format. Temporary
//!   overlays promise it only until the last of their files is closed, which is when they vanish.
//! * An overlay whose base was written since is not used: see [`DiskError::BaseChanged`].
//! * Nothing a guest writes into a disk changes how its file is read the next time (see [`Format`]).

mod block_map;
mod boot;
mod error;
mod fingerprint;
mod format;
mod header;
mod io_queue;
mod lock;
pub mod maintenance;
mod open;
mod qcow2;
mod raw;
mod ring;
mod scratch;
mod segments;
mod space_budget;
mod store;
mod watch;

#[cfg(test)]
mod tests;

pub use error::DiskError;
pub use format::{Format, inherit_format};
pub use io_queue::{IoQueue, Operation, Submission};
#[cfg(fuzzing)]
pub use lock::listed;
pub use lock::{Announcement, Holder, announce_again, holders};
pub(crate) use lock::{Lock, Share, take as take_lock};
pub use open::{DiskRequest, Layer, Mode, OpenDisk, open};
pub use raw::allocate_whole;
pub use scratch::{copy_scratch, nameless_file};
pub use segments::Segments;
pub use store::{Extent, Origin, Store, SyncState, assemble, assemble_within};
pub use watch::BaseWatch;

/// Bytes of a sector, the unit of every offset and length that a guest gives.
pub const SECTOR_BYTES: u64 = 512;
