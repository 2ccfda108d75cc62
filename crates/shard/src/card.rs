//! The process of a card's frame filter: the relay of [`subnet::relay`] on one sealed thread, with no shard
//! around it.
//!
//! It parses frames of a guest, so it has no rights: no capabilities, no files by name, no sockets but those
//! that it was given. It keeps the host's namespaces, in which none of its calls names anything.
//!
//! It ends with its sockets, not with its starter: a VM that outlives its monitor keeps its cards.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use nix::sys::prctl::set_name;
use nix::sys::resource::{Resource, setrlimit};
use subnet::process::{Arguments, FILE_BYTES_MAX, FLAG, Seal, receive};
use subnet::relay::End;

use crate::launch::{Identity, SandboxPolicy};
use crate::sandbox::{SandboxError, Syscall, ThreadKind, seal_alone};

/// What the relay's thread may ask of the kernel, beyond what every thread may: frames, lists, the count of
/// dropped frames.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_recvfrom, libc::SYS_sendto, libc::SYS_pwrite64];

/// Bytes of memory of its own that the process may have: some hundreds of KiB for buffers, and as much as the
/// program brings.
const DATA_BYTES_MAX: u64 = 16 << 20;
/// Bytes of address space: the program's file, and memory that the limit above leaves out.
const SPACE_BYTES_MAX: u64 = 256 << 20;
/// Descriptors that it may have: its standard ones, its sockets, and some for the seal.
const FILES_MAX: u64 = 16;
/// Exit status of a process that no monitor has started.
const USAGE: u8 = 2;

/// Reason for a filter's process that did not begin, or could not go on.
#[derive(Debug, thiserror::Error)]
enum CardError {
    /// The kernel refused something.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// The sandbox is required.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Runs as a filter's process when the program was started as one, and returns its exit status; returns
/// nothing otherwise.
///
/// Call it before any thread is started.
pub fn take_over() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let is_filter = words.next()? == FLAG;
    is_filter.then(|| run(words.map(|word| word.to_string_lossy().into_owned())))
}

fn run(words: impl Iterator<Item = String>) -> ExitCode {
    let arguments = match Arguments::read(words) {
        Ok(arguments) => arguments,
        Err(word) => {
            eprintln!(
                "mirrorball-shard {FLAG}: {word:?} is no argument; help: start VMs with `mirrorball run`"
            );
            return ExitCode::from(USAGE);
        }
    };
    let lists = limit().and_then(|()| io::stdin().as_fd().try_clone_to_owned());
    match lists
        .map_err(CardError::from)
        .and_then(|lists| serve(lists, &arguments))
    {
        Ok(end) => {
            // A monitor that has adopted this process does not learn its exit status.
            eprintln!("{}", end.words());
            ExitCode::from(end.status())
        }
        Err(CardError::Host(error)) if error.raw_os_error() == Some(libc::ENOTSOCK) => {
            eprintln!(
                "mirrorball-shard {FLAG}: a monitor starts this; help: start VMs with `mirrorball run`"
            );
            ExitCode::from(USAGE)
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Bounds what the process can take of the host.
fn limit() -> io::Result<()> {
    for (resource, most) in [
        (Resource::RLIMIT_DATA, DATA_BYTES_MAX),
        (Resource::RLIMIT_AS, SPACE_BYTES_MAX),
        (Resource::RLIMIT_FSIZE, FILE_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, FILES_MAX),
    ] {
        setrlimit(resource, most, most)?;
    }
    Ok(())
}

/// Receives the sockets, seals this thread and moves frames until one side ends.
fn serve(lists: OwnedFd, arguments: &Arguments) -> Result<End, CardError> {
    // The name is for people.
    let _ = set_name(c"card-filter");
    // Its maps of addresses take random numbers from the kernel, once a thread: before the seal.
    let mut relay = receive(lists, arguments)?;
    let identity = arguments.user.map(|(uid, gid)| Identity { uid, gid });
    seal_alone(ThreadKind::Relay, policy(arguments.seal), identity)?;
    Ok(relay.run()?)
}

fn policy(seal: Seal) -> SandboxPolicy {
    match seal {
        Seal::Auto => SandboxPolicy::Auto,
        Seal::Require => SandboxPolicy::Require,
        Seal::Off => SandboxPolicy::Off,
    }
}

#[cfg(test)]
mod tests;
