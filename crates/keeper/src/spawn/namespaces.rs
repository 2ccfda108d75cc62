//! The namespaces of a VM's process, and which of them this host allows.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;

use libc::c_int;

use super::id_map::write_maps;
use super::{raw_clone, reap};

/// The namespaces of a shard, with their names for a report. The user namespace first: it permits the others.
const NAMESPACES: [(c_int, &str); 6] = [
    (libc::CLONE_NEWUSER, "user"),
    (libc::CLONE_NEWNS, "mount"),
    (libc::CLONE_NEWNET, "network"),
    (libc::CLONE_NEWPID, "PID"),
    (libc::CLONE_NEWIPC, "IPC"),
    (libc::CLONE_NEWUTS, "UTS"),
];

/// The namespaces that this host lets a process create, and those that it refuses, found by trial.
#[derive(Clone, Debug)]
pub struct Namespaces {
    flags: c_int,
    /// Refused namespaces, one line each.
    pub missing: Vec<String>,
}

impl Namespaces {
    /// Returns no namespaces: for `--sandbox=off`.
    pub fn none() -> Self {
        Self {
            flags: 0,
            missing: Vec::new(),
        }
    }

    /// Returns all namespaces, which the host may refuse.
    pub fn all() -> Self {
        Self {
            flags: all_flags(),
            missing: Vec::new(),
        }
    }

    /// Returns the namespaces of `flags`; none if there are other flags of a clone among them.
    pub fn of_flags(flags: c_int) -> Option<Self> {
        (flags & !all_flags() == 0).then(|| Self {
            flags,
            missing: Vec::new(),
        })
    }

    /// Returns the namespaces as flags of a clone.
    pub fn flags(&self) -> c_int {
        self.flags
    }

    /// Tries all namespaces at once, and if that is refused, each on top of the previous ones. Each trial is
    /// a clone that ends at once: cheap except for network namespaces, which cost milliseconds.
    pub fn probe() -> Self {
        let mut found = Self::none();
        if try_flags(all_flags()).is_ok() {
            return Self::all();
        }
        for (flag, name) in NAMESPACES {
            match try_flags(found.flags | flag) {
                Ok(()) => found.flags |= flag,
                Err(error) => found.missing.push(format!("{name} namespace: {error}")),
            }
        }
        found
    }
}

pub(super) fn all_flags() -> c_int {
    NAMESPACES.iter().fold(0, |flags, (flag, _)| flags | flag)
}

fn try_flags(flags: c_int) -> io::Result<()> {
    let (go_read, go_write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    let go = (go_read.as_raw_fd(), go_write.as_raw_fd());
    // SAFETY: as a fork: the child has its own copy of the stack, and makes only the raw system calls below.
    let pid = unsafe { raw_clone(flags) };
    if pid == 0 {
        // SAFETY: raw system calls on descriptors that the child inherited.
        unsafe {
            libc::close(go.1);
            let mut byte = 0_u8;
            libc::read(go.0, (&raw mut byte).cast(), 1);
            libc::_exit(0);
        }
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    let mapped = if flags & libc::CLONE_NEWUSER == 0 {
        Ok(())
    } else {
        write_maps(pid as i32, None)
    };
    // A byte, not only the end of file: a process that another thread cloned meanwhile holds a copy of this
    // end, and may be waiting in the same way for one that this child holds.
    let _ = File::from(go_write).write_all(b"g");
    reap(pid as i32);
    mapped
}
