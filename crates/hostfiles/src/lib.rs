//! Files of the host in directories that other users may read or write.
//!
//! - [`Unfinished`]: a file that appears under its name whole or not at all; a name planted by another user is not followed.
//! - [`private`]: files and directories of one user.
//! - [`accounts`]: the host's list of users;
//! - [`lock`]: locks that are waited for with a limit, and the names of their holders.

pub mod accounts;
pub mod lock;
pub mod private;
mod unfinished;

pub use unfinished::{Unfinished, replace_file, replace_volatile_file};
