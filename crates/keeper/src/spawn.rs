//! Starts a process of a VM: a clone in namespaces of its own that executes a program.
//!
//! Between the clone and the execve the child makes raw system calls only: a process with threads may call
//! this, and a lock that one of them held at the clone is held forever in the child. So the child allocates
//! nothing, takes no lock and calls nothing of the standard library. Everything it needs is prepared before.
//!
//! The child is namespace root, mapped to a separate user or to the keeper's, so that it can close its own
//! sandbox; it drops these rights before the guest runs.
//!
//! The kernel kills the child when its parent ends. A parent may end before the child has requested that. So
//! the child requests it first, reports that, and executes its program only after the parent's reply.

mod id_map;
mod namespaces;

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use libc::{c_char, c_int, c_long};

use self::id_map::write_maps;
pub use self::namespaces::Namespaces;
use crate::limits::Limits;

/// Number of the descriptor that a started process has as its control socket.
pub const CONTROL_FD: c_int = 3;
/// Exit status of a process whose program could not be executed.
pub const NOT_EXECUTED: c_int = 127;
/// Exit status of a process that gave up before it executed its program.
const NOT_PREPARED: c_int = 126;
/// Time limit for a child to request its parent-death signal: a few system calls.
const READY_TIMEOUT: Duration = Duration::from_secs(5);
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
mod tests;
