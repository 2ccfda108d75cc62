//! Starts a process of a VM: a clone in namespaces of its own that executes a program.
//!
//! Between the clone and the execve the child makes raw system calls only: a process with threads may call
//! this, and a lock that one of them held at the clone is held for ever in the child. So the child allocates
//! nothing, takes no lock and calls nothing of the standard library. Everything it needs is prepared before.
//!
//! The child is namespace root, mapped to a user of its own or to the keeper's, so that it can close its own
//! sandbox; it gives that up before the guest runs.
//!
//! The kernel kills the child when its parent ends. A parent may end before the child has asked for that, so
//! the child asks first, reports that it has, and executes its program only after the parent's reply.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child as Helper, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use libc::{c_char, c_int, c_long};

use crate::limits::Limits;

/// Number of the descriptor that a started process has as its control socket.
pub const CONTROL_FD: c_int = 3;
/// Exit status of a process whose program could not be executed.
pub const NOT_EXECUTED: c_int = 127;
/// Exit status of a process that gave up before it executed its program.
const NOT_PREPARED: c_int = 126;
/// Time that a child has until it has asked for its parent-death signal: a few system calls.
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a helper has which maps a user. Both together stay below the limit of a request.
const HELPER_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a killed helper has to end. It may have another user, which this one cannot kill.
const HELPER_KILL_TIMEOUT: Duration = Duration::from_millis(100);
const HELPER_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The namespaces of a shard, with their names for a report. The user namespace first: it permits the others.
const NAMESPACES: [(c_int, &str); 6] = [
    (libc::CLONE_NEWUSER, "user"),
    (libc::CLONE_NEWNS, "mount"),
    (libc::CLONE_NEWNET, "network"),
    (libc::CLONE_NEWPID, "PID"),
    (libc::CLONE_NEWIPC, "IPC"),
    (libc::CLONE_NEWUTS, "UTS"),
];

/// A user and group outside of a process's user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user's number.
    pub uid: u32,
    /// The group's number.
    pub gid: u32,
}

/// A process that is to be started.
#[derive(Clone, Copy, Debug)]
pub struct Spawn<'a> {
    /// The program, open for execution.
    pub program: BorrowedFd<'a>,
    /// The socket that becomes descriptor [`CONTROL_FD`].
    pub control: BorrowedFd<'a>,
    /// The file that becomes standard output and error.
    pub log: BorrowedFd<'a>,
    /// The command line, beginning with the program's name.
    pub words: &'a [&'a str],
    /// The process's own namespaces, as [`Namespaces::flags`] has them.
    pub flags: c_int,
    /// The user and group that the process is mapped to; none where it keeps its parent's.
    pub identity: Option<Identity>,
    /// Bytes of the largest file that the process may write ([`Limits::file_bytes`]).
    pub file_bytes: u64,
}

/// A started process that is not reaped yet.
#[derive(Clone, Copy, Debug)]
pub struct Child {
    /// The process id, as its parent sees it.
    pub pid: i32,
    /// Whether the process has the identity that it was to have.
    pub is_mapped: bool,
}

/// The namespaces that this host lets a process make, and those that it refuses, found by trying.
#[derive(Clone, Debug)]
pub struct Namespaces {
    flags: c_int,
    /// One line for each namespace refused.
    pub missing: Vec<String>,
}

impl Namespaces {
    /// No namespaces: for `--sandbox=off`.
    pub fn none() -> Self {
        Self {
            flags: 0,
            missing: Vec::new(),
        }
    }

    /// All namespaces, which the host may refuse.
    pub fn all() -> Self {
        Self {
            flags: all_flags(),
            missing: Vec::new(),
        }
    }

    /// The namespaces of `flags`; none if there are other flags of a clone among them.
    pub fn of_flags(flags: c_int) -> Option<Self> {
        (flags & !all_flags() == 0).then(|| Self {
            flags,
            missing: Vec::new(),
        })
    }

    /// The namespaces as flags of a clone.
    pub fn flags(&self) -> c_int {
        self.flags
    }

