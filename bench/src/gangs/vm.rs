//! A VM of two vCPUs, and the program that it runs, by Mirrorball's commands.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use bench::Outcome;
use bench::mirrorball::Mirrorball;
use serde_json::Value;

use crate::kinds::Locks;

/// Path of the program in the guest.
const GUEST: &str = "/bench-gangs-guest";
/// Line of a guest's kernel that has chosen paravirtual spin locks.
const PARAVIRTUAL: &str = "PV spinlocks enabled";
/// Time limit of a boot, which the command of a VM that has not booted keeps, and one for that command.
const BOOT_LIMIT_S: &str = "240";
const EXEC_BOOT_LIMIT: Duration = Duration::from_secs(260);
/// Time limit of any other command.
const LIMIT: Duration = Duration::from_secs(120);

/// A running VM. Ended when dropped.
pub struct Vm<'a> {
    mirrorball: &'a Mirrorball,
    name: &'static str,
}

impl<'a> Vm<'a> {
    /// Starts a VM in cell 0, waits until it has booted, and copies the program `guest` into it.
    ///
    /// # Errors
    /// If it does not boot, or its kernel has other spin locks than `locks`.
    pub fn start(
        mirrorball: &'a Mirrorball,
        name: &'static str,
        locks: Locks,
        guest: &Path,
    ) -> Outcome<Self> {
        let mut words = vec![
            "run",
            "--detach",
            "--boot-limit",
            BOOT_LIMIT_S,
            "--lab",
            "never",
            "--image",
            "tiny",
            "--name",
            name,
        ];
        words.extend([
            "--cpus", "2", "--memory", "128M", "--net", "none", "--share", "never", "--cell", "0",
        ]);
        words.extend(
            locks
                .cmdline()
                .into_iter()
                .flat_map(|cmdline| ["--cmdline", cmdline]),
        );
        mirrorball.call(&words, LIMIT)?;
        let vm = Self { mirrorball, name };
        let (log, _) = mirrorball.call(&["exec", name, "-T", "--", "dmesg"], EXEC_BOOT_LIMIT)?;
        if log.contains(PARAVIRTUAL) != (locks == Locks::Paravirtual) {
            return Err(format!("{name}: the kernel does not have {}", locks.name()).into());
        }
        let guest = guest.to_str().ok_or("a folder whose name is no text")?;
        mirrorball.call(&["cp", guest, &format!("{name}:{GUEST}")], LIMIT)?;
        Ok(vm)
    }

    /// Runs the guest's program to its end; returns the JSON that it prints.
    pub fn call(&self, words: &[&str]) -> Outcome<Value> {
        let words = [&["exec", self.name, "-T", "--", GUEST], words].concat();
        Ok(serde_json::from_str(&self.mirrorball.call(&words, LIMIT)?.0)?)
    }

    /// Starts the guest's program.
    pub fn work(&self, words: &[&str]) -> Outcome<Working> {
        let words = [&["exec", self.name, "-T", "--", GUEST], words].concat();
        let mut command = self.mirrorball.command(&words, LIMIT);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        Ok(Working { child, input, output })
    }

    /// Restricts each vCPU to a CPU of its own.
    pub fn pin(&self, cpus: (usize, usize)) -> Outcome<()> {
        let [first, second] = [(0, cpus.0), (1, cpus.1)].map(|(vcpu, cpu)| format!("{vcpu}={cpu}"));
        let words = ["update", self.name, "--pin", &first, "--pin", &second];
        self.mirrorball.call(&words, LIMIT)?;
        Ok(())
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        let _ = self.mirrorball.call(&["kill", self.name], LIMIT);
    }
}

/// A started program of a guest. Ended when dropped.
pub struct Working {
    child: Child,
    /// The program ends with its input.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Working {
    /// Waits until the program awaits its start.
    pub fn ready(&mut self) -> Outcome<()> {
        match self.line()?.as_str() {
            "READY" => Ok(()),
            line => Err(format!("the guest's program is not ready: {line}").into()),
        }
    }

    /// Starts the rounds.
    pub fn go(&mut self) -> Outcome<()> {
        let input = self.input.as_mut().ok_or("the program has ended")?;
        Ok(writeln!(input, "go")?)
    }

    /// Waits for the end of the timed rounds; returns the time of a round, microseconds. The program goes on.
    pub fn round_us(&mut self) -> Outcome<f64> {
        round_us(&serde_json::from_str(&self.line()?)?)
    }

    fn line(&mut self) -> Outcome<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err("the guest's program ended without an answer".into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Time of a round of the guest's program, by its own clock, microseconds.
fn round_us(timed: &Value) -> Outcome<f64> {
    let rounds = timed["rounds"].as_u64().filter(|rounds| *rounds > 0);
    let time = rounds.zip(timed["seconds"].as_f64());
    let (rounds, seconds) = time.ok_or_else(|| format!("no round was timed: {timed}"))?;
    Ok(seconds * 1e6 / rounds as f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn time_of_a_round_is_that_of_the_rounds_that_were_run() {
        let timed = json!({ "rounds": 4000, "seconds": 0.5 });
        assert_eq!(round_us(&timed).ok(), Some(125.0));
        let none = json!({ "rounds": 0, "seconds": 10.0 });
        let error = round_us(&none).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.starts_with("no round was timed")));
    }
}
