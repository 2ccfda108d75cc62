//! A guest under Mirrorball, which pages its memory.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::guest_process::GuestProcess;
use serde_json::Value;

use crate::Environment;
use crate::kinds::Kind;
use crate::sample::{Faults, Host, HostPages, cmdline, start};

const NAME: &str = "bench-paging";
const PAGE_BYTES: u64 = 4096;
/// Time limit until pages beyond a new limit have left memory.
const TRIM_LIMIT: Duration = Duration::from_secs(240);
const TRIM_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A running VM. Ended when dropped.
pub struct Mirrorball<'a> {
    environment: &'a Environment,
    guest: GuestProcess,
    paging_file: PathBuf,
}

impl<'a> Mirrorball<'a> {
    /// Starts a VM whose limit is its whole memory, so that its start does not count. The inner error is the
    /// reason why this program can't run such a VM.
    pub fn start(environment: &'a Environment, kind: Kind) -> Outcome<Result<Self, String>> {
        let memory = format!("{}M", environment.sizes.memory_mib(kind));
        let disk_mib = environment.sizes.disk_mib();
        let paging_file = environment.folder.join("paging");
        let mut command = call(environment, &["run", "--lab", "never", "--net", "none"]);
        command
            .args(["--name", NAME, "--cpus", "1", "--memory", &memory])
            .args(["--resident", &memory, "--paging-file"])
            .arg(&paging_file)
            .arg("--kernel")
            .arg(&environment.files.kernel)
            .arg("--initrd")
            .arg(&environment.files.initrd)
            .args(["--cmdline", &cmdline(environment, kind)]);
        if kind.has_ordinary_disk() {
            let disk = environment.folder.join("disk");
            fs::File::create(&disk)?.set_len(disk_mib << 20)?;
            command.args(["--disk", &format!("{}:exclusive:persistent", disk.display())]);
        }
        if kind == Kind::PagingDisk {
            let help = call(environment, &["run", "--help"]).output()?;
            if !String::from_utf8_lossy(&help.stdout).contains("--paging-disk") {
                return Ok(Err("this `mirrorball` has no --paging-disk".to_owned()));
            }
            command.args(["--paging-disk", &format!("{disk_mib}M")]);
        }
        Ok(Ok(Self {
            environment,
            guest: start(&mut command)?,
            paging_file,
        }))
    }

    fn paging(&self) -> Outcome<Value> {
        let known: Value = serde_json::from_str(&self.call(&["inspect", NAME])?)?;
        Ok(known["status"]["paging"].clone())
    }

    fn call(&self, words: &[&str]) -> Outcome<String> {
        let output = call(self.environment, words).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            return Err(format!("mirrorball {}: {}", words.join(" "), error.trim()).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// A call of Mirrorball in a runtime directory of the bench's own.
fn call(environment: &Environment, words: &[&str]) -> Command {
    let runtime = environment.files.mirrorball.with_file_name("run");
    let mut command = Command::new(&environment.files.mirrorball);
    command.args(words).env("MIRRORBALL_RUNTIME", runtime);
    command
}

impl Host for Mirrorball<'_> {
    fn guest(&mut self) -> &mut GuestProcess {
        &mut self.guest
    }

    fn limit(&mut self) -> Outcome<()> {
        let resident_mib = self.environment.sizes.resident_mib;
        self.call(&["update", NAME, "--resident", &format!("{resident_mib}M")])?;
        let deadline = Instant::now() + TRIM_LIMIT;
        loop {
            let paging = self.paging()?;
            let bytes = number(&paging, "/resident_bytes")? + number(&paging, "/second_chance_bytes")?;
            if bytes <= resident_mib << 20 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("{bytes} bytes are in memory after {TRIM_LIMIT:?}: {paging}").into());
            }
            thread::sleep(TRIM_POLL_INTERVAL);
        }
    }

    fn pages(&self) -> Outcome<HostPages> {
        host_pages(&self.paging()?)
    }
}

impl Drop for Mirrorball<'_> {
    fn drop(&mut self) {
        // After an error only.
        if !matches!(self.guest.child.try_wait(), Ok(Some(_))) {
            let _ = self.call(&["kill", NAME]);
        }
        // The next VM begins with an empty one.
        let _ = fs::remove_file(&self.paging_file);
    }
}

/// The pages of a VM's paging counters.
fn host_pages(paging: &Value) -> Outcome<HostPages> {
    let without_io = match &paging["disk"] {
        Value::Null => None,
        disk => {
            let counters = [
                "/writes/without_io",
                "/writes/zero",
                "/reads/without_io",
                "/reads/zero",
            ];
            let counts = counters.map(|counter| number(disk, counter));
            Some(counts.into_iter().sum::<Outcome<u64>>()?)
        }
    };
    Ok(HostPages {
        read: number(paging, "/read_bytes")? / PAGE_BYTES,
        written: number(paging, "/written_bytes")? / PAGE_BYTES,
        without_io,
        faults: Some(Faults {
            zero: number(paging, "/faults/zero")?,
            second_chance: number(paging, "/faults/without_io")?,
            read_ahead: number(paging, "/faults/read_ahead")?,
            with_io: number(paging, "/faults/with_io")?,
            unchanged_pages: number(paging, "/unchanged_bytes")? / PAGE_BYTES,
        }),
    })
}

fn number(counters: &Value, name: &str) -> Outcome<u64> {
    let number = counters.pointer(name).and_then(Value::as_u64);
    Ok(number.ok_or_else(|| format!("no {name} in {counters}"))?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pages_are_those_of_the_paging_file_and_swapped_ones_without_io() {
        let mut paging = json!({
            "read_bytes": 3 * 4096,
            "written_bytes": 64 * 4096,
            "unchanged_bytes": 5 * 4096,
            "faults": { "zero": 1, "without_io": 2, "read_ahead": 4, "with_io": 8 },
            "disk": null,
        });
        let mut pages = HostPages {
            read: 3,
            written: 64,
            without_io: None,
            faults: Some(Faults {
                zero: 1,
                second_chance: 2,
                read_ahead: 4,
                with_io: 8,
                unchanged_pages: 5,
            }),
        };
        assert_eq!(host_pages(&paging).unwrap(), pages);
        paging["disk"] = json!({
            "writes": { "without_io": 10, "zero": 2, "with_io": 7 },
            "reads": { "without_io": 5, "zero": 0, "with_io": 1 },
        });
        pages.without_io = Some(17);
        assert_eq!(host_pages(&paging).unwrap(), pages);
        let error = host_pages(&json!({})).unwrap_err().to_string();
        assert_eq!(error, "no /read_bytes in {}");
    }
}
