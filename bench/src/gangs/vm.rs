//! A VM of two vCPUs, and the program that it runs.

use std::path::Path;
use std::time::Duration;

use bench::Outcome;
use bench::mirrorball::Mirrorball;
use bench::tiny_vm::{TinyVm, Working};
use serde_json::Value;

use crate::kinds::Guest;

/// Line of a guest's kernel that has chosen paravirtual spin locks.
const PARAVIRTUAL: &str = "PV spinlocks enabled";
/// Time limit of a program.
const LIMIT: Duration = Duration::from_secs(120);

/// A running VM. Ended when dropped.
pub struct Vm<'a>(TinyVm<'a>);

impl<'a> Vm<'a> {
    /// Starts a VM in its cells, waits until it has booted, and copies the program `guest` into it.
    ///
    /// # Errors
    /// If it does not boot, or its kernel has other spin locks than `kind`.
    pub fn start(mirrorball: &'a Mirrorball, name: &'static str, kind: Guest, guest: &Path) -> Outcome<Self> {
        let mut words = vec!["--cpus", "2", "--memory", "128M"];
        words.extend(match kind {
            Guest::Spanning => ["--span", "0,1"],
            Guest::Paravirtual | Guest::Native => ["--cell", "0"],
        });
        words.extend(
            kind.cmdline()
                .into_iter()
                .flat_map(|cmdline| ["--cmdline", cmdline]),
        );
        let vm = TinyVm::start(mirrorball, name, &words, guest)?;
        if vm.log().contains(PARAVIRTUAL) != (kind == Guest::Paravirtual) {
            return Err(format!("{name}: the kernel is not one with {}", kind.name()).into());
        }
        Ok(Self(vm))
    }

    /// Runs the guest's program to its end; returns the JSON that it prints.
    pub fn call(&self, words: &[&str]) -> Outcome<Value> {
        self.0.call(words)
    }

    /// Starts the guest's program.
    pub fn work(&self, words: &[&str]) -> Outcome<Working> {
        self.0.work(words, LIMIT)
    }

    /// Restricts each vCPU to a CPU of its own.
    pub fn pin(&self, cpus: (usize, usize)) -> Outcome<()> {
        let [first, second] = [(0, cpus.0), (1, cpus.1)].map(|(vcpu, cpu)| format!("{vcpu}={cpu}"));
        self.0.command("update", &["--pin", &first, "--pin", &second])?;
        Ok(())
    }
}

/// Time of a round of the guest's program, by its own clock, microseconds.
pub fn round_us(timed: &Value) -> Outcome<f64> {
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
