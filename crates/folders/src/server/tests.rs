//! The server on a thread, with the packets of a guest's kernel written by hand.

use std::ffi::OsStr;
use std::fs;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::thread::JoinHandle;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::*;
use crate::guest::{Guest, ROOT, io_body, words};
use crate::packet::{DATA_BYTES_MAX, opcode, set_u32_at, u64_at};

/// A folder with its server.
struct Served {
    folder: tempfile::TempDir,
    guest: Option<Guest>,
    server: Option<JoinHandle<io::Result<()>>>,
}

impl Served {
    fn new(rights: Rights) -> Self {
        Self::with(Arguments {
            rights,
            ..Arguments::default()
        })
    }

    fn with(arguments: Arguments) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (socket, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap();
        let server = FolderServer::new(folder.path().to_str().unwrap(), &arguments).unwrap();
        let server = std::thread::spawn(move || server.run(&theirs));
        Self {
            folder,
            guest: Some(Guest::begin(socket)),
            server: Some(server),
        }
    }
}

impl Deref for Served {
    type Target = Guest;
    fn deref(&self) -> &Guest {
        self.guest.as_ref().unwrap()
    }
}

impl DerefMut for Served {
    fn deref_mut(&mut self) -> &mut Guest {
        self.guest.as_mut().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.guest.take());
        if let Some(server) = self.server.take()
            && !std::thread::panicking()
        {
            server.join().unwrap().unwrap();
        }
    }
}

#[test]
fn files_are_read_and_written_in_packets_of_any_length() {
    let mut guest = Served::new(Rights::default());
    let data: Vec<u8> = (0..DATA_BYTES_MAX).map(|byte| (byte % 251) as u8).collect();
    let (node, handle) = guest.create(b"new", 0o644).unwrap();
    assert_eq!(guest.write(node, handle, 0, &data), Ok(DATA_BYTES_MAX as u32));
    assert_eq!(guest.write(node, handle, DATA_BYTES_MAX as u64, b"end"), Ok(3));
    let path = guest.folder.path().join("new");
    assert_eq!(fs::read(&path).unwrap(), [&data[..], b"end"].concat());
    assert!(guest.read(node, handle, 0, DATA_BYTES_MAX) == Ok(data));
    assert_eq!(
        guest.read(node, handle, DATA_BYTES_MAX as u64, 4096).unwrap(),
        b"end"
    );
    assert_eq!(guest.read(node, handle, 1 << 40, 4096).unwrap(), b"");
    fs::write(guest.folder.path().join("host"), "of the host").unwrap();
    let node = guest.lookup(ROOT, b"host").unwrap();
    let handle = guest.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.read(node, handle, 0, 64).unwrap(), b"of the host");
}

#[test]
fn file_of_a_guest_is_the_servers_users_without_privileged_bits() {
    let mut guest = Served::new(Rights::default());
    guest.create(b"program", 0o6755).unwrap();
    let metadata = guest.folder.path().join("program").metadata().unwrap();
    assert_eq!(metadata.permissions().mode() & 0o7777, 0o755);
    assert_eq!(metadata.uid(), nix::unistd::geteuid().as_raw());
}

#[test]
fn link_out_of_the_folder_is_not_followed() {
    let mut guest = Served::new(Rights::default());
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    symlink(outside.path(), guest.folder.path().join("directory")).unwrap();
    symlink(outside.path().join("secret"), guest.folder.path().join("file")).unwrap();
    let link = guest.lookup(ROOT, b"file").unwrap();
    assert_eq!(guest.open(link, libc::O_RDONLY), Err(libc::EBADF));
    assert_eq!(
        guest.ask(opcode::READLINK, link, &[]).unwrap(),
        outside.path().join("secret").as_os_str().as_bytes()
    );
    let link = guest.lookup(ROOT, b"directory").unwrap();
    assert_eq!(guest.lookup(link, b"secret"), Err(libc::ENOTDIR));
    assert_eq!(guest.lookup(ROOT, b".."), Err(libc::EINVAL));
    assert_eq!(guest.lookup(ROOT, b"directory/secret"), Err(libc::EINVAL));
    // Neither by a change of attributes.
    let mut body = vec![0; 88];
    set_u32_at(&mut body, 0, 8);
    assert_eq!(guest.ask(opcode::SETATTR, link, &body), Err(libc::EBADF));
    assert_eq!(fs::read(outside.path().join("secret")).unwrap(), b"secret");
}

