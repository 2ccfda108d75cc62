//! No core dumps, and no other process of the same user that reads this one's memory.

use std::io;

use nix::sys::prctl::set_dumpable;
use nix::sys::resource::{Resource, setrlimit};

/// Forbids core dumps, and ptrace and what asks for its rights.
pub fn forbid() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    set_dumpable(false)?;
    Ok(())
}
