//! The VM, from its start to its end, by Mirrorball's commands.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use bench::Outcome;
use serde_json::Value;

use crate::environment::Environment;
use crate::exits::Exits;
use crate::kinds::Kind;

const NAME: &str = "bench-span";
/// Path of the program in the guest.
const GUEST: &str = "/root/bench-span-guest";
/// Time limit of a boot.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Time limit of any command.
const LIMIT: Duration = Duration::from_secs(300);
/// Time limit of a storm of interrupts.
const STORM_LIMIT: Duration = Duration::from_secs(300);
/// Time limit of the whole VM.
const LIFE: Duration = Duration::from_secs(1800);

/// A running VM. Ended when dropped.
pub struct Vm<'a> {
    environment: &'a Environment,
    /// `mirrorball run`, which holds the VM.
    run: Child,
    started: Instant,
}

impl<'a> Vm<'a> {
    /// Starts a VM of this kind with `mirrorball run`.
    pub fn start(environment: &'a Environment, kind: Kind) -> Outcome<Self> {
        let source = environment
            .source
            .to_str()
            .ok_or("a folder whose name is no text")?;
        let words = [
            "run",
            "--lab",
            "never",
            "--image",
            "debian-12",
            "--name",
            NAME,
            "--cpus",
            "4",
            "--memory",
            "1G",
            "--net",
            "none",
            "--share",
            "never",
            "--disk",
            source,
        ];
        let words = [&words[..], &kind.flags()].concat();
        let mut command = environment.mirrorball.command(&words, LIFE);
        let started = Instant::now();
        let run = command.stdout(Stdio::null()).spawn()?;
        Ok(Self {
            environment,
            run,
            started,
        })
    }

    /// Time from the start of the command until the agent answers, seconds. Then waits until the guest's
    /// services have started.
    pub fn answers_s(&self) -> Outcome<f64> {
        while let Err(error) = self.exec(&["true"]) {
            if self.started.elapsed() > BOOT_LIMIT {
                return Err(error);
            }
        }
        let answered_s = self.started.elapsed().as_secs_f64();
        // Its status says whether all services are well, which does not matter here.
        self.exec(&[
            "/bin/sh",
            "-c",
            "timeout 60 systemctl is-system-running --wait || true",
        ])?;
        Ok(answered_s)
    }

    /// Runs a program in the guest; returns its output.
    pub fn exec(&self, program: &[&str]) -> Outcome<String> {
        let words = [&["exec", NAME, "-T", "--"], program].concat();
        Ok(self.environment.mirrorball.call(&words, LIMIT)?.0)
    }

    /// Copies the guest's program into the guest, and returns its measurements.
    pub fn figures(&self) -> Outcome<Value> {
        let guest = self
            .environment
            .guest
            .to_str()
            .ok_or("a folder whose name is no text")?;
        self.environment
            .mirrorball
            .call(&["cp", guest, &format!("{NAME}:{GUEST}")], LIMIT)?;
        Ok(serde_json::from_str(&self.exec(&[GUEST, "figures"])?)?)
    }

    /// Counts of the vCPUs so far.
    pub fn exits(&self) -> Outcome<Exits> {
        let (known, _) = self.environment.mirrorball.call(&["inspect", NAME], LIMIT)?;
        let known: Value = serde_json::from_str(&known)?;
        Exits::of(&known["status"])
    }

    /// Moves a vCPU to a cell; returns its pause, microseconds.
    pub fn move_us(&self, vcpu: u8, cell: u16) -> Outcome<f64> {
        let (vcpu, cell) = (vcpu.to_string(), cell.to_string());
        let words = ["move", NAME, "--vcpu", &vcpu, "--cell", &cell];
        let (said, told) = self.environment.mirrorball.call(&words, LIMIT)?;
        let said = said + &told;
        pause_us(&said).ok_or_else(|| format!("`mirrorball move` does not tell its pause: {said}").into())
    }

    /// Has every vCPU interrupt all others while `work` is done.
    pub fn in_storm<T>(&self, work: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
        let words = ["exec", NAME, "-T", "--", GUEST, "storm"];
        let mut command = self.environment.mirrorball.command(&words, STORM_LIMIT);
        let mut storm = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(storm.stdout.take().ok_or("no output")?);
        // A line shows that it has begun, or ended.
        said.read_line(&mut String::new())?;
        let done = work();
        // The end of its input is the storm's. It has a limit in any case.
        drop(storm.stdin.take());
        let status = storm.wait()?;
        if status.success() {
            return done;
        }
        done.and(Err(format!("the storm of interrupts ended with {status}").into()))
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        let _ = self.environment.mirrorball.call(&["kill", NAME], LIMIT);
        // Ends the lease, should that have failed, and so the VM: `timeout` passes the signal on.
        let run = nix::unistd::Pid::from_raw(self.run.id() as i32);
        let _ = nix::sys::signal::kill(run, nix::sys::signal::Signal::SIGTERM);
        let _ = self.run.wait();
    }
}

/// The pause in a line such as `vCPU 3 of NAME runs in cell 1; it stood still for 812 us`.
fn pause_us(said: &str) -> Option<f64> {
    let (_, rest) = said.split_once("stood still for ")?;
    let (number, _) = rest.split_once(" us")?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_read_from_the_line_of_a_move() {
        let line = "vCPU 3 of bench-span runs in cell 1; it stood still for 812 us\n";
        assert_eq!(pause_us(line), Some(812.0));
        assert_eq!(pause_us("vCPU 3 of bench-span runs in cell 1 already\n"), None);
    }
}
