//! Identity of the process at the other end of a connection, from the kernel alone.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::socket::{getsockopt, sockopt};

use crate::pidfd;

/// `SO_PEERPIDFD` of Linux 6.5, which the bindings lack for some targets.
const SO_PEERPIDFD: libc::c_int = 77;

/// The process that connected.
#[derive(Debug)]
pub(super) struct Peer {
    /// The user's id.
    pub(super) uid: u32,
    /// The process id, which names this process as long as [`Peer::lives`].
    pub(super) pid: i32,
    process: OwnedFd,
}

impl Peer {
    /// The user's id at the other end of a connection.
    ///
    /// # Errors
    /// If the kernel does not report it.
    pub(super) fn uid(stream: &UnixStream) -> io::Result<u32> {
        Ok(getsockopt(stream, sockopt::PeerCredentials)?.uid())
    }

    /// The process at the other end of a connection.
    ///
    /// # Errors
    /// If it has ended, or this process can't see it.
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = getsockopt(stream, sockopt::PeerCredentials)?;
        let (uid, pid) = (credentials.uid(), credentials.pid());
        if pid <= 0 {
            return Err(io::Error::other("the process is in a container that hides it"));
        }
        let process = match peer_pidfd(stream) {
            Ok(process) => process,
            // An older kernel. The id may be another process's by now, so its user is compared.
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => open(pid)?,
            Err(error) => return Err(error),
        };
        let peer = Self { uid, pid, process };
        let about = Process::of(pid)?;
        if about.uid != uid || !peer.lives() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(peer)
    }

    /// Whether the process has not ended, so that its id is no other's.
    pub(super) fn lives(&self) -> bool {
        !pidfd::has_ended(self.process.as_fd())
    }
}

/// The kernel's record of a process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Process {
    /// The real user's id.
    pub(super) uid: u32,
    /// The session's id; 0 for a session of a PID namespace outside this one.
    pub(super) session: i32,
    /// The time of its start, in clock ticks since the host's.
    pub(super) start: u64,
}

impl Process {
    /// The record of the process that has this id now.
    ///
    /// # Errors
    /// If there is no such process.
    pub(super) fn of(pid: i32) -> io::Result<Self> {
        let folder = Path::new("/proc").join(pid.to_string());
        let stat = fs::read(folder.join("stat"))?;
        let status = fs::read(folder.join("status"))?;
        Self::read(&String::from_utf8_lossy(&stat), &String::from_utf8_lossy(&status))
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses the process's files `stat` and `status` (`proc(5)`). The process chose its name, which may hold
    /// any bytes.
    fn read(stat: &str, status: &str) -> Option<Self> {
        let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
        // The third field of the file is the first here.
        let session = fields.nth(3)?.parse().ok()?;
        let start = fields.nth(15)?.parse().ok()?;
        // The name comes in the first line, with its line breaks escaped.
        let uid = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        Some(Self {
            uid: uid.split_whitespace().next()?.parse().ok()?,
            session,
            start,
        })
    }
}

fn peer_pidfd(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `fd`, both of which live through the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens the descriptor of the process that has this id now.
pub(super) fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made the descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Kills a process by its descriptor.
pub(super) fn kill(process: BorrowedFd<'_>) {
    pidfd::kill(process);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_of_a_connection_is_the_process_that_made_it() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer.pid, std::process::id() as i32);
        assert_eq!(peer.uid, nix::unistd::getuid().as_raw());
        assert!(peer.lives());
    }

    #[test]
    fn process_is_read_whatever_its_name_is() {
        let stat = "42 (a) S 1 2 (x) y) S 7 8 99 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 123456 0\n";
        let status = "Name:\tUid:\\n0\nUid:\t1001\t1002\t1003\t1004\n";
        let process = Process {
            uid: 1001,
            session: 99,
            start: 123_456,
        };
        assert_eq!(Process::read(stat, status), Some(process));
        for (stat, status) in [
            ("", status),
            ("42 (a) S", status),
            (stat, ""),
            (stat, "Uid:\tx\n"),
        ] {
            assert_eq!(Process::read(stat, status), None);
        }
        let own = Process::of(std::process::id() as i32).unwrap();
        // A session that another PID namespace began is 0 in this one.
        assert_eq!(own.session, nix::unistd::getsid(None).map_or(0, i32::from));
        assert!(own.start > 0);
        assert!(Process::of(i32::MAX).is_err());
    }
}
