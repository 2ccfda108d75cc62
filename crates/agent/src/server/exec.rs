//! Runs a program for a client: pipes or a terminal, until the program ends or the client is gone.
//!
//! One thread runs one poll loop. Output is read only after its last bytes were sent, and input after its
//! last bytes were written, so that a slow side stops the other and nothing accumulates. When the program has
//! ended, its output is sent first and its status last. Programs that it left in the background may hold its
//! output open, and are not waited for.
//!
//! A kept program goes on without a client for a while ([`KEEP_LIMIT`]). Its output is read meanwhile, so
//! that it does not block, and the last of it is kept for the next client.

mod output;
mod start;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::output::Output;
use self::start::winsize;
use super::kept::{Backlog, Chunk, Entry, KEEP_LIMIT, REPLACED};
use super::{linger, ready, refuse};
use crate::protocol::{Attached, ExecRequest, ExitStatus, Frame, Kind, Ready, frame};
use crate::wire::{Received, Wire};

/// Time limit for a program whose client is gone to end after SIGHUP.
const HANG_UP_GRACE: Duration = Duration::from_secs(2);

/// Time for output after the program's end, from programs that it left behind or through the terminal.
const DRAIN_GRACE: Duration = Duration::from_millis(100);

/// Serves an exec request up to its exit frame.
pub(super) fn serve(wire: &mut Wire, request: &ExecRequest) -> io::Result<()> {
    let session = match Session::start(request) {
        Ok(session) => session,
        Err(reason) => return refuse(wire, &reason.to_string()),
    };
    session.run(wire)
}

/// Serves a program that outlives the connection for a while.
pub(super) fn serve_kept(wire: Wire, id: &str, request: &ExecRequest) -> io::Result<()> {
    serve_kept_for(KEEP_LIMIT, wire, id, request)
}

/// Works as [`serve_kept`], with another time for which the program has no client.
pub(super) fn serve_kept_for(
    limit: Duration,
    mut wire: Wire,
    id: &str,
    request: &ExecRequest,
) -> io::Result<()> {
    let entry = match Entry::begin(id) {
        Ok(entry) => entry,
        Err(reason) => return refuse(&mut wire, &reason.to_string()),
    };
    match Session::start(request) {
        Ok(session) => session.run_kept(limit, wire, &entry),
        Err(reason) => refuse(&mut wire, &reason.to_string()),
    }
}

/// Reason why a program's client is served no further.
enum Served {
    /// The program has ended, and its output is sent.
    Ended(ExitStatus),
    /// The client is gone.
    Gone,
    /// Another client has attached.
    Replaced,
}

struct Session {
    child: Child,
    /// Readable once the child has ended; absent on kernels without pidfds.
    ended: Option<OwnedFd>,
    stdin: Option<File>,
    /// Bytes of the client that the program has not read yet.
    input: Vec<u8>,
    /// Whether standard input is closed once `input` is written.
    input_ends: bool,
    stdout: Output,
    stderr: Output,
    tty: bool,
    /// Whether the child was reaped, so that its number may be reused.
    reaped: bool,
    /// Status of the program once it has ended, and the time of that.
    status: Option<(ExitStatus, Instant)>,
    /// The part of the current frame that is not sent.
    outgoing: Vec<u8>,
    /// Content of the current frame.
    current: Option<Chunk>,
    /// Output before that of the program's pipes.
    backlog: Backlog,
}

