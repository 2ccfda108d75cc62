//! The user of a shard on hosts where no user namespace has changed it already.

use std::io;

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use crate::launch::Identity;

/// Changes the process irrevocably to the user and group of `identity`, without further groups.
pub fn become_one(identity: Identity) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    Ok(())
}

/// Ends the process with its parent. A change of user clears this setting.
pub fn end_with_parent() -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    Ok(())
}
