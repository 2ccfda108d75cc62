//! Runs a program in the guest: one poll loop over standard input and the connection.
//!
//! Standard input is read only after its last bytes were sent. So at most one read is lost when the program
//! ends, and an idle standard input keeps nothing alive.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::terminal::{RawMode, window_size};
use super::{ClientError, Stream, broken, checked, gone, open};
use crate::protocol::{Attached, ExecRequest, ExitStatus, Frame, Kind, Request, WindowSize, frame};
use crate::wire::{Received, Wire};

/// Interval of the checks of the terminal's size. A check costs less than owning the process's SIGWINCH
/// handler.
const WINDOW_POLL: Duration = Duration::from_millis(250);

/// Greatest size of each stream that `output` collects, bytes.
const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// Destination of a program's output and source of its input.
trait Terminal {
    /// Returns the descriptor to poll for input; `None` at the end of the input, or if it never blocks.
    fn input_fd(&self) -> Option<BorrowedFd<'_>>;
    /// Reads some input; 0 is its end.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Returns whether there may be further input.
    fn has_input(&self) -> bool;
    /// Returns the size of the terminal if it changed.
    fn resized(&mut self) -> Option<WindowSize>;
    /// Writes output; returns false if its reader is gone.
    fn write(&mut self, kind: Kind, bytes: &[u8]) -> Result<bool, ClientError>;
    /// Returns the time until the next call of `resized`.
    fn poll_timeout(&self) -> PollTimeout;
    /// Returns whether to continue to wait for the program's end.
    fn goes_on(&self) -> bool {
        true
    }
}

/// Runs a program with this process's standard input, output and error (raw mode and window changes with a
/// tty).
pub fn exec(stream: impl Stream, request: &ExecRequest) -> Result<ExitStatus, ClientError> {
    let mut wire = Wire::new(&stream)?;
    open(&mut wire, &Request::Exec(request.clone()))?;
    with_own_terminal(&mut wire, request.tty)
}

/// Works as [`exec`], but the agent keeps the program for a minute if the connection ends before it: then
/// [`attach`] goes on with `id`.
pub fn exec_kept(stream: impl Stream, id: &str, request: &ExecRequest) -> Result<ExitStatus, ClientError> {
    let mut wire = Wire::new(&stream)?;
    let kept = Request::ExecKept {
        id: id.to_owned(),
        program: request.clone(),
    };
    open(&mut wire, &kept)?;
    with_own_terminal(&mut wire, request.tty)
}

/// Goes on with a kept program, in place of the client that it has or had. `greeted` receives its state.
pub fn attach(
    stream: impl Stream,
    id: &str,
    greeted: impl FnOnce(Attached),
) -> Result<ExitStatus, ClientError> {
    let mut wire = Wire::new(&stream)?;
    let ready = open(&mut wire, &Request::Attach { id: id.to_owned() })?;
    let attached = ready.attached.ok_or_else(|| {
        ClientError::Protocol("it attached to a program, and does not describe it".to_owned())
    })?;
    greeted(attached);
    // The program's terminal has the size of the former client's, which differs from this one.
    let unlike = WindowSize { rows: 0, cols: 0 };
    with_own_terminal(&mut wire, attached.has_terminal.then_some(unlike))
}

/// Serves a program with the standard streams of this process, in raw mode if it has a terminal, whose size
/// the agent knows to be `size`.
fn with_own_terminal(wire: &mut Wire, size: Option<WindowSize>) -> Result<ExitStatus, ClientError> {
    let raw = match size {
        Some(_) => RawMode::enter().map_err(|source| ClientError::Local {
            what: "raw terminal mode",
            source,
        })?,
        None => None,
    };
    let mut own = OwnTerminal {
        stdin: io::stdin(),
        open: true,
        size,
    };
    let status = converse(wire, &mut own);
    drop(raw);
    status
}

/// Runs a program and returns its status, standard output and standard error. Fails if either has more than
/// 64 MiB.
pub fn output(
    stream: impl Stream,
    request: &ExecRequest,
    input: &[u8],
) -> Result<(ExitStatus, Vec<u8>, Vec<u8>), ClientError> {
    let mut wire = Wire::new(&stream)?;
    open(&mut wire, &Request::Exec(request.clone()))?;
    let mut memory = Memory::new(input, None);
    let status = converse(&mut wire, &mut memory)?;
    Ok((status, memory.output.stdout, memory.output.stderr))
}