impl Session {
    fn new(
        child: Child,
        stdin: Option<File>,
        stdout: Option<File>,
        stderr: Option<File>,
        tty: bool,
    ) -> io::Result<Self> {
        for file in [&stdin, &stdout, &stderr].into_iter().flatten() {
            let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
            fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        Ok(Self {
            ended: pidfd(&child),
            child,
            stdin,
            input: Vec::new(),
            input_ends: false,
            stdout: Output {
                kind: Kind::Stdout,
                file: stdout,
                owed: 0,
            },
            stderr: Output {
                kind: Kind::Stderr,
                file: stderr,
                owed: 0,
            },
            tty,
            reaped: false,
            status: None,
            outgoing: Vec::new(),
            current: None,
            backlog: Backlog::default(),
        })
    }

    fn run(mut self, wire: &mut Wire) -> io::Result<()> {
        let result = ready(wire).and_then(|()| self.pump(wire, None));
        if result.is_err() {
            self.hang_up();
        }
        match result? {
            Served::Ended(status) => wire.send_json(Kind::Exit, &status),
            Served::Gone | Served::Replaced => {
                self.hang_up();
                Ok(())
            }
        }
    }

    /// Serves one client after another, until the program has ended, or has had no client for `limit`.
    fn run_kept(mut self, limit: Duration, wire: Wire, entry: &Entry) -> io::Result<()> {
        let mut begun = ready(&wire);
        let mut client = Some(wire);
        while let Some(mut wire) = client.take() {
            // A client that breaks the protocol is as good as gone.
            match begun.and_then(|()| self.pump(&mut wire, Some(entry))) {
                Ok(Served::Ended(status)) => {
                    if wire.send_json(Kind::Exit, &status).is_ok() {
                        linger(&mut wire);
                        return Ok(());
                    }
                }
                Ok(Served::Replaced) => self.dismiss(&wire),
                Ok(Served::Gone) | Err(_) => {}
            }
            drop(wire);
            self.take_back_frame();
            client = self.wait_for_client(limit, entry).unwrap_or_default();
            begun = client.as_ref().map_or(Ok(()), |wire| self.greet(wire));
        }
        self.hang_up();
        Ok(())
    }

    /// Accepts a client that has attached.
    fn greet(&mut self, wire: &Wire) -> io::Result<()> {
        let attached = Attached {
            dropped_bytes: self.backlog.take_dropped(),
            has_terminal: self.tty,
        };
        let ready = Ready {
            version: crate::VERSION.into(),
            size: None,
            mode: None,
            attached: Some(attached),
            is_up: None,
        };
        wire.send_json(Kind::Ready, &ready)
    }

    /// Reports to a client that another one has taken its place, if it has room for that.
    fn dismiss(&self, wire: &Wire) {
        if self.outgoing.is_empty() {
            let mut bytes = Vec::new();
            frame::encode(Kind::Refused, REPLACED.as_bytes(), &mut bytes);
            // The other client does not wait for this one.
            let _ = wire.send_some(&bytes);
        }
    }

    /// Keeps the content of a frame that was not sent whole, of which a client has received nothing.
    fn take_back_frame(&mut self) {
        if !self.outgoing.is_empty() {
            self.outgoing.clear();
            self.current
                .take()
                .into_iter()
                .for_each(|chunk| self.backlog.put_back(chunk));
        }
    }

    /// Reads the program's output until another client attaches. Returns none after `limit`.
    fn wait_for_client(&mut self, limit: Duration, entry: &Entry) -> io::Result<Option<Wire>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(next) = entry.take_next() {
                return Ok(Some(next));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let ready = self.wait(None, Some(entry), Some(left))?;
            if ready.stdin {
                self.write_input();
            }
            self.note_end()?;
            for (is_ready, output) in [(ready.stdout, &mut self.stdout), (ready.stderr, &mut self.stderr)] {
                let chunk = if is_ready { output.read() } else { None };
                chunk.into_iter().for_each(|chunk| self.backlog.push(chunk));
            }
        }
    }

    /// Records that the program has ended, if it has.
    fn note_end(&mut self) -> io::Result<()> {
        if self.status.is_none()
            && let Some(ended) = self.child.try_wait()?
        {
            let ended = match (ended.code(), ended.signal()) {
                (Some(code), _) => ExitStatus::Code(code as u8),
                (None, signal) => ExitStatus::Signal(signal.unwrap_or(0) as u8),
            };
            self.status = Some((ended, Instant::now()));
            self.reaped = true;
            self.stdout.settle();
            self.stderr.settle();
            self.stdin = None;
            self.input.clear();
        }
        Ok(())
    }

