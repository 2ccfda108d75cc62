//! Two cells with a runtime directory of their own, and VMs of a few instructions in them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use guest_tests::cluster::allowed_cpus;
use guest_tests::command::{Call, Running};
use guest_tests::halting::{end_cells, halting_guest};
use guest_tests::{Scratch, host, mirrorball, wait};

/// Time limit of a short step on an emulated host.
pub(super) const SOON: Duration = Duration::from_secs(60);
/// Time limit until a shard has ended with its keeper, and its memory is free.
pub(super) const END_LIMIT: Duration = Duration::from_secs(5);
/// The VM of most tests.
pub(super) const NAME: &str = "web";
/// Keys of a VM that needs no loan, in either cell.
pub(super) const SMALL: &str = "memory = \"64M\"\n";
/// Cells lend by command only.
pub(super) const BY_COMMAND: &str = "[borrowing]\nautomatic = false\n";

/// Two cells of a CPU and 192 MiB each. They and their VMs end when this is dropped.
pub(super) struct Cells {
    pub(super) scratch: Scratch,
    file: PathBuf,
    guest: PathBuf,
}

impl Cells {
    #[track_caller]
    pub(super) fn up(test: &str) -> Self {
        Self::up_with(test, BY_COMMAND)
    }

    /// Brings up cells with this table of borrowing.
    #[track_caller]
    pub(super) fn up_with(test: &str, borrowing: &str) -> Self {
        let scratch = Scratch::new(test);
        let cells = allowed_cpus().map(|cpu| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"192M\"\n"));
        let cells: Vec<String> = cells.take(2).collect();
        assert_eq!(cells.len(), 2, "two cells need two CPUs");
        Self::up_of(
            scratch,
            &format!("{}{borrowing}", cells.concat()),
            &halting_guest(),
        )
    }

    /// Brings up the cells of a file's text, for VMs with this guest.
    #[track_caller]
    pub(super) fn up_of(scratch: Scratch, text: &str, guest: &[u8]) -> Self {
        // Ended even if they come up half.
        let cells = Self {
            file: scratch.write("cluster.toml", text),
            guest: scratch.write("guest", guest),
            scratch,
        };
        cells.up_again();
        cells
    }

    #[track_caller]
    pub(super) fn up_again(&self) {
        let file = self.file.to_str().expect("UTF-8");
        self.call(["cluster", "up", file, "--lab", "never"]).ok();
    }

    pub(super) fn call<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Call {
        self.with_settings(mirrorball(arguments))
    }

    /// A call that these cells serve.
    pub(super) fn with_settings(&self, call: Call) -> Call {
        call.limit(SOON)
            .env("MIRRORBALL_IN_LAB", "1")
            .env("MIRRORBALL_RUNTIME", self.scratch.join("runtime"))
            .env("MIRRORBALL_DATA", self.scratch.join("data"))
            .env("MIRRORBALL_USERS", self.scratch.join("users"))
    }

    /// Moves memory of cell 0 to cell 1, or back.
    pub(super) fn loan(&self, verb: &str, size: &str) -> Call {
        let (from, to) = if verb == "lend" { ("0", "1") } else { ("1", "0") };
        self.call(["cluster", verb, size, "--from", from, "--to", to])
    }

    /// Writes a VM file with these keys and an exclusive disk.
    pub(super) fn vm_file(&self, name: &str, keys: &str, disk: Option<&Path>) -> String {
        let disk = disk.map_or_else(String::new, |disk| {
            format!("[[disks]]\npath = {disk:?}\nmode = \"exclusive\"\npersistent = true\n")
        });
        let kernel = format!("kernel = {{ path = {:?} }}", self.guest);
        let text = format!("name = \"{name}\"\n{kernel}\nnets = []\n{keys}{disk}");
        let path = self.scratch.write(&format!("{name}.toml"), text);
        path.into_os_string().into_string().expect("UTF-8")
    }

    /// Starts a VM that its command follows, and waits until it runs.
    #[track_caller]
    pub(super) fn follow(&self, file: &str) -> Running {
        let run = self.call(["run", file]).spawn();
        wait::until("a VM that runs", SOON, || {
            let vm = self.inspect(NAME)?;
            (vm["state"] == "running" && vm["shard_pid"].is_u64()).then_some(())
        });
        run
    }

    /// The output of `inspect` for a VM; none if it does not run.
    pub(super) fn inspect(&self, name: &str) -> Option<Value> {
        let output = self.call(["inspect", name]).run();
        (output.status == 0).then(|| output.json())
    }

    /// A process of the VM.
    #[track_caller]
    pub(super) fn pid(&self, key: &str) -> u32 {
        let vm = self.inspect(NAME).expect("the VM runs");
        as_pid(&vm[key]).unwrap_or_else(|| panic!("no {key} in {vm:#}"))
    }

    #[track_caller]
    pub(super) fn status(&self) -> Vec<Value> {
        let status = self.call(["cluster", "status", "--json"]).ok().json();
        status.as_array().expect("an array").clone()
    }

    /// The guard of a cell, and the cell's process.
    #[track_caller]
    pub(super) fn processes(&self, number: usize) -> [u32; 2] {
        // The guard replaces a process that stood still for long, a moment after it goes on.
        wait::until("the cell's process", SOON, || {
            let pid = as_pid(&self.status()[number]["pid"])?;
            host::is_running(pid).then(|| [host::parent(pid), pid])
        })
    }

    /// Waits until both cells run, and cell 1 has these VMs, none of which a monitor serves.
    #[track_caller]
    pub(super) fn wait_served(&self, names: &[&str]) {
        wait::until("VMs that their cell serves", SOON, || {
            let status = self.call(["cluster", "status", "--json"]).run();
            let status = (status.status == 0).then(|| status.json())?;
            let pid = as_pid(&status[1]["pid"])?;
            let runs = [0, 1].map(|number| as_pid(&status[number]["pid"]).is_some_and(host::is_running));
            let served = |name: &&str| self.inspect(name).is_some_and(|vm| vm["monitor_pid"] == pid);
            (runs == [true, true] && names_of(&status[1]) == names && names.iter().all(served)).then_some(())
        });
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        end_cells(&self.scratch.join("runtime"), |words| {
            drop(self.call(words.iter().copied()).run())
        });
    }
}

/// A process id in JSON.
pub(super) fn as_pid(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|pid| u32::try_from(pid).ok())
}

pub(super) fn names_of(cell: &Value) -> Vec<&str> {
    let vms = cell["vms"].as_array().into_iter().flatten();
    vms.filter_map(Value::as_str).collect()
}
