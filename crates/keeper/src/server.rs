//! The keeper's program: a loop over the monitor's socket and the ends of children.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use libc::{c_char, c_int};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::lease::{HANG_UP, Lease};
use crate::message::{FILES_MAX, Message};
use crate::socket::{Listener, Packet, Socket};
use crate::spawn::{self, Argv, NOT_EXECUTED, Spawn};
use crate::state::{Effect, Event, State};

/// Signals that do not end a keeper: a terminal's, a logout's, and a stop of a unit's processes. The keeper
/// ends when its monitor or its VM does.
pub(crate) const BLOCKED: [Signal; 7] = [
    Signal::SIGCHLD,
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGPIPE,
    Signal::SIGTSTP,
];
/// Time that a killed monitor has to go before the next one starts.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
const KILL_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Greatest number of packets that are read between two checks for the ends of children.
const PACKETS_AT_ONCE: usize = 64;
/// The highest number of a signal.
const SIGNALS_MAX: c_int = 64;

unsafe extern "C" {
    /// The environment of this process, as the C library keeps it.
    static environ: *const *const c_char;
}

/// Keeps a VM for the monitor at the other end of `socket`, until the VM has ended.
///
/// # Errors
/// If the descriptor is no monitor's socket, or the kernel refuses the signal descriptor.
pub fn run(socket: OwnedFd) -> io::Result<()> {
    let socket = Socket::take(socket)?;
    // SAFETY: names this process in lists of processes; the text ends with a zero byte.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"mirrorball-keep".as_ptr()) };
    SigSet::from_iter(BLOCKED).thread_block()?;
    let ends = SigSet::from_iter([Signal::SIGCHLD]);
    let ends = SignalFd::with_flags(&ends, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let mut server = Server {
        original: open_parent(&socket),
        socket: Some(socket),
        state: State::default(),
        slot: Vec::new(),
        incoming: Vec::new(),
        listener: None,
        lease: None,
        successor: None,
        successor_pid: None,
        leaving: Vec::new(),
        start_at: None,
        started: Instant::now(),
        is_over: false,
    };
    while !server.is_over {
        let mut polled = vec![PollFd::new(ends.as_fd(), PollFlags::POLLIN)];
        polled.extend(
            server
                .socket
                .iter()
                .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)),
        );
        // Others wait in its queue while a monitor is connected.
        let listener = server.listener.iter().filter(|_| server.start_at.is_some());
        polled.extend(listener.map(|listener| PollFd::new(listener.as_fd(), PollFlags::POLLIN)));
        // The last one.
        let lease = server.lease.as_ref();
        polled.extend(lease.map(|lease| PollFd::new(lease.as_fd(), HANG_UP)));
        match poll(&mut polled, server.timeout()) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        // An event that nix does not know is a hang-up.
        let is_ready_at = |polled: Option<&PollFd<'_>>| polled.is_some_and(|file| file.any().unwrap_or(true));
        let has_hung_up = server.lease.is_some() && is_ready_at(polled.pop().as_ref());
        let is_ready = polled.get(1).is_some_and(|socket| socket.any().unwrap_or(true));
        // Packets first: a successor that has ended may have left some.
        if is_ready && server.socket.is_some() {
            server.serve();
        } else if is_ready {
            server.accept();
        }
        while ends.read_signal()?.is_some() {}
        server.collect();
        if has_hung_up {
            server.end_lease();
        }
        server.dispatch(Event::Time {
            now: server.started.elapsed(),
        });
        server.start_due();
    }
    Ok(())
}

/// The program that is started when the monitor is gone.
struct Successor {
    program: OwnedFd,
    argv: Argv,
}

struct Server {
    /// The monitor that started this keeper, which is no child: until a successor is to be started.
    original: Option<OwnedFd>,
    /// The connected monitor.
    socket: Option<Socket>,
    state: State,
    slot: Vec<OwnedFd>,
    /// Descriptors of the next slot, until it is whole.
    incoming: Vec<OwnedFd>,
    /// The socket that a cell may connect to while no monitor is connected.
    listener: Option<Listener>,
    /// The client's lease, until the client closes it.
    lease: Option<Lease>,
    successor: Option<Successor>,
    /// The latest successor, until it is reaped.
    successor_pid: Option<i32>,
    /// Killed successors that were not gone in time.
    leaving: Vec<i32>,
    /// The time of the successor's start. No monitor is connected until then.
    start_at: Option<Instant>,
    started: Instant,
    is_over: bool,
}

/// The monitor is to be disconnected: it is gone, reads nothing, or has sent something malformed.
struct Disconnect;