    /// Moves bytes until the program has ended and its output is sent, the client is gone, or another one has
    /// attached.
    fn pump(&mut self, wire: &mut Wire, entry: Option<&Entry>) -> io::Result<Served> {
        loop {
            while self.input.is_empty() && !self.input_ends {
                let Some(frame) = wire.next_frame()? else { break };
                self.take(frame)?;
            }
            if self.outgoing.is_empty()
                && let Some(chunk) = self.backlog.take()
            {
                self.begin_frame(chunk);
            }
            if let Some((status, since)) = self.status {
                let owed = self.stdout.owed > 0 || self.stderr.owed > 0;
                let open = self.stdout.file.is_some() || self.stderr.file.is_some();
                if self.outgoing.is_empty() && !owed && (!open || since.elapsed() >= DRAIN_GRACE) {
                    return Ok(Served::Ended(status));
                }
            }
            let ready = self.wait(Some(wire), entry, None)?;
            if ready.client_gone {
                return Ok(Served::Gone);
            }
            if ready.replaced {
                return Ok(Served::Replaced);
            }
            if ready.wire_in && wire.receive()? == Received::Closed {
                return Ok(Served::Gone);
            }
            if ready.wire_out {
                let sent = wire.send_some(&self.outgoing)?;
                self.outgoing.drain(..sent);
            }
            if ready.stdin {
                self.write_input();
            }
            self.note_end()?;
            if ready.stdout
                && self.outgoing.is_empty()
                && let Some(chunk) = self.stdout.read()
            {
                self.begin_frame(chunk);
            }
            if ready.stderr
                && self.outgoing.is_empty()
                && let Some(chunk) = self.stderr.read()
            {
                self.begin_frame(chunk);
            }
        }
    }

    fn begin_frame(&mut self, chunk: Chunk) {
        frame::encode(chunk.0, &chunk.1, &mut self.outgoing);
        self.current = Some(chunk);
    }

    fn take(&mut self, frame: Frame) -> io::Result<()> {
        match frame.kind {
            Kind::Stdin => self.input = frame.payload,
            // A terminal's input has no end; its end-of-file character has the same meaning for a program
            // that reads lines.
            Kind::StdinEnd if self.tty => self.input = vec![0x04],
            Kind::StdinEnd => self.stdin = None,
            Kind::WindowSize => {
                if let (Ok(size), Some(terminal)) = (frame.json(), &self.stdout.file) {
                    let size = winsize(size);
                    // SAFETY: the descriptor is open and `size` outlives the call. A pipe refuses it,
                    // harmlessly.
                    unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) };
                }
            }
            Kind::Signal => {
                let signal = frame
                    .payload
                    .first()
                    .and_then(|&number| Signal::try_from(i32::from(number)).ok());
                if let Some(signal) = signal {
                    self.signal_group(signal);
                }
            }
            kind => {
                let error = crate::protocol::FrameError::Payload { kind };
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
        if self.stdin.is_none() {
            self.input.clear();
        }
        Ok(())
    }

