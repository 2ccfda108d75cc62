//! The folder's process as a fork of the test runner: one thread, sealed as beside a shard.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use child_process::Seal;
use folders::guest::{Guest, ROOT, io_body, words};
use folders::packet::{opcode, set_u32_at, u64_at};
use folders::request::Rights;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, chown, dup2_stdout, fork, geteuid};

use super::*;
use crate::sealed_process::USAGE;

/// A user that no other process has.
const USER: (u32, u32) = (1_900_000_103, 1_900_000_203);

/// A process that serves a folder.
struct Started {
    folder: tempfile::TempDir,
    pid: Pid,
    guest: Option<Guest>,
}

impl Started {
    fn new(seal: Seal, rights: Rights) -> Self {
        Self::within(seal, rights, |_| Ok(()))
    }

    /// Starts a process that does `first` with the folder's path before it opens the folder.
    fn within(seal: Seal, rights: Rights, first: impl FnOnce(&Path) -> nix::Result<()>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let user = geteuid().is_root().then_some(USER);
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid.into()), Some(gid.into())).unwrap();
        }
        let arguments = Arguments {
            seal,
            user,
            rights,
            lends: true,
            ..Arguments::default()
        };
        let (socket, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap();
        // SAFETY: the child leaves without unwinding into the test runner; it takes no lock that another
        // thread of the runner might have held at the fork (the allocator's are reset by glibc's fork
        // handlers).
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                drop(socket);
                let opened = first(folder.path()).map_err(io::Error::from);
                let opened = opened
                    .and_then(|()| fs::File::open(folder.path()))
                    .and_then(|open| {
                        dup2_stdout(&open)?;
                        Ok(open)
                    });
                let done = opened.map_err(SealedProcessError::from);
                let done = done.and_then(|open| serve(theirs, open.into(), &arguments));
                // SAFETY: ends the child without running the runner's exit handlers.
                unsafe { libc::_exit(i32::from(done.is_err())) }
            }
            ForkResult::Parent { child } => {
                drop(theirs);
                Self {
                    folder,
                    pid: child,
                    guest: Some(Guest::begin(socket)),
                }
            }
        }
    }

    fn guest(&mut self) -> &mut Guest {
        self.guest.as_mut().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn proc(&self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(name)
    }

    /// Closes the socket; returns how the process ends.
    fn end(mut self) -> WaitStatus {
        drop(self.guest.take());
        waitpid(self.pid, None).unwrap()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.guest.is_some() {
            // It may have ended.
            let _ = kill(self.pid, Signal::SIGKILL);
            let _ = waitpid(self.pid, None);
        }
    }
}

fn all() -> Rights {
    Rights {
        read_only: false,
        xattr: true,
    }
}

#[test]
fn process_sees_the_folder_and_nothing_else_and_has_no_rights() {
    let started = Started::new(Seal::Require, Rights::default());
    let names = fs::read_dir(started.proc("root")).unwrap();
    let names: BTreeSet<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, BTreeSet::from(["folder".into(), "proc".into()]));
    let within = fs::read_dir(started.proc("root/proc")).unwrap();
    assert_eq!(within.count(), 1, "of /proc it has its own descriptors only");
    let status = fs::read_to_string(started.proc("status")).unwrap();
    for line in [
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    // No descriptor leads to the host's mounts.
    for entry in fs::read_dir(started.proc("fd")).unwrap() {
        let target = fs::read_link(entry.unwrap().path()).unwrap();
        assert_ne!(target, started.folder.path());
    }
    let mounts = fs::read_to_string(started.proc("mountinfo")).unwrap();
    let mount = mounts.lines().find(|line| line.contains(" /folder ")).unwrap();
    for option in ["rw", "nosuid", "nodev", "noexec"] {
        assert!(mount.contains(option), "{mount}");
    }
    let ended = started.end();
    assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}");
}

