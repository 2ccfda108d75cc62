//! Disks in use: opens their files under locks, and serves their bytes from open files.
//!
//! The module has two halves. A monitor calls [`open`] with a path and the wanted mode. It gets the open
//! files of the disk, top overlay first, with locks that last until the last copy of those files is closed. A
//! shard, inside its sandbox, calls [`assemble`] with those files and gets a [`Store`]; each queue of a disk
//! drives its own [`IoQueue`] over it.
//!
//! Between runs of VMs, [`maintenance`] works on unused disks.
//!
//! Invariants:
//! * A file that is in use as a base is never written. Private use takes a shared lock on it, exclusive use
//!   an exclusive one, so the two exclude each other; a crash of the holder releases both.
//! * A write followed by a completed flush survives the death of the process, in every format. Temporary
//!   overlays guarantee it only until the last of their files is closed, when they disappear.
//! * An overlay whose base was written since is refused: see [`DiskError::BaseChanged`].
//! * A guest's writes to a disk never change the format in which its file is read next time (see [`Format`]).

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
pub use header::HeaderError;
pub use io_queue::{IoQueue, Operation, Submission};
#[cfg(fuzzing)]
pub use lock::listed;
pub use lock::{Announcement, Holder, announce_again, holders};
pub(crate) use lock::{Lock, Share, take as take_lock};
pub use open::{DiskRequest, Layer, Mode, OpenDisk, open, open_files};
pub use raw::allocate_whole;
pub use scratch::{copy_scratch, nameless_file};
pub use segments::Segments;
pub use store::{Extent, Origin, Store, SyncState, assemble, assemble_within};
pub use watch::BaseWatch;

/// Bytes of a sector, the unit of all offsets and lengths from a guest.
pub const SECTOR_BYTES: u64 = 512;