    /// Waits until a side is ready, for `limit` at most. Without a client the program's output is read, too.
    fn wait(
        &mut self,
        wire: Option<&Wire>,
        entry: Option<&Entry>,
        limit: Option<Duration>,
    ) -> io::Result<Readiness> {
        let mut fds = Vec::with_capacity(6);
        let mut events = PollFlags::from_bits_retain(libc::POLLRDHUP);
        events.set(PollFlags::POLLIN, self.input.is_empty());
        events.set(PollFlags::POLLOUT, !self.outgoing.is_empty());
        fds.extend(wire.map(|wire| PollFd::new(wire.as_fd(), events)));
        let reads = self.outgoing.is_empty();
        let stdin = self.stdin.as_ref().filter(|_| !self.input.is_empty());
        fds.extend(stdin.map(|file| PollFd::new(file.as_fd(), PollFlags::POLLOUT)));
        let stdout = self.stdout.file.as_ref().filter(|_| reads);
        fds.extend(stdout.map(|file| PollFd::new(file.as_fd(), PollFlags::POLLIN)));
        let stderr = self.stderr.file.as_ref().filter(|_| reads);
        fds.extend(stderr.map(|file| PollFd::new(file.as_fd(), PollFlags::POLLIN)));
        fds.extend(entry.map(|entry| PollFd::new(entry.as_fd(), PollFlags::POLLIN)));
        let watch = self.ended.as_ref().filter(|_| self.status.is_none());
        fds.extend(watch.map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
        let mut timeout = match (self.status.is_some(), watch.is_some()) {
            (false, true) => PollTimeout::NONE,
            // An ended program whose status waits for a client.
            (true, _) if wire.is_none() => PollTimeout::NONE,
            _ => PollTimeout::from(20u8),
        };
        if let (Some(limit), PollTimeout::NONE) = (limit, timeout) {
            // Rounded up, so that the last millisecond is waited for instead of spinning.
            let limit = limit + Duration::from_millis(1);
            timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        }
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut fds = fds.iter();
        // nix has no POLLRDHUP: flags that include it are returned as `None`.
        let client = wire.and_then(|_| fds.next()).map(PollFd::revents);
        let gone = |flags: Option<PollFlags>| {
            flags.is_none_or(|flags| flags.intersects(PollFlags::POLLHUP | PollFlags::POLLERR))
        };
        let client_gone = client.is_some_and(gone);
        let client = client.flatten().unwrap_or(PollFlags::empty());
        let mut next = fds.map(|fd| fd.any().unwrap_or(true));
        let mut is_ready = |is_polled: bool| is_polled && next.next().unwrap_or(false);
        Ok(Readiness {
            client_gone,
            wire_in: client.contains(PollFlags::POLLIN),
            wire_out: client.contains(PollFlags::POLLOUT),
            stdin: is_ready(stdin.is_some()),
            stdout: is_ready(stdout.is_some()),
            stderr: is_ready(stderr.is_some()),
            replaced: is_ready(entry.is_some()),
        })
    }

    fn write_input(&mut self) {
        let Some(stdin) = &mut self.stdin else { return };
        match stdin.write(&self.input) {
            Ok(written) => drop(self.input.drain(..written)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => {
                // The program closed its input: the rest is discarded, as by a broken pipe.
                self.stdin = None;
                self.input.clear();
            }
        }
    }

    fn signal_group(&self, signal: Signal) {
        if self.reaped {
            // The number may belong to another group by now.
            return;
        }
        // A group that has ended needs no signal.
        let _ = kill(Pid::from_raw(-(self.child.id() as i32)), signal);
    }

    /// Ends the program and its descendants, because its client is gone.
    fn hang_up(&mut self) {
        if self.reaped {
            return;
        }
        self.signal_group(Signal::SIGHUP);
        self.signal_group(Signal::SIGCONT);
        // Its output has no destination.
        self.stdin = None;
        self.stdout.file = None;
        self.stderr.file = None;
        let deadline = Instant::now() + HANG_UP_GRACE;
        while Instant::now() < deadline {
            let ended = nix::sys::wait::waitid(
                nix::sys::wait::Id::Pid(Pid::from_raw(self.child.id() as i32)),
                nix::sys::wait::WaitPidFlag::WEXITED
                    | nix::sys::wait::WaitPidFlag::WNOHANG
                    | nix::sys::wait::WaitPidFlag::WNOWAIT,
            );
            if !matches!(ended, Ok(nix::sys::wait::WaitStatus::StillAlive)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // The leader is not reaped yet, so the group is still the same.
        self.signal_group(Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

struct Readiness {
    client_gone: bool,
    wire_in: bool,
    wire_out: bool,
    stdin: bool,
    stdout: bool,
    stderr: bool,
    replaced: bool,
}

fn pidfd(child: &Child) -> Option<OwnedFd> {
    // SAFETY: takes two integers and returns a descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    // SAFETY: a non-negative result is a new descriptor that nothing else owns.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