impl Server {
    /// Carries out the requests of the monitor.
    fn serve(&mut self) {
        for _ in 0..PACKETS_AT_ONCE {
            let Some(socket) = &self.socket else { return };
            let served = match socket.receive() {
                Ok(Some(packet)) => self.carry_out(packet),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Ok(None) | Err(_) => Err(Disconnect),
            };
            if served.is_err() {
                return self.disconnect();
            }
        }
    }

    /// Takes a cell that has connected as the monitor.
    fn accept(&mut self) {
        if let Some(socket) = self.listener.as_ref().and_then(Listener::accept) {
            self.socket = Some(socket);
            self.start_at = None;
            self.dispatch(Event::Connected);
        }
    }

    fn disconnect(&mut self) {
        self.socket = None;
        self.dispatch(Event::MonitorGone {
            now: self.started.elapsed(),
        });
    }

    fn carry_out(&mut self, packet: Packet) -> Result<(), Disconnect> {
        let (request, message) = Message::read(&packet.bytes).map_err(|_| Disconnect)?;
        if packet.is_short_of_files {
            // The slot is not whole, and never will be. The former one would bring the VM back to a state
            // that it has left.
            if let Message::Put { .. } = message {
                self.put(true, true, Vec::new());
            }
            return self.fail(request, &io::Error::from_raw_os_error(libc::EMFILE));
        }
        let mut files = packet.files;
        match message {
            Message::Spawn {
                flags,
                identity,
                file_bytes,
                words,
            } => {
                let [program, control, log] = <[OwnedFd; 3]>::try_from(files).map_err(|_| Disconnect)?;
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let spawned = self.spawn(&Spawn {
                    program: program.as_fd(),
                    control: control.as_fd(),
                    log: log.as_fd(),
                    words: &words,
                    flags,
                    identity,
                    file_bytes,
                });
                match spawned {
                    Ok((reply, pidfd)) => self.send(request, &reply, &[pidfd.as_fd()]),
                    Err(error) => self.fail(request, &error),
                }
            }
            Message::Put { begin, end } => {
                self.put(begin, end, files);
                self.send(request, &Message::Done, &[])?;
                if end {
                    // The VM runs. From here on the keeper waits.
                    page::program::release();
                }
                Ok(())
            }
            Message::Successor { words } => {
                let program = files.pop().filter(|_| files.is_empty()).ok_or(Disconnect)?;
                let argv = Argv::new(words.iter().map(String::as_str)).map_err(|_| Disconnect)?;
                self.successor = Some(Successor { program, argv });
                self.dispatch(Event::Successor);
                self.send(request, &Message::Done, &[])
            }
            Message::Listen => {
                let socket = files.pop().filter(|_| files.is_empty()).ok_or(Disconnect)?;
                match Listener::new(socket) {
                    Ok(listener) => {
                        self.listener = Some(listener);
                        self.dispatch(Event::Listening);
                        self.send(request, &Message::Done, &[])
                    }
                    Err(error) => self.fail(request, &error),
                }
            }
            Message::Watch { detach } => {
                let socket = files.pop().filter(|_| files.is_empty()).ok_or(Disconnect)?;
                self.lease = Some(Lease::new(socket, detach));
                self.send(request, &Message::Done, &[])
            }
            Message::Ending if files.is_empty() => {
                self.dispatch(Event::Ending {
                    now: self.started.elapsed(),
                });
                Ok(())
            }
            Message::Reap { pid } if files.is_empty() => match self.dispatch(Event::Reap { pid }) {
                Some(errno) => self.fail(request, &io::Error::from_raw_os_error(errno)),
                None => self.send(request, &Message::Done, &[]),
            },
            Message::KillAll if files.is_empty() => {
                self.dispatch(Event::KillAll);
                let running = self.state.running().count() as u32;
                self.send(request, &Message::Left { running }, &[])
            }
            Message::Leave if files.is_empty() => {
                self.original = None;
                self.send(request, &Message::Done, &[])?;
                Err(Disconnect)
            }
            Message::Take if files.is_empty() => {
                self.send_slot(request)?;
                self.dispatch(Event::Taken);
                Ok(())
            }
            // A keeper's own messages, or descriptors that do not belong to the message.
            _ => Err(Disconnect),
        }
    }

