//! Files of the host in directories that other users may read or write.
//!
//! - [`AtomicFile`]: a file that appears under its name whole or not at all; a name planted by another user is not followed.
//! - [`private`]: files and directories of one user.
//! - [`passwd`]: the host's list of users;
//! - [`lock`]: locks that are waited for with a limit, and the names of their holders.

mod atomic_file;
pub mod lock;
pub mod passwd;
pub mod private;

pub use atomic_file::{AtomicFile, replace_file, replace_volatile_file};
