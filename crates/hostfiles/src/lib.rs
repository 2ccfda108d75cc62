//! Files of the host in directories that other users may read or write.
//!
//! - [`AtomicFile`]: a file that appears under its name whole or not at all; it follows no name planted by
//!   another user.
//! - [`private`]: files and directories of one user.
//! - [`passwd`]: the host's list of users;
//! - [`lock`]: locks with a time limit on the wait, and the names of their holders.

mod atomic_file;
pub mod lock;
pub mod passwd;
pub mod private;

pub use atomic_file::{AtomicFile, replace_file, replace_volatile_file};
