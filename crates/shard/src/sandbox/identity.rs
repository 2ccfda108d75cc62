//! The user that a shard becomes where no user namespace has made it one already.

use std::io;

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use crate::launch::Identity;

/// Gives the process the user and group of `identity`, and no others, for good.
pub fn become_one(identity: Identity) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    Ok(())
}

/// Ends the process with its parent. A change of user clears this.
pub fn end_with_parent() -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    Ok(())
}
