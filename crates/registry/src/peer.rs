//! Ids of the process at the other end of a unix socket, from the kernel at connection time.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};

use crate::monitor::Owner;

/// Groups that a process may have (`NGROUPS_MAX` of Linux).
const GROUPS_MAX: usize = 65_536;

/// Returns the user, the group and the further groups of the process that connected (`SO_PEERCRED`,
/// `SO_PEERGROUPS`).
///
/// # Errors
/// If the kernel does not report them.
pub fn owner_of(socket: impl AsFd) -> io::Result<Owner> {
    let socket = socket.as_fd();
    let credentials = getsockopt(&socket, sockopt::PeerCredentials)?;
    Ok(Owner {
        uid: credentials.uid(),
        gid: credentials.gid(),
        groups: groups_of(&socket)?,
    })
}

fn groups_of(socket: &impl AsRawFd) -> io::Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 64];
    loop {
        let mut bytes = (groups.len() * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: the kernel writes at most `bytes` bytes into the list, which has as many.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<u32>();
        match Errno::result(result) {
            Ok(_) => {
                groups.truncate(count);
                return Ok(groups);
            }
            // The kernel has said how long the list is.
            Err(Errno::ERANGE) if count > groups.len() && count <= GROUPS_MAX => groups.resize(count, 0),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nix::unistd::{getegid, geteuid, getgroups};

    use super::*;

    #[test]
    fn ids_of_a_connected_process_are_those_that_it_has() {
        let (one, _other) = UnixStream::pair().unwrap();
        let owner = owner_of(&one).unwrap();
        let groups: Vec<u32> = getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        assert_eq!((owner.uid, owner.gid), (geteuid().as_raw(), getegid().as_raw()));
        assert_eq!(owner.groups, groups);
    }
}
