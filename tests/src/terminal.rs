//! A program on a terminal of its own, as a person would have it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::command::tail;
use crate::wait;

/// Time limit for the last output of a program that has ended to pass through its terminal.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(2);

/// A program whose stdin, stdout and stderr are a terminal. Killed when dropped.
pub struct Terminal {
    child: Child,
    ours: File,
    seen: Arc<Mutex<String>>,
    /// Reads the program's output, until no process can write any more.
    reader: JoinHandle<()>,
    read: usize,
    line: String,
}

impl Terminal {
    /// Starts `mirrorball` with these arguments.
    #[track_caller]
    pub fn mirrorball(arguments: &[&str]) -> Self {
        Self::mirrorball_with(arguments, &[])
    }

    /// The same with these variables in its environment.
    #[track_caller]
    pub fn mirrorball_with(arguments: &[&str], variables: &[(&str, &OsStr)]) -> Self {
        let line = format!("mirrorball {}", arguments.join(" "));
        let pty = nix::pty::openpty(None, None).expect("a terminal");
        let theirs: OwnedFd = pty.slave;
        let mut command = Command::new(crate::command::binary());
        command
            .args(arguments)
            .env("TERM", "xterm")
            .envs(variables.iter().copied());
        command.stdin(theirs.try_clone().expect("a descriptor"));
        command.stdout(theirs.try_clone().expect("a descriptor"));
        command.stderr(theirs);
        // SAFETY: setsid and ioctl are async-signal-safe and use no memory of ours.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                nix::errno::Errno::result(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
                Ok(())
            });
        }
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("can't start {line}: {error}"));
        drop(command);
        let ours = File::from(pty.master);
        let seen = Arc::new(Mutex::new(String::new()));
        let (mut reader, all) = (ours.try_clone().expect("a descriptor"), Arc::clone(&seen));
        let reader = std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut chunk) {
                all.lock()
                    .expect("no panic inside")
                    .push_str(&String::from_utf8_lossy(&chunk[..count]));
            }
        });
        Self {
            child,
            ours,
            seen,
            reader,
            read: 0,
            line,
        }
    }

    /// Types `bytes` into the terminal. A failure ends the test.
    #[track_caller]
    pub fn send(&mut self, bytes: &[u8]) {
        self.ours
            .write_all(bytes)
            .unwrap_or_else(|error| panic!("typing to {}: {error}", self.line));
    }

    /// Waits until `text` appears after the text that was expected before.
    #[track_caller]
    pub fn expect(&mut self, text: &str, limit: Duration) {
        let found = wait::within(limit, || {
            let seen = self.seen.lock().expect("no panic inside");
            seen.get(self.read..)?.find(text)
        });
        match found {
            Some(at) => self.read += at + text.len(),
            None => panic!(
                "no {text:?} within {limit:?} on the terminal of {}:\n{}",
                self.line,
                self.shown()
            ),
        }
    }

    /// Everything shown so far.
    pub fn seen(&self) -> String {
        self.seen.lock().expect("no panic inside").clone()
    }

    fn shown(&self) -> String {
        tail(&self.seen(), 60)
    }

    /// Whether the terminal passes every key on at once, as a console needs.
    pub fn is_raw(&self) -> bool {
        let mode = nix::sys::termios::tcgetattr(&self.ours).expect("a terminal has modes");
        !mode.local_flags.intersects(
            nix::sys::termios::LocalFlags::ICANON
                | nix::sys::termios::LocalFlags::ISIG
                | nix::sys::termios::LocalFlags::ECHO,
        )
    }

    /// Process id of the program in the terminal.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the program a signal.
    #[track_caller]
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).expect("the child was not waited for yet");
    }

    /// The terminal's descriptor, for `ioctl`.
    pub fn descriptor(&self) -> i32 {
        self.ours.as_raw_fd()
    }

    /// The program's exit status, if it has ended; 128 plus the signal when a signal ended it.
    pub fn ended(&mut self) -> Option<i32> {
        let status = self.child.try_wait().expect("our own child")?;
        Some(
            status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
        )
    }

    /// Waits for the program's end and returns its exit status. Its last output has been read then.
    #[track_caller]
    pub fn wait(&mut self, limit: Duration) -> i32 {
        match wait::within(limit, || self.ended()) {
            Some(status) => {
                // Processes that the program left may have the terminal still.
                wait::within(LAST_WORDS_LIMIT, || self.reader.is_finished().then_some(()));
                status
            }
            None => panic!(
                "{} still runs after {limit:?}; its terminal:\n{}",
                self.line,
                self.shown()
            ),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It may have ended, and been waited for, already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
