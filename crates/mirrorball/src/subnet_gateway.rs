//! The process of the gateway of a user's subnet (`mirrorball subnet`): its limits and its seal.
//!
//! It parses frames of guests. It therefore loses its rights before it serves: for root it becomes another
//! user. It has no capabilities, opens no files, starts no processes, and creates no sockets but those of
//! IPv4 and IPv6.

use std::os::fd::{FromRawFd, OwnedFd};

use gateway::Gateway;
use miette::{IntoDiagnostic, Result, miette};
use nix::sys::prctl::set_name;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use shard::launch::{Identity, SandboxPolicy};
use shard::sandbox::{SandboxError, Sealing, ThreadKind, seal_alone};

/// Limit of the process's own data, bytes: a gibibyte of buffers of connections, and queues of cards.
const DATA_BYTES_MAX: u64 = 3 << 30;
/// Greatest number of descriptors that the process asks for.
const FILES_MAX: u64 = 65_536;

/// Serves the listening socket at standard input. `identity` is the user whose processes may connect, then
/// the user and group that this process becomes, if root started it.
pub fn run(identity: &[&str]) -> Result<()> {
    let numbers: Result<Vec<u32>, _> = identity.iter().map(|word| word.parse()).collect();
    let (owner, identity) = match numbers.as_deref() {
        Ok([owner]) => (*owner, None),
        Ok([owner, uid, gid]) => {
            let (uid, gid) = (*uid, *gid);
            (*owner, Some(Identity { uid, gid }))
        }
        _ => {
            return Err(miette!(
                help = "start VMs with `mirrorball run --net subnet`",
                "a monitor starts this"
            ));
        }
    };
    // SAFETY: the starter has put the listening socket at standard input, which no other code of this process
    // reads.
    let listener = unsafe { OwnedFd::from_raw_fd(libc::STDIN_FILENO) };
    let descriptors = limit().into_diagnostic()?;
    // The name is for people who list processes.
    let _ = set_name(c"subnet");
    let gateway = Gateway::new(listener.into(), owner, descriptors).into_diagnostic()?;
    // The start of the program uses code that the gateway does not.
    page::program::release();
    let sealed = seal_alone(Sealing {
        kind: ThreadKind::Gateway,
        policy: SandboxPolicy::Require,
        identity,
        beneath: None,
        missing: Vec::new(),
    });
    // It has the other layers, and serves the VMs that do not require all.
    let missing = sealed.err().map(|SandboxError::Incomplete(missing)| missing);
    gateway.with_missing_layers(missing).run().into_diagnostic()
}

/// Limits the process's use of the host's resources. Returns the limit of descriptors.
fn limit() -> nix::Result<u64> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let descriptors = most.min(FILES_MAX);
    for (resource, most) in [
        (Resource::RLIMIT_NOFILE, descriptors),
        (Resource::RLIMIT_DATA, DATA_BYTES_MAX),
        (Resource::RLIMIT_FSIZE, 0),
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_NPROC, 0),
    ] {
        setrlimit(resource, most, most)?;
    }
    Ok(descriptors)
}