/// Limits of a program whose output is collected.
pub struct Bounds<'a> {
    /// Bytes of standard output and of standard error that are kept, each.
    pub output_bytes: usize,
    /// Time at which the program is ended at the latest.
    pub deadline: Instant,
    /// Returns whether the caller still waits; called every 250 ms.
    pub goes_on: &'a dyn Fn() -> bool,
}

/// The output of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collected {
    /// Status of the program; none if it was ended at its deadline, or because its caller stopped waiting.
    pub status: Option<ExitStatus>,
    /// The first bytes of its standard output.
    pub stdout: Vec<u8>,
    /// The first bytes of its standard error.
    pub stderr: Vec<u8>,
    /// Whether it wrote more bytes to either.
    pub is_truncated: bool,
}

/// Runs a program and returns the first bytes of its output. The agent ends a program that runs beyond the
/// deadline.
pub fn collect(
    stream: impl Stream,
    request: &ExecRequest,
    input: &[u8],
    bounds: &Bounds<'_>,
) -> Result<Collected, ClientError> {
    let mut wire = Wire::new(&stream)?;
    open(&mut wire, &Request::Exec(request.clone()))?;
    let mut memory = Memory::new(input, Some(bounds));
    let ended = converse(&mut wire, &mut memory);
    let is_over = !memory.goes_on();
    let mut output = memory.output;
    match ended {
        Ok(status) => output.status = Some(status),
        Err(_) if is_over => {}
        Err(error) => return Err(error),
    }
    Ok(output)
}

/// Streams in memory. With bounds, the first bytes of the output are kept; without, more than
/// [`OUTPUT_BYTES_MAX`] is an error.
struct Memory<'a> {
    input: Option<&'a [u8]>,
    bounds: Option<&'a Bounds<'a>>,
    output: Collected,
}

impl<'a> Memory<'a> {
    fn new(input: &'a [u8], bounds: Option<&'a Bounds<'a>>) -> Self {
        let output = Collected {
            status: None,
            stdout: Vec::new(),
            stderr: Vec::new(),
            is_truncated: false,
        };
        Self {
            input: Some(input),
            bounds,
            output,
        }
    }
}

impl Terminal for Memory<'_> {
    fn input_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(bytes) = &mut self.input else {
            return Ok(0);
        };
        let length = bytes.read(buffer)?;
        if length == 0 {
            self.input = None;
        }
        Ok(length)
    }

    fn has_input(&self) -> bool {
        self.input.is_some()
    }

    fn resized(&mut self) -> Option<WindowSize> {
        None
    }

    fn write(&mut self, kind: Kind, bytes: &[u8]) -> Result<bool, ClientError> {
        let kept = match kind {
            Kind::Stderr => &mut self.output.stderr,
            _ => &mut self.output.stdout,
        };
        let most = self.bounds.map_or(OUTPUT_BYTES_MAX, |bounds| bounds.output_bytes);
        let room = most.saturating_sub(kept.len());
        if bytes.len() > room && self.bounds.is_none() {
            return Err(ClientError::Protocol("more than 64 MiB of output".into()));
        }
        kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.output.is_truncated |= bytes.len() > room;
        Ok(true)
    }

    fn poll_timeout(&self) -> PollTimeout {
        let Some(bounds) = self.bounds else {
            return PollTimeout::NONE;
        };
        let left = bounds.deadline.saturating_duration_since(Instant::now());
        // At least a millisecond, so that the loop does not spin at the end.
        let left = left.clamp(Duration::from_millis(1), WINDOW_POLL);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO)
    }

    fn goes_on(&self) -> bool {
        self.bounds
            .is_none_or(|bounds| Instant::now() < bounds.deadline && (bounds.goes_on)())
    }
}