    fn spawn(&mut self, process: &Spawn<'_>) -> io::Result<(Message, OwnedFd)> {
        if !self.state.has_room() {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let child = spawn::spawn(process)?;
        let pidfd = pidfd_open(child.pid).inspect_err(|_| spawn::kill_and_reap(child.pid))?;
        self.dispatch(Event::Started { pid: child.pid });
        let reply = Message::Spawned {
            pid: child.pid,
            is_mapped: child.is_mapped,
        };
        Ok((reply, pidfd))
    }

    fn put(&mut self, begin: bool, end: bool, files: Vec<OwnedFd>) {
        if begin {
            self.incoming.clear();
        }
        let count = files.len();
        self.incoming.extend(files);
        if end {
            // Until now the next monitor would have had the former ones.
            self.slot = std::mem::take(&mut self.incoming);
        }
        self.dispatch(Event::Put {
            begin,
            end,
            files: count,
        });
    }

    fn send_slot(&self, request: u64) -> Result<(), Disconnect> {
        let files: Vec<BorrowedFd<'_>> = match self.state.has_slot() {
            true => self.slot.iter().map(AsFd::as_fd).collect(),
            false => Vec::new(),
        };
        let slot = |index: usize| Message::Slot {
            index: index as u32,
            total: files.len() as u32,
        };
        if files.is_empty() {
            return self.send(request, &slot(0), &[]);
        }
        let mut chunks = files.chunks(FILES_MAX).enumerate();
        chunks.try_for_each(|(number, chunk)| self.send(request, &slot(number * FILES_MAX), chunk))
    }

    fn fail(&self, request: u64, error: &io::Error) -> Result<(), Disconnect> {
        let failed = Message::Failed {
            errno: error.raw_os_error().unwrap_or(0),
            what: error.to_string(),
        };
        self.send(request, &failed, &[])
    }

    fn send(&self, request: u64, message: &Message, files: &[BorrowedFd<'_>]) -> Result<(), Disconnect> {
        let socket = self.socket.as_ref().ok_or(Disconnect)?;
        let packet = message.write(request).map_err(|_| Disconnect)?;
        socket.send(&packet, files).map_err(|_| Disconnect)
    }

    /// Finds the children that have ended.
    fn collect(&mut self) {
        self.leaving.retain(|&pid| !reap_if_ended(pid));
        let running: Vec<i32> = self.state.running().collect();
        for pid in running {
            if let Some(status) = exit_status(pid) {
                self.dispatch(Event::Exited { pid, status });
            }
        }
        if self.successor_pid.is_some_and(reap_if_ended) {
            self.successor_pid = None;
            self.disconnect();
        }
    }

    /// Has the state decide, and carries its decisions out. Returns the error number of a refusal.
    fn dispatch(&mut self, event: Event) -> Option<i32> {
        let mut events = VecDeque::from([event]);
        let mut refused = None;
        while let Some(event) = events.pop_front() {
            for effect in self.state.handle(event) {
                let gone = match effect {
                    Effect::Report { pid, status } => {
                        // No monitor is connected if the report before was refused.
                        self.socket.is_some() && self.send(0, &Message::Exited { pid, status }, &[]).is_err()
                    }
                    Effect::StartSuccessor { after } => {
                        self.socket = None;
                        self.end_former();
                        self.start_at = Some(Instant::now() + after);
                        false
                    }
                    Effect::Reap { pid } => {
                        spawn::reap(pid);
                        false
                    }
                    Effect::Kill { pid } => {
                        // SAFETY: sends a signal to a child of ours that is not reaped yet.
                        unsafe { libc::kill(pid, libc::SIGKILL) };
                        false
                    }
                    Effect::Refuse(errno) => {
                        refused = Some(errno);
                        false
                    }
                    Effect::Exit => {
                        self.is_over = true;
                        false
                    }
                };
                if gone {
                    self.socket = None;
                    let now = self.started.elapsed();
                    events.push_back(Event::MonitorGone { now });
                }
            }
        }
        refused
    }

    /// The client has closed its lease.
    fn end_lease(&mut self) {
        if self.lease.take().is_some_and(|lease| !lease.is_detached()) {
            self.dispatch(Event::LeaseEnded {
                now: self.started.elapsed(),
            });
        }
    }

    /// The time until the successor's start or the VM's end, whichever comes first, in whole milliseconds:
    /// never a part of one less.
    fn timeout(&self) -> PollTimeout {
        let end_by = self.state.end_by().map(|end_by| self.started + end_by);
        let Some(at) = self.start_at.into_iter().chain(end_by).min() else {
            return PollTimeout::NONE;
        };
        let left = at.saturating_duration_since(Instant::now());
        PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX)
    }

    /// Starts the successor if it is time.
    fn start_due(&mut self) {
        if self.start_at.is_none_or(|at| Instant::now() < at) {
            return;
        }
        self.start_at = None;
        let event = match self.start_successor() {
            Ok(()) => Event::SuccessorStarted,
            Err(_) => Event::StartFailed {
                now: self.started.elapsed(),
            },
        };
        self.dispatch(event);
    }

