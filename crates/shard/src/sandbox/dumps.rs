//! Forbids core dumps, and reads of this process's memory by other processes of the same user.

use std::io;

use nix::sys::prctl::set_dumpable;
use nix::sys::resource::{Resource, setrlimit};

/// Forbids core dumps, ptrace, and calls that need its rights.
pub fn forbid() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    set_dumpable(false)?;
    Ok(())
}