#[test]
fn read_only_folder_stays_as_it_is() {
    let mut guest = Served::new(Rights {
        read_only: true,
        xattr: false,
    });
    fs::write(guest.folder.path().join("old"), "old").unwrap();
    let node = guest.lookup(ROOT, b"old").unwrap();
    assert_eq!(guest.create(b"new", 0o644), Err(libc::EROFS));
    assert_eq!(guest.open(node, libc::O_RDWR), Err(libc::EROFS));
    let handle = guest.open(node, libc::O_RDONLY).unwrap();
    assert_eq!(guest.write(node, handle, 0, b"new"), Err(libc::EROFS));
    assert_eq!(guest.ask(opcode::UNLINK, ROOT, b"old\0"), Err(libc::EROFS));
    assert_eq!(guest.read(node, handle, 0, 64).unwrap(), b"old");
    assert_eq!(fs::read_dir(guest.folder.path()).unwrap().count(), 1);
}

#[test]
fn name_of_any_bytes_is_passed_both_ways() {
    let mut guest = Served::new(Rights::default());
    let name = b"\xff\xfe name\n";
    guest.create(name, 0o600).unwrap();
    assert!(guest.folder.path().join(OsStr::from_bytes(name)).is_file());
    fs::write(guest.folder.path().join(OsStr::from_bytes(b"\x80host")), "").unwrap();
    guest.lookup(ROOT, b"\x80host").unwrap();
    let reply = guest
        .ask(opcode::OPENDIR, ROOT, &words(&[libc::O_DIRECTORY as u32, 0]))
        .unwrap();
    let handle = u64_at(&reply, 0).unwrap();
    let names = guest
        .ask(opcode::READDIRPLUS, ROOT, &io_body(handle, 0, 4096))
        .unwrap();
    for name in [name.as_slice(), b"\x80host"] {
        assert!(names.windows(name.len()).any(|window| window == name));
    }
}

#[test]
fn hard_link_is_made_without_a_capability_and_within_the_folder() {
    let mut guest = Served::new(Rights::default());
    let (node, _) = guest.create(b"file", 0o600).unwrap();
    let link = |guest: &mut Served, node: u64, name: &[u8]| {
        guest.ask(
            opcode::LINK,
            ROOT,
            &[&node.to_le_bytes()[..], name, b"\0"].concat(),
        )
    };
    let reply = link(&mut guest, node, b"second").unwrap();
    assert_eq!(u64_at(&reply, 0), Some(node), "the same file");
    let (first, second) = (
        guest.folder.path().join("file"),
        guest.folder.path().join("second"),
    );
    assert_eq!(first.metadata().unwrap().ino(), second.metadata().unwrap().ino());
    assert_eq!(link(&mut guest, node, b"second"), Err(libc::EEXIST));
    for name in [&b""[..], b".", b"..", b"../out", b"a/b"] {
        assert_eq!(link(&mut guest, node, name), Err(libc::EINVAL));
    }
    assert_eq!(link(&mut guest, 999, b"third"), Err(libc::EBADF));
    assert_eq!(guest.ask(opcode::LINK, ROOT, &[0; 4]), Err(libc::EINVAL));
    // Another file has the name now.
    fs::remove_file(&second).unwrap();
    fs::remove_file(&first).unwrap();
    fs::write(&first, "other").unwrap();
    assert!(link(&mut guest, node, b"third").is_err());
    // A link of a link, not of its target.
    symlink("/etc/passwd", guest.folder.path().join("out")).unwrap();
    let out = guest.lookup(ROOT, b"out").unwrap();
    link(&mut guest, out, b"out2").unwrap();
    assert!(
        guest
            .folder
            .path()
            .join("out2")
            .symlink_metadata()
            .unwrap()
            .is_symlink()
    );
}

