//! Starts a shard's process: a clone in namespaces of its own that executes the program of shards.
//!
//! Between the clone and the execve the child makes raw system calls only: the monitor has threads, and a lock that
//! one of them held at the clone is held for ever in the child. So it allocates nothing, takes no lock and calls
//! nothing of the standard library. All it needs is prepared before.
//!
//! The child is namespace root, mapped to a user of its own ([`crate::identity`]) or to the monitor's, so that it can close
//! its own sandbox; it gives that up before the guest runs.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::process::{Command, Stdio};

use libc::{c_char, c_int, c_long};
use shard_api::launch::{CONTROL_FD, Identity};

/// The namespaces of a shard, with the words for a report. The user namespace first: it permits the others.
const NAMESPACES: [(c_int, &str); 6] = [
    (libc::CLONE_NEWUSER, "user"),
    (libc::CLONE_NEWNS, "mount"),
    (libc::CLONE_NEWNET, "network"),
    (libc::CLONE_NEWPID, "PID"),
    (libc::CLONE_NEWIPC, "IPC"),
    (libc::CLONE_NEWUTS, "UTS"),
];

/// Exit status of a process whose program could not be executed.
pub const NOT_EXECUTED: c_int = 127;

/// A started process; not waited for yet.
#[derive(Debug)]
pub struct Spawned {
    /// Its process id, as the monitor sees it.
    pub pid: i32,
    /// The namespaces that the host refused, one line each.
    pub missing: Vec<String>,
    /// Whether it has the user that it was to have.
    pub is_mapped: bool,
}

/// The namespaces this host lets us make, and those it refuses, found by trying.
#[derive(Clone, Debug)]
pub struct Namespaces {
    flags: c_int,
    /// One line for each namespace refused.
    pub missing: Vec<String>,
}

impl Namespaces {
    /// None: for `--sandbox=off`.
    pub fn none() -> Self {
        Self {
            flags: 0,
            missing: Vec::new(),
        }
    }

