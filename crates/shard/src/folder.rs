//! The process of a shared folder: it runs the server of [`folders::server`] on one sealed thread, without a
//! shard.
//!
//! It parses requests of a guest. It sees the folder and nothing else of the host's files
//! (`sandbox::folder_root`), has no capabilities, no network and no other sockets than the one that it
//! received.
//!
//! It ends when its socket is closed, not when the process that started it ends: a VM that outlives its
//! monitor keeps its folders.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use folders::Arguments;
use folders::lend::Lender;
use folders::process::{ENDED_WITH_SOCKET, FLAG};
use folders::server::FolderServer;
use nix::sys::prctl::set_name;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::socket::{getsockopt, sockopt};

use crate::launch::{Identity, SandboxPolicy};
use crate::sandbox::{Beneath, Sealing, Syscall, ThreadKind, folder_root, seal_alone};
use crate::sealed_process::{self, SealedProcessError, failed, policy, usage};

/// System calls of the server's thread beyond those of every thread: packets, and operations on files.
pub const SYSCALLS: &[Syscall] = &[
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    // Passes files to the shard.
    libc::SYS_sendmsg,
    libc::SYS_dup,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_getrandom,
    libc::SYS_getxattr,
    libc::SYS_linkat,
    libc::SYS_listxattr,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_removexattr,
    libc::SYS_renameat2,
    libc::SYS_setxattr,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_writev,
];

/// Limit of the process's own data, bytes: buffers, and what it keeps of each file that the guest's kernel
/// knows.
const DATA_BYTES_MAX: u64 = 64 << 20;
/// Limit of address space, bytes: the program's file, and memory that the limit above does not count.
const SPACE_BYTES_MAX: u64 = 512 << 20;
/// Limit of descriptors, one for each file that the guest's kernel knows, if the host allows as many.
const FILES_MAX: u64 = 1 << 16;

/// Runs the server if the program was started as one, and returns its exit status; otherwise returns none.
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
    let files = io::stdin().as_fd().try_clone_to_owned().and_then(|socket| {
        getsockopt(&socket, sockopt::SockType)?;
        Ok((socket, io::stdout().as_fd().try_clone_to_owned()?))
    });
    let Ok((socket, folder)) = files else {
        return usage(FLAG, "a monitor starts this");
    };
    match serve(socket, folder, &arguments) {
        Ok(()) => ExitCode::from(ENDED_WITH_SOCKET),
        Err(error) => failed(&error),
    }
}

/// Limits the process's use of the host's resources.
fn limit() -> io::Result<()> {
    let (_, files) = getrlimit(Resource::RLIMIT_NOFILE)?;
    sealed_process::limit(&[
        (Resource::RLIMIT_DATA, DATA_BYTES_MAX),
        (Resource::RLIMIT_AS, SPACE_BYTES_MAX),
        (Resource::RLIMIT_NOFILE, files.min(FILES_MAX)),
    ])
}

/// Seals this thread and serves the folder until the socket ends.
fn serve(socket: OwnedFd, folder: OwnedFd, arguments: &Arguments) -> Result<(), SealedProcessError> {
    limit()?;
    // The name is for people who list threads.
    let _ = set_name(c"folder-server");
    Lender::ignore_signals()?;
    let policy = policy(arguments.seal);
    let read_only = arguments.rights.read_only;
    let (mut path, mut missing) = (folder_root::FOLDER_OF_HOST, Vec::new());
    if policy != SandboxPolicy::Off {
        match folder_root::enter(folder.as_fd(), read_only) {
            Ok(()) => path = folder_root::FOLDER,
            Err(error) => missing.push(format!("root of its own: {error}")),
        }
    }
    let server = FolderServer::new(path, arguments)?;
    seal_alone(Sealing {
        kind: ThreadKind::Folder,
        policy,
        identity: arguments.user.map(|(uid, gid)| Identity { uid, gid }),
        beneath: Some(Beneath {
            folder: folder.as_fd(),
            read_only,
        }),
        missing,
    })?;
    // Its mounts are the host's, from where `..` leads out of the folder.
    drop(folder);
    Ok(server.run(&socket)?)
}

#[cfg(test)]
mod tests;