/// Moves bytes in both directions until the program's exit status arrives.
fn converse(wire: &mut Wire, terminal: &mut impl Terminal) -> Result<ExitStatus, ClientError> {
    let mut outgoing: Vec<u8> = Vec::new();
    let mut buffer = vec![0; 16 << 10];
    let mut input_open = true;
    loop {
        while let Some(frame) = wire.next_frame().map_err(broken)? {
            if let Some(status) = deliver(frame, terminal)? {
                return Ok(status);
            }
        }
        if !terminal.goes_on() {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        if outgoing.is_empty()
            && let Some(size) = terminal.resized()
        {
            frame::encode_json(Kind::WindowSize, &size, &mut outgoing);
        }
        let read_input = outgoing.is_empty() && input_open && terminal.has_input();
        let immediate = read_input && terminal.input_fd().is_none();
        let (received, sendable, input) = {
            let mut events = PollFlags::POLLIN;
            events.set(PollFlags::POLLOUT, !outgoing.is_empty());
            let mut fds = vec![PollFd::new(wire.as_fd(), events)];
            if read_input {
                fds.extend(terminal.input_fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
            }
            let timeout = if immediate {
                PollTimeout::ZERO
            } else {
                terminal.poll_timeout()
            };
            match poll(&mut fds, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            let flags = |index: usize| {
                fds.get(index)
                    .and_then(PollFd::revents)
                    .unwrap_or(PollFlags::empty())
            };
            let readable = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
            (
                flags(0).intersects(readable),
                flags(0).contains(PollFlags::POLLOUT),
                immediate || flags(1).intersects(readable),
            )
        };
        if received {
            match wire.receive() {
                Ok(Received::Closed) => return Err(gone()),
                Ok(_) => {}
                Err(error) => return Err(broken(error)),
            }
        }
        if sendable {
            match wire.send_some(&outgoing) {
                Ok(sent) => drop(outgoing.drain(..sent)),
                // The exit status may be among the unread frames; the read detects its absence.
                Err(_) => {
                    outgoing.clear();
                    input_open = false;
                }
            }
        }
        // Received frames are processed first: a program that has ended takes no input.
        if input && !received {
            let length = match terminal.read(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A terminal that was hung up has no further input.
                Err(_) => 0,
            };
            if length == 0 {
                input_open = false;
                frame::encode(Kind::StdinEnd, &[], &mut outgoing);
            } else {
                frame::encode(Kind::Stdin, &buffer[..length], &mut outgoing);
            }
        }
    }
}

/// Processes one frame; returns the status if it is the last frame.
fn deliver(frame: Frame, terminal: &mut impl Terminal) -> Result<Option<ExitStatus>, ClientError> {
    let frame = checked(frame)?;
    match frame.kind {
        Kind::Stdout | Kind::Stderr => {
            if !terminal.write(frame.kind, &frame.payload)? {
                // A local program without a reader would end so. The end of the connection ends the program
                // in the guest.
                return Ok(Some(ExitStatus::Signal(libc::SIGPIPE as u8)));
            }
            Ok(None)
        }
        Kind::Exit => frame
            .json()
            .map(Some)
            .map_err(|error| ClientError::Protocol(error.to_string())),
        kind => Err(ClientError::Protocol(format!("unexpected {kind:?} frame"))),
    }
}

/// The standard streams of this process.
struct OwnTerminal {
    stdin: io::Stdin,
    open: bool,
    /// The program's terminal size, if it has a terminal.
    size: Option<WindowSize>,
}

impl Terminal for OwnTerminal {
    fn input_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stdin.as_fd())
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Not through `Stdin`, whose buffer would read more than is sent.
        let length = nix::unistd::read(&self.stdin, buffer)?;
        self.open = length > 0;
        Ok(length)
    }

    fn has_input(&self) -> bool {
        self.open
    }

    fn resized(&mut self) -> Option<WindowSize> {
        let known = self.size?;
        let now = window_size(self.stdin.as_fd()).filter(|&now| now != known)?;
        self.size = Some(now);
        Some(now)
    }

    fn write(&mut self, kind: Kind, bytes: &[u8]) -> Result<bool, ClientError> {
        let written = match kind {
            Kind::Stderr => io::stderr().write_all(bytes),
            _ => io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()),
        };
        match written {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(source) => Err(ClientError::Local {
                what: "can't write the program's output",
                source,
            }),
        }
    }

    fn poll_timeout(&self) -> PollTimeout {
        match self.size {
            Some(_) => PollTimeout::try_from(WINDOW_POLL).unwrap_or(PollTimeout::NONE),
            None => PollTimeout::NONE,
        }
    }
}