    /// Tries all at once, and where that is refused each on top of those before it. A clone that ends at once for each try:
    /// cheap, but for the network namespaces, which cost milliseconds.
    pub fn probe() -> Self {
        let mut found = Self::none();
        let all = NAMESPACES.iter().fold(0, |flags, (flag, _)| flags | flag);
        if try_flags(all).is_ok() {
            found.flags = all;
            return found;
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
    // A byte, not only the end of file: a process cloned by another thread meanwhile holds a copy of this end, and may be
    // waiting in the same way for one that this child holds.
    let _ = File::from(go_write).write_all(b"g");
    reap(pid as i32);
    mapped
}

/// # Safety
/// As fork: in the child (0 returned) only async-signal-safe calls are allowed.
unsafe fn raw_clone(flags: c_int) -> c_long {
    // SAFETY: no stack, no thread ids, no TLS: the kernel copies the process, as for fork.
    unsafe {
        libc::syscall(
            libc::SYS_clone,
            c_long::from(flags | libc::SIGCHLD),
            0_usize,
            0_usize,
            0_usize,
            0_usize,
        )
    }
}

fn reap(pid: i32) {
    let mut status = 0;
    // SAFETY: waits for our own child; status is a valid place.
    while unsafe { libc::waitpid(pid, &raw mut status, 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Maps the child's root to `outside`, or to the user itself.
fn write_maps(pid: i32, outside: Option<Identity>) -> io::Result<()> {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let put = |file: &str, text: String| -> io::Result<()> {
        File::options()
            .write(true)
            .open(format!("/proc/{pid}/{file}"))?
            .write_all(text.as_bytes())
    };
    if let Some(outside) = outside {
        if uid == 0 {
            put("uid_map", format!("0 {} 1\n", outside.uid))?;
            return put("gid_map", format!("0 {} 1\n", outside.gid));
        }
        map_by("newuidmap", pid, outside.uid)?;
        return map_by("newgidmap", pid, outside.gid);
    }
    put("setgroups", "deny".to_owned())?;
    put("uid_map", format!("0 {uid} 1\n"))?;
    put("gid_map", format!("0 {gid} 1\n"))
}

/// Has one of the host's privileged helpers map the child's root to `id`, which must be in the user's range.
fn map_by(helper: &str, pid: i32, id: u32) -> io::Result<()> {
    let failed = |why: String| io::Error::other(format!("{helper}: {why}"));
    let output = Command::new(helper)
        .args([pid.to_string(), "0".to_owned(), id.to_string(), "1".to_owned()])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(said.lines().next().unwrap_or("refused").to_owned()))
}

/// Everything the child needs, made before the clone.
struct Prepared {
    program: c_int,
    control: c_int,
    null: c_int,
    log: c_int,
    go: c_int,
    go_write: c_int,
    argv: [*const c_char; 3],
    envp: [*const c_char; 2],
    user: bool,
}

/// Starts `program` with the command line `words`: `control` becomes descriptor 3, `log` standard output and error. The
/// child is killed when the calling *thread* ends, which must therefore live as long as the VM.
pub fn spawn(
    program: BorrowedFd<'_>,
    words: [&str; 2],
    control: BorrowedFd<'_>,
    log: BorrowedFd<'_>,
    namespaces: &Namespaces,
    identity: Option<Identity>,
) -> io::Result<Spawned> {
    let null = OwnedFd::from(File::options().read(true).open("/dev/null")?);
    let (go_read, go_write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    let argument = |text: &str| CString::new(text).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let words = [argument(words[0])?, argument(words[1])?];
    let backtrace = c"RUST_BACKTRACE=0";
    // High numbers, so that the child's own places (0 to 3) are not among them.
    let high = |fd: BorrowedFd<'_>| -> io::Result<OwnedFd> {
        use std::os::fd::FromRawFd;
        // SAFETY: duplicates an open descriptor.
        let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10) };
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, ours alone.
        Ok(unsafe { OwnedFd::from_raw_fd(copy) })
    };
    use std::os::fd::AsFd;
    let kept = [
        high(program)?,
        high(control)?,
        high(null.as_fd())?,
        high(log)?,
        high(go_read.as_fd())?,
    ];
    drop(go_read);
    let prepared = Prepared {
        program: kept[0].as_raw_fd(),
        control: kept[1].as_raw_fd(),
        null: kept[2].as_raw_fd(),
        log: kept[3].as_raw_fd(),
        go: kept[4].as_raw_fd(),
        go_write: go_write.as_raw_fd(),
        argv: [words[0].as_ptr(), words[1].as_ptr(), std::ptr::null()],
        envp: [backtrace.as_ptr(), std::ptr::null()],
        user: namespaces.flags & libc::CLONE_NEWUSER != 0,
    };
    // SAFETY: as fork; the child goes straight into `child`, which keeps to raw system calls.
    let pid = unsafe { raw_clone(namespaces.flags) };
    if pid == 0 {
        // SAFETY: in the child, with everything prepared alive in our copy of the memory.
        unsafe { child(&prepared) }
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    let pid = pid as i32;
    if prepared.user
        && let Err(error) = write_maps(pid, identity)
    {
        drop(go_write);
        // It may be waiting for an end that another child holds too.
        // SAFETY: sends a signal to a child of ours that is not reaped yet.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        reap(pid);
        return Err(error);
    }
    // A child that died already is noticed by who waits for it.
    let _ = File::from(go_write).write_all(b"g");
    Ok(Spawned {
        pid,
        missing: namespaces.missing.clone(),
        is_mapped: prepared.user && identity.is_some(),
    })
}

/// # Safety
/// Only in a process just cloned; never returns.
unsafe fn child(prepared: &Prepared) -> ! {
    // SAFETY: raw system calls on descriptors and memory prepared before the clone; nothing here allocates or locks.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::close(prepared.go_write);
        let mut byte = 0_u8;
        // End of file instead of the byte: the monitor gave up or died.
        if libc::syscall(libc::SYS_read, prepared.go, &raw mut byte, 1_usize) != 1 {
            libc::_exit(126);
        }
        if prepared.user {
            // May be refused (setgroups denied, nothing mapped): then there are no groups to lose.
            libc::syscall(libc::SYS_setgroups, 0_usize, std::ptr::null::<u32>());
            if libc::syscall(libc::SYS_setresgid, 0, 0, 0) != 0
                || libc::syscall(libc::SYS_setresuid, 0, 0, 0) != 0
            {
                libc::_exit(126);
            }
            // A change of identity clears it.
            libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        }
        let dup = |from: c_int, to: c_int| libc::syscall(libc::SYS_dup3, from, to, 0);
        if dup(prepared.null, 0) < 0
            || dup(prepared.log, 1) < 0
            || dup(prepared.log, 2) < 0
            || dup(prepared.control, CONTROL_FD) < 0
        {
            libc::_exit(126);
        }
        // Everything else closes at the exec; all our descriptors are close-on-exec, these are marked again to be sure.
        libc::syscall(libc::SYS_close_range, 4_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        // Ignored signals survive an exec; the mask is the thread's.
        let none: u64 = 0;
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const none,
            std::ptr::null_mut::<u64>(),
            size_of::<u64>(),
        );
        libc::syscall(
            libc::SYS_execveat,
            prepared.program,
            c"".as_ptr(),
            prepared.argv.as_ptr(),
            prepared.envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
        libc::_exit(NOT_EXECUTED)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::identity::{Given, Place};

    /// A user that is made up for a test, and the ids that it may give to processes.
    const MADE_UP: u32 = 61_234;
    const RANGE: std::ops::Range<u32> = 1_950_000_000..1_950_065_536;
    /// Set for the test program when the made-up user runs it.
    const AS_USER: &str = "MIRRORBALL_TEST_AS_MADE_UP_USER";

    #[test]
    fn a_process_has_the_user_and_group_that_it_was_given() {
        let namespaces = Namespaces::probe();
        if !nix::unistd::geteuid().is_root() || !namespaces.missing.is_empty() {
            return eprintln!("left out: it takes root and all namespaces");
        }
        let identity = Identity {
            uid: 1_900_000_003,
            gid: 1_900_000_004,
        };
        start_and_look(&namespaces, identity);
    }

    /// Starts a process as `identity`, and expects that others see it so.
    fn start_and_look(namespaces: &Namespaces, identity: Identity) {
        let (control, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let log = File::options().write(true).open("/dev/null").unwrap();
        let program = File::open("/bin/sleep").unwrap();
        let (program, control, log) = (program.as_fd(), control.as_fd(), log.as_fd());
        let spawned = spawn(
            program,
            ["sleep", "100"],
            control,
            log,
            namespaces,
            Some(identity),
        )
        .unwrap();
        assert!(spawned.is_mapped);
        let deadline = Instant::now() + Duration::from_secs(10);
        let wanted = [("Uid", identity.uid), ("Gid", identity.gid)]
            .map(|(field, id)| format!("{field}:\t{id}\t{id}\t{id}\t{id}\n"));
        loop {
            let status = std::fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
            if wanted.iter().all(|line| status.contains(line.as_str())) {
                break;
            }
            assert!(Instant::now() < deadline, "{status}");
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: a child of this process that is not reaped yet.
        unsafe { libc::kill(spawned.pid, libc::SIGKILL) };
        reap(spawned.pid);
    }

    #[test]
    fn a_process_of_a_user_with_a_range_is_a_number_of_that_range_outside() {
        if std::env::var_os(AS_USER).is_some() {
            return as_made_up_user();
        }
        assert!(
            nix::unistd::geteuid().is_root(),
            "this test needs root to make up a user"
        );
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        // A copy that the user can reach, wherever this program is.
        let program = directory.path().join("test");
        fs::copy("/proc/self/exe", &program).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let status = std::thread::scope(|scope| {
            let alone = scope.spawn(|| {
                make_up_user();
                Command::new(&program)
                    .args([
                        "spawn::tests::a_process_of_a_user_with_a_range_is_a_number_of_that_range_outside",
                        "--exact",
                        "--nocapture",
                    ])
                    .env(AS_USER, "1")
                    .current_dir("/")
                    .uid(MADE_UP)
                    .gid(MADE_UP)
                    .status()
                    .unwrap()
            });
            alone.join().unwrap()
        });
        assert!(status.success(), "as the made-up user: {status}");
    }

    /// Gives the calling thread and its children a view of `/etc` with a user that has a range.
    fn make_up_user() {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(
            Some("none"),
            "/etc",
            Some("tmpfs"),
            MsFlags::empty(),
            Some("mode=755"),
        )
        .unwrap();
        let range = format!("made-up:{}:{}\n", RANGE.start, RANGE.end - RANGE.start);
        for (file, text) in [
            (
                "passwd",
                format!("root:x:0:0::/:/bin/sh\nmade-up:x:{MADE_UP}:{MADE_UP}::/:/bin/sh\n"),
            ),
            ("group", format!("root:x:0:\nmade-up:x:{MADE_UP}:\n")),
            ("nsswitch.conf", "passwd: files\ngroup: files\n".to_owned()),
            ("subuid", range.clone()),
            ("subgid", range),
        ] {
            fs::write(Path::new("/etc").join(file), text).unwrap();
        }
    }

    fn as_made_up_user() {
        assert_eq!(nix::unistd::geteuid().as_raw(), MADE_UP);
        let namespaces = Namespaces::probe();
        if !namespaces.missing.is_empty() {
            return eprintln!("left out: {}", namespaces.missing.join("; "));
        }
        let helpers = ["newuidmap", "newgidmap"].map(|helper| Path::new("/usr/bin").join(helper));
        assert!(
            helpers.iter().all(|helper| helper.exists()),
            "this test needs newuidmap and newgidmap (Debian: uidmap)"
        );
        let identities = [3, 4].map(|cid| {
            let given = Given::of(Place::Vm(cid));
            assert_eq!(given.note, None);
            given.identity.unwrap()
        });
        assert_ne!(identities[0], identities[1]);
        for identity in identities {
            assert!(RANGE.contains(&identity.uid) && RANGE.contains(&identity.gid));
            start_and_look(&namespaces, identity);
        }
        // The helpers refuse what is not the user's.
        let foreign = Identity {
            uid: RANGE.end,
            gid: RANGE.end,
        };
        let null = File::options().write(true).open("/dev/null").unwrap();
        let program = File::open("/bin/sleep").unwrap();
        let (program, null) = (program.as_fd(), null.as_fd());
        let refused = spawn(program, ["sleep", "100"], null, null, &namespaces, Some(foreign));
        assert!(
            refused
                .as_ref()
                .is_err_and(|error| error.to_string().starts_with("newuidmap: ")),
            "{:?}",
            refused.err()
        );
    }
}