#[test]
fn bad_request_gets_an_error_and_the_next_one_is_served() {
    let mut guest = Served::new(Rights::default());
    assert_eq!(guest.ask(opcode::OPEN, 999, &words(&[0, 0])), Err(libc::EBADF));
    // Cut bodies, names without an end, handles and sizes of no file.
    for (operation, body) in [
        (opcode::GETATTR, Vec::new()),
        (opcode::SYMLINK, b"name".to_vec()),
        (opcode::RENAME, vec![0; 8]),
        (opcode::FALLOCATE, vec![0; 8]),
        (opcode::READ, io_body(77, 0, 16)),
        (opcode::READ, io_body(77, 0, u32::MAX as usize)),
        (opcode::LSEEK, vec![0xff; 24]),
        (60, vec![0; 64]),
    ] {
        assert!(guest.ask(operation, ROOT, &body).is_err(), "{operation}");
    }
    guest.create(b"after", 0o600).unwrap();
}

#[test]
fn connection_begins_anew_after_its_end_and_after_a_reset() {
    let mut guest = Served::new(Rights::default());
    let (node, handle) = guest.create(b"file", 0o600).unwrap();
    guest.ask(opcode::DESTROY, 0, &[]).unwrap();
    assert_eq!(guest.read(node, handle, 0, 1), Err(libc::EBADF));
    guest.lookup(ROOT, b"file").unwrap();
    let (node, handle) = guest.create(b"other", 0o600).unwrap();
    guest.ask(opcode::INIT, 0, &words(&[7, 36, 0, 0])).unwrap();
    assert_eq!(guest.read(node, handle, 0, 1), Err(libc::EBADF));
}

#[test]
fn folder_that_vanishes_gives_errors() {
    let mut guest = Served::new(Rights::default());
    guest.create(b"file", 0o600).unwrap();
    fs::remove_dir_all(guest.folder.path()).unwrap();
    assert_eq!(guest.lookup(ROOT, b"file"), Err(libc::ENOENT));
    assert_eq!(guest.create(b"new", 0o600), Err(libc::ENOENT));
    fs::create_dir(guest.folder.path()).unwrap();
}

#[test]
fn file_that_is_read_is_passed_once_with_a_lease_unless_it_is_small_or_open_for_writing() {
    Lender::ignore_signals().unwrap();
    let mut guest = Served::with(Arguments {
        rights: Rights {
            read_only: true,
            xattr: false,
        },
        lends: true,
        ..Arguments::default()
    });
    let path = |name: &str| guest.folder.path().join(name);
    for (name, bytes) in [("small", 100), ("whole", 64 << 10), ("written", 64 << 10)] {
        fs::write(path(name), vec![7; bytes]).unwrap();
    }
    let written = fs::OpenOptions::new().write(true).open(path("written")).unwrap();
    let whole = path("whole");
    for name in ["small", "whole", "written"] {
        let node = guest.lookup(ROOT, name.as_bytes()).unwrap();
        let handle = guest.open(node, libc::O_RDONLY).unwrap();
        for offset in [0, 50] {
            assert_eq!(guest.read(node, handle, offset, 50).unwrap(), [7; 50]);
        }
        let lent = guest.lent();
        let expected = if name == "whole" { vec![node] } else { Vec::new() };
        assert_eq!(
            lent.iter().map(|(node, _)| *node).collect::<Vec<_>>(),
            expected,
            "{name}"
        );
        for (_, file) in lent {
            // SAFETY: the call takes no pointers.
            let lease = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLEASE) };
            assert_eq!(lease, libc::F_RDLCK as libc::c_int);
            let open = || {
                fs::OpenOptions::new()
                    .write(true)
                    .custom_flags(libc::O_NONBLOCK)
                    .open(&whole)
            };
            assert_eq!(open().unwrap_err().raw_os_error(), Some(libc::EWOULDBLOCK));
            drop(file);
            assert!(open().is_ok(), "the lease ends with the shard's file");
        }
    }
    drop(written);
}