#[test]
fn every_operation_is_within_the_seal() {
    let mut started = Started::new(Seal::Require, all());
    let directory = started.path("");
    let guest = started.guest();
    let (node, handle) = guest.create(b"file", 0o644).unwrap();
    guest.write(node, handle, 0, b"content").unwrap();
    assert_eq!(guest.read(node, handle, 0, 64).unwrap(), b"content");
    let io = |size| io_body(handle, 0, size);
    let with_handle = |rest: &[u32]| [&handle.to_le_bytes()[..], &words(rest)].concat();
    let mut attributes = vec![0; 88];
    // Mode, size, both times.
    set_u32_at(&mut attributes, 0, 1 | 8 | 16 | 32);
    set_u32_at(&mut attributes, 16, 4);
    set_u32_at(&mut attributes, 68, 0o600);
    let requests: Vec<(u32, u64, Vec<u8>)> = vec![
        (opcode::GETATTR, node, vec![0; 16]),
        (opcode::SETATTR, node, attributes),
        (opcode::STATFS, ROOT, vec![]),
        (opcode::FLUSH, node, with_handle(&[0; 4])),
        (opcode::FSYNC, node, with_handle(&[0, 0])),
        (opcode::FSYNC, node, with_handle(&[1, 0])),
        (opcode::ACCESS, node, words(&[4, 0])),
        (opcode::FALLOCATE, node, with_handle(&[0, 0, 64, 0, 0, 0])),
        (
            opcode::LSEEK,
            node,
            with_handle(&[0, 0, libc::SEEK_SET as u32, 0]),
        ),
        (opcode::MKDIR, ROOT, [&words(&[0o755, 0])[..], b"sub\0"].concat()),
        (
            opcode::MKNOD,
            ROOT,
            [&words(&[libc::S_IFIFO | 0o600, 0, 0, 0])[..], b"pipe\0"].concat(),
        ),
        (opcode::SYMLINK, ROOT, b"link\0../target\0".to_vec()),
        (
            opcode::LINK,
            ROOT,
            [&node.to_le_bytes()[..], b"second\0"].concat(),
        ),
        (
            opcode::RENAME2,
            ROOT,
            [&ROOT.to_le_bytes()[..], &words(&[0, 0]), b"second\0third\0"].concat(),
        ),
        (
            opcode::RENAME,
            ROOT,
            [&ROOT.to_le_bytes()[..], b"third\0fourth\0"].concat(),
        ),
        (opcode::UNLINK, ROOT, b"fourth\0".to_vec()),
        (opcode::RMDIR, ROOT, b"sub\0".to_vec()),
    ];
    for (operation, at, body) in requests {
        assert!(guest.ask(operation, at, &body).is_ok(), "{operation}");
    }
    let link = guest.lookup(ROOT, b"link").unwrap();
    assert_eq!(guest.ask(opcode::READLINK, link, &[]).unwrap(), b"../target");
    let reply = guest
        .ask(opcode::OPENDIR, ROOT, &words(&[libc::O_DIRECTORY as u32, 0]))
        .unwrap();
    let open = u64_at(&reply, 0).unwrap();
    for operation in [opcode::READDIR, opcode::READDIRPLUS] {
        let names = guest.ask(operation, ROOT, &io_body(open, 0, 4096)).unwrap();
        assert!(names.windows(4).any(|window| window == b"pipe"));
    }
    let closed = |handle: u64| [&handle.to_le_bytes()[..], &words(&[0; 4])].concat();
    guest
        .ask(
            opcode::FSYNCDIR,
            ROOT,
            &[&open.to_le_bytes()[..], &words(&[0, 0])].concat(),
        )
        .unwrap();
    guest.ask(opcode::RELEASEDIR, ROOT, &closed(open)).unwrap();
    // The folder's file system may have no extended attributes; the process survives the requests.
    let named = |first: &[u32]| [&words(first)[..], b"user.note\0"].concat();
    let _ = guest.ask(opcode::SETXATTR, node, &[&named(&[1, 0])[..], b"x"].concat());
    let _ = guest.ask(opcode::GETXATTR, node, &named(&[64, 0]));
    let _ = guest.ask(opcode::LISTXATTR, node, &words(&[64, 0]));
    let _ = guest.ask(opcode::REMOVEXATTR, node, b"user.note\0");
    // A program changes the flags of its open file.
    let mut appending = io(4);
    set_u32_at(&mut appending, 32, (libc::O_RDWR | libc::O_APPEND) as u32);
    assert_eq!(guest.ask(opcode::READ, node, &appending).unwrap(), b"cont");
    guest.ask(opcode::RELEASE, node, &closed(handle)).unwrap();
    guest.ask(opcode::DESTROY, 0, &[]).unwrap();
    let file = directory.join("file").metadata().unwrap();
    assert_eq!((file.len(), file.mode() & 0o7777), (64, 0o600));
    if geteuid().is_root() {
        assert_eq!((file.uid(), file.gid()), USER);
    }
    assert!(directory.join("pipe").metadata().unwrap().file_type().is_fifo());
    let ended = started.end();
    assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}");
}

