//! The sandbox of a shard: what is left to it once the guest runs.
//!
//! A guest that takes over its shard owns the files the monitor passed in, and nothing else. The layers, outermost first:
//! own user, mount, network, PID, IPC and UTS namespaces (made by the monitor when it clones the process), an empty
//! read-only root, no capabilities, `no_new_privs`, and for every thread a seccomp allow-list of its kind.
//!
//! [`close`] runs while the process has one thread, after the last file is open and before the first guest instruction.
//! Every thread started later through the returned [`Threads`] seals itself before it runs its work.
//! What the host does not allow is said in [`Closed::missing`]; under [`SandboxPolicy::Require`] it is an error instead.

mod capabilities;
mod filter;
mod root;
mod threads;

#[cfg(test)]
mod tests;

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;

pub use filter::Syscall;
pub use threads::{ThreadKind, Threads};

use crate::launch::SandboxPolicy;

/// Why the sandbox could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The policy is `require`, and something could not be applied.
    #[error("the sandbox is incomplete ({0}); run with --sandbox=auto to go on without it")]
    Incomplete(String),
}

/// A closed sandbox.
#[derive(Debug)]
pub struct Closed {
    /// Starts the shard's threads.
    pub threads: Threads,
    /// What could not be applied, one line each.
    pub missing: Vec<String>,
    /// Where the process finds the directory of ports.
    pub ports: Option<PathBuf>,
}

/// Closes the sandbox around this process.
///
/// `missing` is what the monitor could not do when it made the process; `ports` is the directory that appears as `/ports`
/// in the empty root (see [`crate::launch::VsockLaunch::ports`]).
pub fn close(
    policy: SandboxPolicy,
    mut missing: Vec<String>,
    ports: Option<BorrowedFd<'_>>,
) -> Result<Closed, SandboxError> {
    let mut ports = ports.and_then(path);
    if policy == SandboxPolicy::Off {
        let missing = vec!["everything: --sandbox=off".to_owned()];
        return Ok(Closed {
            threads: Threads::open(),
            missing,
            ports,
        });
    }
    match root::enter_empty(ports.as_deref()) {
        Ok(None) => ports = ports.map(|_| PathBuf::from("/ports")),
        Ok(Some(error)) => {
            ports = None;
            missing.push(format!("ports for the guest to connect to: {error}"));
        }
        Err(error) => missing.push(format!("empty root: {error}")),
    }
    if let Err(error) = capabilities::drop_all() {
        missing.push(format!("capabilities: {error}"));
    }
    let threads = match filter::supported() {
        Ok(()) => Threads::sealed(),
        Err(error) => {
            missing.push(format!("system call filter: {error}"));
            Threads::open()
        }
    };
    if policy == SandboxPolicy::Require && !missing.is_empty() {
        return Err(SandboxError::Incomplete(missing.join("; ")));
    }
    Ok(Closed {
        threads,
        missing,
        ports,
    })
}

/// The name of an open directory; none when it has none any more.
fn path(directory: BorrowedFd<'_>) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd())).ok()
}
