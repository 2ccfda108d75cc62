//! The process of a card's frame filter: it runs the relay of [`subnet::relay`] on one sealed thread, without
//! a shard.
//!
//! It parses frames of a guest and has no rights: no capabilities, no files by name, and no sockets but those
//! that it received. It keeps the host's namespaces, in which none of its system calls names an object.
//!
//! It ends when its sockets are closed, not when the process that started it ends: a VM that outlives its
//! monitor keeps its cards.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use nix::sys::prctl::set_name;
use nix::sys::resource::Resource;
use subnet::process::{Arguments, FILE_BYTES_MAX, FLAG, receive};
use subnet::relay::End;

use crate::launch::Identity;
use crate::sandbox::{Sealing, Syscall, ThreadKind, seal_alone};
use crate::sealed_process::{self, SealedProcessError, failed, policy, usage};

/// System calls of the relay's thread beyond those of every thread: frames, lists, the count of dropped
/// frames.
pub const SYSCALLS: &[Syscall] = &[libc::SYS_recvfrom, libc::SYS_sendto, libc::SYS_pwrite64];

/// Limit of the process's own data, bytes: some hundreds of KiB of buffers, and the program's data.
const DATA_BYTES_MAX: u64 = 16 << 20;
/// Limit of address space, bytes: the program's file, and memory that the limit above does not count.
const SPACE_BYTES_MAX: u64 = 256 << 20;
/// Limit of descriptors: the standard ones, the sockets, and some for the seal.
const FILES_MAX: u64 = 16;

/// Runs the frame filter if the program was started as one, and returns its exit status; otherwise returns
/// none.
///
/// Must be called before any thread is started.
pub fn take_over() -> Option<ExitCode> {
    sealed_process::take_over(FLAG, run)
}

fn run(words: &mut dyn Iterator<Item = String>) -> ExitCode {
    let arguments = match Arguments::read(words) {
        Ok(arguments) => arguments,
        Err(unknown) => return usage(FLAG, &unknown.to_string()),
    };
    let lists = limit().and_then(|()| io::stdin().as_fd().try_clone_to_owned());
    match lists
        .map_err(SealedProcessError::from)
        .and_then(|lists| serve(lists, &arguments))
    {
        Ok(end) => {
            // A monitor that has adopted this process does not receive its exit status.
            eprintln!("{}", end.words());
            ExitCode::from(end.status())
        }
        Err(SealedProcessError::Host(error)) if error.raw_os_error() == Some(libc::ENOTSOCK) => {
            usage(FLAG, "a monitor starts this")
        }
        Err(error) => failed(&error),
    }
}

/// Limits the process's use of the host's resources.
fn limit() -> io::Result<()> {
    sealed_process::limit(&[
        (Resource::RLIMIT_DATA, DATA_BYTES_MAX),
        (Resource::RLIMIT_AS, SPACE_BYTES_MAX),
        (Resource::RLIMIT_FSIZE, FILE_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, FILES_MAX),
    ])
}

/// Receives the sockets, seals this thread and moves frames until one side ends.
fn serve(lists: OwnedFd, arguments: &Arguments) -> Result<End, SealedProcessError> {
    // The name is for people who list threads.
    let _ = set_name(c"card-filter");
    // The relay's maps of addresses request random numbers from the kernel once per thread, so they are
    // created before the seal.
    let mut relay = receive(lists, arguments)?;
    let identity = arguments.user.map(|(uid, gid)| Identity { uid, gid });
    seal_alone(Sealing {
        kind: ThreadKind::Relay,
        policy: policy(arguments.seal),
        identity,
        beneath: None,
        missing: Vec::new(),
    })?;
    Ok(relay.run()?)
}

#[cfg(test)]
mod tests;