#[test]
fn read_only_folder_is_mounted_so() {
    let mut started = Started::new(
        Seal::Require,
        Rights {
            read_only: true,
            xattr: false,
        },
    );
    fs::write(started.path("old"), "old").unwrap();
    let mounts = fs::read_to_string(started.proc("mountinfo")).unwrap();
    let mount = mounts.lines().find(|line| line.contains(" /folder ")).unwrap();
    assert!(mount.contains(" ro,"), "{mount}");
    let guest = started.guest();
    let node = guest.lookup(ROOT, b"old").unwrap();
    let handle = guest.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(node, handle, 0, 64).unwrap(), b"old");
    assert_eq!(guest.open(node, libc::O_RDWR), Err(libc::EROFS));
}

#[test]
fn server_without_a_sandbox_serves_the_same_folder() {
    let mut started = Started::new(Seal::Off, Rights::default());
    fs::write(started.path("old"), "old").unwrap();
    let guest = started.guest();
    let node = guest.lookup(ROOT, b"old").unwrap();
    let handle = guest.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(node, handle, 0, 64).unwrap(), b"old");
}

#[test]
fn full_folder_gives_enospc() {
    assert!(geteuid().is_root(), "the tests of this crate run as root");
    let mut started = Started::within(Seal::Require, Rights::default(), |folder| {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none = None::<&Path>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        let (uid, gid) = USER;
        let options = format!("size=64k,uid={uid},gid={gid}");
        mount(
            Some("none"),
            folder,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
    });
    let guest = started.guest();
    let (node, handle) = guest.create(b"file", 0o600).unwrap();
    let written = guest.write(node, handle, 0, &[7; 128 << 10]);
    assert!(
        written == Err(libc::ENOSPC) || written == Ok(64 << 10),
        "{written:?}"
    );
    assert_eq!(guest.write(node, handle, 64 << 10, &[7; 4096]), Err(libc::ENOSPC));
    // The server still serves the written bytes.
    assert_eq!(guest.read(node, handle, 0, 4).unwrap(), [7; 4]);
}

#[test]
fn words_of_no_monitor_are_refused() {
    let status = run(&mut ["sandbox=on".to_owned()].into_iter());
    assert_eq!(format!("{status:?}"), format!("{:?}", ExitCode::from(USAGE)));
}

#[test]
fn sealed_process_passes_files_of_its_user_with_a_lease_and_no_others() {
    let rights = Rights {
        read_only: true,
        xattr: false,
    };
    let mut started = Started::new(Seal::Auto, rights);
    let own = started.path("own");
    fs::write(&own, [7; 32 << 10]).unwrap();
    fs::write(started.path("root"), [7; 32 << 10]).unwrap();
    if geteuid().is_root() {
        chown(&own, Some(USER.0.into()), Some(USER.1.into())).unwrap();
    }
    let mut expected = Vec::new();
    let guest = started.guest.as_mut().unwrap();
    for name in ["own", "root"] {
        let node = guest.lookup(ROOT, name.as_bytes()).unwrap();
        let handle = guest.open(node, libc::O_RDONLY).unwrap();
        assert_eq!(guest.read(node, handle, 0, 4096).unwrap(), [7; 4096]);
        if name == "own" || !geteuid().is_root() {
            expected.push(node);
        }
    }
    let lent = guest.lent();
    assert_eq!(lent.iter().map(|(node, _)| *node).collect::<Vec<_>>(), expected);
    // A writer waits; its signal does not end the process.
    let open = || {
        let mut options = fs::OpenOptions::new();
        options.write(true).custom_flags(libc::O_NONBLOCK).open(&own)
    };
    assert_eq!(open().unwrap_err().raw_os_error(), Some(libc::EWOULDBLOCK));
    drop(lent);
    assert!(open().is_ok());
    let guest = started.guest.as_mut().unwrap();
    assert!(guest.lookup(ROOT, b"own").is_ok());
    let ended = started.end();
    assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}");
}
