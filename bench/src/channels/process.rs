//! A second process on the second CPU: this program again, in a role. It ends with its starter, which kills
//! it by its number.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::cpu::pin;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use urpc::host::SharedRing;

use crate::patience::LIMIT;
use crate::pinned::two_cpus;

/// The word before a role.
pub const ROLE: &str = "as";

/// Child process that has the other end of a channel.
pub struct Other(Child);

impl Other {
    /// Starts it with the words after its role.
    pub fn start(role: &str, words: &[String], input: Stdio) -> Outcome<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(ROLE).arg(role).args(words).stdin(input);
        Ok(Self(command.spawn()?))
    }

    /// Waits for its end, which must be near and good.
    pub fn finish(mut self) -> Outcome<()> {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            match self.0.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("the other process ended with {status}").into()),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Err("the other process does not end".into())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // After its end both calls have no effect.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Prepares the other process.
pub fn begin() -> Outcome<()> {
    set_pdeathsig(Signal::SIGKILL)?;
    let [_, second] = two_cpus()?;
    pin(second)
}

/// Makes a new ring and its file, and the word by which the other process finds it while the file is open
/// here.
pub fn ring(lines: usize) -> Outcome<(SharedRing, OwnedFd, String)> {
    let (ring, file) = SharedRing::create(lines)?;
    let word = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((ring, file, word))
}

/// The ring of a word.
pub fn ring_of(word: &str) -> Outcome<SharedRing> {
    let file = OpenOptions::new().read(true).write(true).open(word)?;
    Ok(SharedRing::attach(&file.into())?)
}
