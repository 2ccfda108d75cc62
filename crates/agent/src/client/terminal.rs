//! Raw mode of this process's terminal, as long as a value lives.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

use crate::protocol::WindowSize;

/// Signals that end a process which does not handle them, and that users and service managers send.
const ENDING: [Signal; 3] = [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT];

/// Mode to restore before a signal ends this process; null outside of raw mode. The mode is never freed, as a
/// handler may read it at any time.
static BEFORE: AtomicPtr<libc::termios> = AtomicPtr::new(ptr::null_mut());

/// Raw mode; dropping it restores the terminal's former mode, and so does a signal that ends the process.
pub struct RawMode {
    before: Termios,
    /// Signals for which this value has set the handler.
    handled: Vec<Signal>,
}

impl RawMode {
    /// Enters raw mode; returns `None` if standard input is no terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        let Ok(before) = tcgetattr(&stdin) else {
            return Ok(None);
        };
        let mode = Box::into_raw(Box::new(libc::termios::from(before.clone())));
        BEFORE.store(mode, Ordering::Release);
        let mut mode = Self {
            before,
            handled: Vec::new(),
        };
        for signal in ENDING {
            if restores_before(signal)? {
                mode.handled.push(signal);
            }
        }
        let mut raw = mode.before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(&stdin, SetArg::TCSADRAIN, &raw)?;
        Ok(Some(mode))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.before);
        BEFORE.store(ptr::null_mut(), Ordering::Release);
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        for signal in &self.handled {
            // SAFETY: the default action runs no code of this process.
            let _ = unsafe { sigaction(*signal, &default) };
        }
    }
}

/// Has a signal restore the terminal before it ends this process. Returns whether it does: a signal that is
/// ignored, or has a handler, keeps what it has.
fn restores_before(signal: Signal) -> io::Result<bool> {
    let handler = SigHandler::Handler(restore_and_end);
    // Without the flag a signal that comes during the handler would run it again.
    // A background process that sets the terminal's mode is stopped by SIGTTOU, unless that is blocked.
    let blocked = SigSet::from(Signal::SIGTTOU);
    let action = SigAction::new(handler, SaFlags::SA_RESETHAND, blocked);
    // SAFETY: the handler makes system calls only, and reads memory that is never freed.
    let former = unsafe { sigaction(signal, &action) }?;
    if matches!(former.handler(), SigHandler::SigDfl) {
        return Ok(true);
    }
    // SAFETY: the action that this process had before.
    unsafe { sigaction(signal, &former) }?;
    Ok(false)
}

extern "C" fn restore_and_end(signal: libc::c_int) {
    let before = BEFORE.load(Ordering::Acquire);
    if !before.is_null() {
        // SAFETY: tcsetattr is async-signal-safe (POSIX.1-2017, 2.4.3), and the mode is never freed.
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, before) };
    }
    // SAFETY: raise is async-signal-safe. The default action, set by SA_RESETHAND, ends the process as this
    // handler returns.
    unsafe { libc::raise(signal) };
}

/// Returns the size of the terminal `fd`; none if it is no terminal.
pub fn window_size(fd: BorrowedFd) -> Option<WindowSize> {
    let mut size = libc::winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCGWINSZ writes one winsize, which outlives the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
    (result == 0 && size.ws_row > 0 && size.ws_col > 0).then_some(WindowSize {
        rows: size.ws_row,
        cols: size.ws_col,
    })
}