    /// Ends the former monitor, which may still run without its connection.
    fn end_former(&mut self) {
        if let Some(original) = self.original.take() {
            kill_and_wait(original.as_fd());
        }
        if let Some(pid) = self.successor_pid.take()
            && !killed_in_time(pid)
        {
            self.leaving.push(pid);
        }
    }

    /// Starts the next monitor.
    fn start_successor(&mut self) -> io::Result<()> {
        let successor = self.successor.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let (ours, theirs) = Socket::pair()?;
        // A low number could be its own standard input, which stays open at an exec.
        let theirs = spawn::high(theirs.as_fd())?;
        let (program, argv) = (successor.program.as_raw_fd(), successor.argv.as_ptr());
        // SAFETY: as fork; the child makes raw system calls on memory that was prepared before, and never
        // returns.
        let pid = unsafe { spawn::raw_clone(0) };
        if pid == 0 {
            // SAFETY: in the child, with everything prepared alive in its copy of the memory.
            unsafe {
                if libc::syscall(libc::SYS_dup3, theirs.as_raw_fd(), 0, 0) < 0 {
                    libc::_exit(NOT_EXECUTED);
                }
                spawn::close_on_exec_from(3);
                reset_signals();
                libc::syscall(
                    libc::SYS_execveat,
                    program,
                    c"".as_ptr(),
                    argv,
                    environ,
                    libc::AT_EMPTY_PATH,
                );
                libc::_exit(NOT_EXECUTED)
            }
        }
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        self.successor_pid = Some(pid as i32);
        self.socket = Some(ours);
        Ok(())
    }
}

/// Resets all signals to their default effects, and unblocks them.
///
/// # Safety
/// Only in a process just cloned.
unsafe fn reset_signals() {
    // The kernel's structure: handler, flags, restorer, mask.
    let default = [0_u64; 4];
    for signal in 1..=SIGNALS_MAX {
        // SAFETY: reads one structure of ours. The kernel refuses the two signals that have no other effect.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null_mut::<u64>(),
                size_of::<u64>(),
            )
        };
    }
    // SAFETY: as this function's own.
    unsafe { spawn::unblock_signals() };
}

/// A descriptor of a process.
fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor; no memory is involved.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if pidfd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, ours alone.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd as c_int) })
}

/// A descriptor of this process's parent, if the parent is the monitor that made the socket.
fn open_parent(socket: &Socket) -> Option<OwnedFd> {
    let monitor = socket.maker().ok()?;
    let pidfd = pidfd_open(monitor).ok()?;
    // A process whose parent has ended gets another, arbitrary parent. Checked after the open, since the
    // number of a parent belongs to no other process as long as it is the parent.
    (nix::unistd::getppid().as_raw() == monitor).then_some(pidfd)
}

/// Kills a process that is no child, and waits until it has ended, for [`KILL_TIMEOUT`] at most.
fn kill_and_wait(pidfd: BorrowedFd<'_>) {
    let info = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: sends a signal to the process that the descriptor names, without a structure.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::SIGKILL,
            info,
            0,
        )
    };
    let deadline = Instant::now() + KILL_TIMEOUT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(pidfd, PollFlags::POLLIN)], timeout) {
            Err(nix::Error::EINTR) => {}
            _ => return,
        }
    }
}

/// The status of a child that has ended, as `waitpid` would return it. The child is not reaped.
fn exit_status(pid: i32) -> Option<i32> {
    // SAFETY: a structure of integers and pointers, for which zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: reads the state of our own child; info is a valid place.
    if unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &raw mut info, flags) } != 0 {
        return None;
    }
    // SAFETY: waitid fills these fields, or leaves them zero where the child runs.
    let (ended, status) = unsafe { (info.si_pid(), info.si_status()) };
    if ended == 0 {
        return None;
    }
    match info.si_code {
        libc::CLD_EXITED => Some((status & 0xff) << 8),
        libc::CLD_DUMPED => Some(status | 0x80),
        _ => Some(status),
    }
}

/// Reaps a child if it has ended. Returns whether it is gone.
fn reap_if_ended(pid: i32) -> bool {
    // SAFETY: waits for our own child, without a place for its status.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) != 0 }
}

/// Kills a child that is not reaped. Returns whether it is gone in time.
fn killed_in_time(pid: i32) -> bool {
    // SAFETY: sends a signal to a child of ours that is not reaped yet.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    let deadline = Instant::now() + KILL_TIMEOUT;
    while !reap_if_ended(pid) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(KILL_POLL_INTERVAL);
    }
    true
}