    /// Tries all at once, and where that is refused each on top of those before it. Each try is a clone that
    /// ends at once: cheap, but for the network namespaces, which cost milliseconds.
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

fn all_flags() -> c_int {
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

/// Clones this process, as fork does, into new namespaces.
///
/// # Safety
/// As fork: in the child (0 returned) only async-signal-safe calls are allowed.
pub(crate) unsafe fn raw_clone(flags: c_int) -> c_long {
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

/// Waits for a child that has ended or been killed.
pub(crate) fn reap(pid: i32) {
    let mut status = 0;
    // SAFETY: waits for our own child; status is a valid place.
    while unsafe { libc::waitpid(pid, &raw mut status, 0) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Kills a child that is not reaped yet, and reaps it.
pub(crate) fn kill_and_reap(pid: i32) {
    // SAFETY: sends a signal to a child of ours that is not reaped yet.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    reap(pid);
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
    let mut process = Command::new(helper)
        .args([pid.to_string(), "0".to_owned(), id.to_string(), "1".to_owned()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    let Some(status) = wait_within(&mut process, HELPER_TIMEOUT)? else {
        end_helper(&mut process);
        return Err(failed("still runs after 5 s".to_owned()));
    };
    if status.success() {
        return Ok(());
    }
    // The pipe has the helper's text already.
    let mut text = [0; 512];
    let read = process
        .stderr
        .take()
        .map_or(Ok(0), |mut stderr| stderr.read(&mut text));
    let text = String::from_utf8_lossy(text.get(..read.unwrap_or(0)).unwrap_or_default()).into_owned();
    Err(failed(text.lines().next().unwrap_or("refused").to_owned()))
}

/// Waits for a helper. Returns its status, or none if it still runs after the timeout.
fn wait_within(helper: &mut Helper, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = helper.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        std::thread::sleep(HELPER_POLL_INTERVAL);
    }
}

/// Kills a helper, and reaps it. One that cannot be killed stays until this process ends.
fn end_helper(helper: &mut Helper) {
    let _ = helper.kill();
    let _ = wait_within(helper, HELPER_KILL_TIMEOUT);
}

/// Everything that the child needs, made before the clone.
struct Prepared {
    program: c_int,
    control: c_int,
    null: c_int,
    log: c_int,
    /// The child's end of the socket to its parent, and the parent's.
    go: c_int,
    parents_go: c_int,
    argv: *const *const c_char,
    envp: [*const c_char; 2],
    user: bool,
}

/// The words of a command line as the kernel takes them.
#[derive(Debug)]
pub(crate) struct Argv {
    _words: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Argv {
    /// # Errors
    /// `InvalidInput` for a word that contains a zero byte, and for no words at all.
    pub(crate) fn new<'a>(words: impl IntoIterator<Item = &'a str>) -> io::Result<Self> {
        let words: Vec<CString> = words
            .into_iter()
            .map(CString::new)
            .collect::<Result<_, _>>()
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        if words.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut pointers: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
        pointers.push(std::ptr::null());
        Ok(Self {
            _words: words,
            pointers,
        })
    }

    pub(crate) fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

/// A duplicate with a high number, so that the child's own places (0 to 3) are not among such.
pub(crate) fn high(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: duplicates an open descriptor.
    let copy = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Starts a process, which waits for nothing. The kernel kills it when the calling *thread* ends, which must
/// therefore live as long as the VM.
///
/// # Errors
/// If the clone, the map of its user or its limits are refused; no process is left then.
pub fn spawn(process: &Spawn<'_>) -> io::Result<Child> {
    let null = OwnedFd::from(File::options().read(true).open("/dev/null")?);
    let (ours, theirs) = UnixStream::pair()?;
    let argv = Argv::new(process.words.iter().copied())?;
    let backtrace = c"RUST_BACKTRACE=0";
    let kept = [
        high(process.program)?,
        high(process.control)?,
        high(null.as_fd())?,
        high(process.log)?,
        high(theirs.as_fd())?,
    ];
    drop((theirs, null));
    let prepared = Prepared {
        program: kept[0].as_raw_fd(),
        control: kept[1].as_raw_fd(),
        null: kept[2].as_raw_fd(),
        log: kept[3].as_raw_fd(),
        go: kept[4].as_raw_fd(),
        parents_go: ours.as_raw_fd(),
        argv: argv.as_ptr(),
        envp: [backtrace.as_ptr(), std::ptr::null()],
        user: process.flags & libc::CLONE_NEWUSER != 0,
    };
    // SAFETY: as fork; the child goes straight into `child`, which keeps to raw system calls.
    let pid = unsafe { raw_clone(process.flags) };
    if pid == 0 {
        // SAFETY: in the child, with everything prepared alive in our copy of the memory.
        unsafe { child(&prepared) }
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    drop(kept);
    let pid = pid as i32;
    let limits = Limits {
        file_bytes: process.file_bytes,
    };
    if let Err(error) = release(pid, ours, limits, prepared.user.then_some(process.identity)) {
        kill_and_reap(pid);
        return Err(error);
    }
    Ok(Child {
        pid,
        is_mapped: prepared.user && process.identity.is_some(),
    })
}

/// Sets the limits and the map of a child, and lets it execute its program.
fn release(pid: i32, mut go: UnixStream, limits: Limits, map: Option<Option<Identity>>) -> io::Result<()> {
    // Before the child changes its user: its entry in /proc is root's from then until it has executed its
    // program.
    limits.apply(pid)?;
    if let Some(identity) = map {
        write_maps(pid, identity)?;
    }
    // A child that died already is found by its exit status: errors of its socket are left out.
    let _ = go.write_all(b"m");
    go.set_read_timeout(Some(READY_TIMEOUT))?;
    let timed_out = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
    if go.read_exact(&mut [0]).is_err_and(|error| timed_out(&error)) {
        return Err(io::Error::other(
            "the new process did not come to its program within 5 s",
        ));
    }
    let _ = go.write_all(b"g");
    Ok(())
}

/// # Safety
/// Only in a process just cloned; never returns.
unsafe fn child(prepared: &Prepared) -> ! {
    // SAFETY: raw system calls on descriptors and memory prepared before the clone; nothing here allocates or
    // locks.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::close(prepared.parents_go);
        let mut byte = 0_u8;
        // End of file instead of the byte: the parent gave up or died.
        if libc::syscall(libc::SYS_read, prepared.go, &raw mut byte, 1_usize) != 1 {
            libc::_exit(NOT_PREPARED);
        }
        if prepared.user {
            // May be refused (setgroups denied, nothing mapped): then there are no groups to lose.
            libc::syscall(libc::SYS_setgroups, 0_usize, std::ptr::null::<u32>());
            if libc::syscall(libc::SYS_setresgid, 0, 0, 0) != 0
                || libc::syscall(libc::SYS_setresuid, 0, 0, 0) != 0
            {
                libc::_exit(NOT_PREPARED);
            }
            // A change of identity clears it.
            libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        }
        // A parent that dies before it replies leaves an end of file. One that dies later sends the signal.
        let byte = &raw mut byte;
        let ready = libc::syscall(
            libc::SYS_sendto,
            prepared.go,
            byte,
            1_usize,
            libc::MSG_NOSIGNAL,
            0_usize,
            0_usize,
        );
        if ready != 1 || libc::syscall(libc::SYS_read, prepared.go, byte, 1_usize) != 1 {
            libc::_exit(NOT_PREPARED);
        }
        let dup = |from: c_int, to: c_int| libc::syscall(libc::SYS_dup3, from, to, 0);
        if dup(prepared.null, 0) < 0
            || dup(prepared.log, 1) < 0
            || dup(prepared.log, 2) < 0
            || dup(prepared.control, CONTROL_FD) < 0
        {
            libc::_exit(NOT_PREPARED);
        }
        // Everything else closes at the exec. All our descriptors are close-on-exec; these are marked again
        // to be sure.
        close_on_exec_from(4);
        unblock_signals();
        libc::syscall(
            libc::SYS_execveat,
            prepared.program,
            c"".as_ptr(),
            prepared.argv,
            prepared.envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
        libc::_exit(NOT_EXECUTED)
    }
}

/// Marks all descriptors from this number on to be closed at an exec.
///
/// # Safety
/// Only in a process just cloned.
pub(crate) unsafe fn close_on_exec_from(first: u32) {
    // SAFETY: marks descriptors of this process only.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// Empties the mask of blocked signals, which would survive an exec.
///
/// # Safety
/// Only in a process just cloned.
pub(crate) unsafe fn unblock_signals() {
    let none: u64 = 0;
    // SAFETY: reads one number of ours, of the size that the kernel expects.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const none,
            std::ptr::null_mut::<u64>(),
            size_of::<u64>(),
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LIMIT: u64 = 1 << 40;

    fn start(path: &str, words: &[&str], flags: c_int, identity: Option<Identity>) -> io::Result<Child> {
        let null = File::options().write(true).open("/dev/null").unwrap();
        spawn(&Spawn {
            program: File::open(path).unwrap().as_fd(),
            control: null.as_fd(),
            log: null.as_fd(),
            words,
            flags,
            identity,
            file_bytes: NO_LIMIT,
        })
    }

    #[test]
    fn process_has_the_user_and_group_that_it_was_given() {
        let namespaces = Namespaces::probe();
        if !nix::unistd::geteuid().is_root() || !namespaces.missing.is_empty() {
            return eprintln!("left out: the test takes root and all namespaces");
        }
        let identity = Identity {
            uid: 1_900_000_003,
            gid: 1_900_000_004,
        };
        let spawned = start(
            "/bin/sleep",
            &["sleep", "100"],
            namespaces.flags(),
            Some(identity),
        )
        .unwrap();
        assert!(spawned.is_mapped);
        let wanted = [("Uid", identity.uid), ("Gid", identity.gid)]
            .map(|(field, id)| format!("{field}:\t{id}\t{id}\t{id}\t{id}\n"));
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let status = std::fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
            if wanted.iter().all(|line| status.contains(line.as_str())) {
                break;
            }
            assert!(Instant::now() < deadline, "{status}");
            std::thread::sleep(Duration::from_millis(1));
        }
        kill_and_reap(spawned.pid);
    }

    #[test]
    fn helper_that_does_not_end_in_time_is_killed_and_reaped() {
        let mut helper = Command::new("sleep").arg("100").spawn().unwrap();
        let limit = Duration::from_millis(5);
        assert!(wait_within(&mut helper, limit).unwrap().is_none());
        end_helper(&mut helper);
        let entry = format!("/proc/{}", helper.id());
        assert!(!std::path::Path::new(&entry).exists(), "no zombie is left");
    }

    #[test]
    fn namespaces_take_no_other_flags_of_a_clone() {
        assert!(Namespaces::of_flags(all_flags()).is_some_and(|all| all.flags() == all_flags()));
        assert!(Namespaces::of_flags(0).is_some());
        for other in [libc::CLONE_VM, libc::CLONE_FILES, libc::SIGKILL, -1] {
            assert!(Namespaces::of_flags(other).is_none(), "{other:#x}");
        }
    }

    #[test]
    fn child_whose_parent_ends_before_the_reply_executes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let made = directory.path().join("made");
        let (ours, theirs) = UnixStream::pair().unwrap();
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let program = File::open("/bin/sh").unwrap();
        let script = format!("echo > {}", made.display());
        let argv = Argv::new(["sh", "-c", &script]).unwrap();
        let kept = [&program, &null].map(|file| high(file.as_fd()).unwrap());
        let go = high(theirs.as_fd()).unwrap();
        drop(theirs);
        let prepared = Prepared {
            program: kept[0].as_raw_fd(),
            control: kept[1].as_raw_fd(),
            null: kept[1].as_raw_fd(),
            log: kept[1].as_raw_fd(),
            go: go.as_raw_fd(),
            parents_go: ours.as_raw_fd(),
            argv: argv.as_ptr(),
            envp: [std::ptr::null(); 2],
            user: false,
        };
        // SAFETY: as fork; the child goes straight into `child`.
        let pid = unsafe { raw_clone(0) };
        if pid == 0 {
            // SAFETY: in the child, with everything prepared alive in its copy of the memory.
            unsafe { child(&prepared) }
        }
        drop(go);
        (&ours).write_all(b"m").unwrap();
        ours.set_read_timeout(Some(READY_TIMEOUT)).unwrap();
        (&ours).read_exact(&mut [0]).unwrap();
        // The child waits for the reply; the end of its parent is this end of file.
        drop(ours);
        let mut status = 0;
        // SAFETY: waits for our own child; status is a valid place.
        let waited = unsafe { libc::waitpid(pid as i32, &raw mut status, 0) };
        assert_eq!(i64::from(waited), pid);
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == NOT_PREPARED,
            "{status:#x}"
        );
        assert!(!made.exists());
    }
}
