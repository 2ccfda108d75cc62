//! Files of the host in directories that other users may read or write.
//!
//! - [`AtomicFile`]: a file that appears under its name whole or not at all; it follows no name planted by
//!   another user.
//! - [`private`]: files and directories of one user.
//! - [`names`]: names in requests of other users and hosts, which count below listed directories only.
//! - [`passwd`], [`groups`]: the host's lists of users and of groups;
//! - [`lock`]: locks with a time limit on the wait, and the names of their holders.

mod atomic_file;
pub mod groups;
pub mod lock;
pub mod names;
pub mod passwd;
pub mod private;

pub use atomic_file::{AtomicFile, replace_file, replace_volatile_file};
