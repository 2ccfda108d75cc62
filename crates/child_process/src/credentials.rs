//! A user's rights, which a process of root takes permanently.

use std::{io, ptr};

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl::set_no_new_privs;
use nix::unistd::{Gid, Uid, getgroups, getresgid, getresuid, setgroups, setresgid, setresuid};

/// Version 3 of `capset`'s structures, from `linux/capability.h`: two words for each set.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// Operation of `keyctl(2)` that gives a process another session keyring, from `linux/keyctl.h`.
const JOIN_SESSION_KEYRING: libc::c_long = 1;

/// Ids of a user.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Credentials {
    /// The user's id.
    pub uid: u32,
    /// Id of the user's own group.
    pub gid: u32,
    /// Ids of the user's further groups.
    pub groups: Vec<u32>,
}

/// Reason why a process does not have the rights of a user.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The user is root.
    #[error("root can't give its rights up for those of root; name another user")]
    Root,
    /// A refusal of the kernel.
    #[error("this process can't take the rights of user {uid}: {error}")]
    Kernel {
        /// The user's id.
        uid: u32,
        /// Error of the kernel.
        error: io::Error,
    },
    /// The process still has other rights.
    #[error("this process has other rights than user {0} after giving its own up")]
    NotTaken(u32),
}

impl Credentials {
    /// Gives this process, all its threads included, the rights of this user alone: no other id, no
    /// capability, and no key of this process's session. Other processes of the user can't trace it or read
    /// its memory until it executes a program.
    ///
    /// # Errors
    /// [`CredentialsError`]; the process may have neither the former nor the new rights then, and must end.
    pub fn take(&self) -> Result<(), CredentialsError> {
        let uid = self.uid;
        if uid == 0 {
            return Err(CredentialsError::Root);
        }
        let failed = |error: Errno| CredentialsError::Kernel {
            uid,
            error: error.into(),
        };
        let groups: Vec<Gid> = self.groups.iter().map(|group| Gid::from_raw(*group)).collect();
        let (own, group) = (Uid::from_raw(uid), Gid::from_raw(self.gid));
        leave_session_keyring().map_err(failed)?;
        setgroups(&groups).map_err(failed)?;
        setresgid(group, group, group).map_err(failed)?;
        setresuid(own, own, own).map_err(failed)?;
        drop_capabilities().map_err(failed)?;
        // SAFETY: sets a flag of this process.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) }).map_err(failed)?;
        let (uids, gids) = (getresuid().map_err(failed)?, getresgid().map_err(failed)?);
        let mut now = getgroups().map_err(failed)?;
        let mut wanted = groups;
        for list in [&mut now, &mut wanted] {
            list.sort_unstable_by_key(|group| group.as_raw());
            list.dedup();
        }
        let is_taken = [uids.real, uids.effective, uids.saved] == [own; 3]
            && [gids.real, gids.effective, gids.saved] == [group; 3]
            && now == wanted
            && setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0)).is_err();
        is_taken.then_some(()).ok_or(CredentialsError::NotTaken(uid))
    }

    /// The same for a process that executes no further program: no program that it executed could have more
    /// rights.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_for_good(&self) -> Result<(), CredentialsError> {
        self.take()?;
        set_no_new_privs().map_err(|error| CredentialsError::Kernel {
            uid: self.uid,
            error: error.into(),
        })
    }
}

/// Removes all capabilities of this thread. A change from root to another user has removed them from a
/// process without special flags (`capabilities(7)`).
fn drop_capabilities() -> nix::Result<()> {
    let header = [CAPABILITY_VERSION, 0];
    let none = [0_u32; 6];
    // SAFETY: the kernel reads both arrays, which have the sizes of version 3's structures.
    let result = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) };
    Errno::result(result).map(drop)
}

/// Gives this process an empty session keyring (`session-keyring(7)`). A process may use the keys of the one
/// that it has, whatever its ids are, and it has that of its parent.
fn leave_session_keyring() -> nix::Result<()> {
    let no_name = ptr::null::<libc::c_char>();
    // SAFETY: the kernel reads no memory without a name.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, no_name) };
    match Errno::result(result) {
        // The kernel has no keyrings, or a filter keeps this process and all that it executes from them.
        Ok(_) | Err(Errno::ENOSYS | Errno::EPERM) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork, geteuid};

    use super::*;

    /// Takes the rights, and checks the ids that the kernel reports.
    fn found() -> Result<(), String> {
        let of_user = Credentials {
            uid: 4321,
            gid: 4322,
            groups: vec![4323, 4324],
        };
        of_user.take_for_good().map_err(|error| error.to_string())?;
        let status = fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
        for line in [
            "Uid:\t4321\t4321\t4321\t4321",
            "Gid:\t4322\t4322\t4322\t4322",
            "Groups:\t4323 4324",
            "CapInh:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
            "NoNewPrivs:\t1",
        ] {
            if !status.lines().any(|found| found.trim_end() == line) {
                return Err(format!("{line:?} is missing in {status}"));
            }
        }
        match fs::read("/etc/shadow") {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            other => Err(format!("root's file: {:?}", other.map(|bytes| bytes.len()))),
        }
    }

    #[test]
    fn process_that_takes_a_users_rights_keeps_none_of_roots() {
        if !geteuid().is_root() {
            println!("left out: only root has rights to give up");
            return;
        }
        // SAFETY: the child allocates and prints, which glibc makes usable in it, and ends without
        // destructors.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None).unwrap(), WaitStatus::Exited(child, 0));
            }
            ForkResult::Child => {
                let found = found();
                if let Err(why) = &found {
                    eprintln!("{why}");
                }
                // SAFETY: ends the process.
                unsafe { libc::_exit(i32::from(found.is_err())) }
            }
        }
    }

    #[test]
    fn root_is_no_user_whose_rights_are_fewer() {
        let root = Credentials {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        };
        assert!(matches!(root.take(), Err(CredentialsError::Root)));
    }
}
