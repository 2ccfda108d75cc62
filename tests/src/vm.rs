//! A VM that ends with the test, and shows its state when the test fails.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{BOOT_LIMIT, Call, Output, built, mirrorball, tail};
use crate::{Scratch, host, wait};

/// A VM file under construction.
#[derive(Clone, Debug)]
pub struct VmFile {
    name: String,
    head: String,
    tables: String,
    host: Option<&'static str>,
}

/// The host's file by which all VMs of a user share pages, root's too.
pub const SHARE_BETWEEN_ALL: &str = "share_between = \"all\"\n";
/// The host's file by which only VMs of one command share.
pub const SHARE_BETWEEN_GROUP: &str = "share_between = \"group\"\n";

impl VmFile {
    /// The image of these tests: Debian's cloud kernel, the agent and busybox, no root disk.
    pub const TINY: &str = "tiny";
    /// The same with Debian's generic kernel.
    pub const TINY_GENERIC: &str = "tiny-generic";

    /// A VM of the image [`Self::TINY`] with 1 vCPU, 128 MiB and no network. The name gets this process'
    /// number.
    pub fn new(name: &str) -> Self {
        Self::of(name, Self::TINY)
    }

    /// The same of another image.
    pub fn of(name: &str, image: &str) -> Self {
        let name = format!("t-{name}-{}", std::process::id());
        let head = format!("name = \"{name}\"\nimage = \"{image}\"\n");
        Self {
            name,
            head,
            tables: String::new(),
            host: None,
        }
        .key("memory", "\"128M\"")
        .key("nets", "[]")
    }

    /// Sets a top-level key; `value` is TOML.
    pub fn key(mut self, key: &str, value: &str) -> Self {
        let start = format!("{key} = ");
        self.head = self
            .head
            .lines()
            .filter(|line| !line.starts_with(&start))
            .map(|line| format!("{line}\n"))
            .collect();
        let _ = writeln!(self.head, "{key} = {value}");
        self
    }

    /// Sets the number of vCPUs.
    pub fn cpus(self, count: u8) -> Self {
        self.key("cpus", &count.to_string())
    }

    /// Sets the memory, with a unit.
    pub fn memory(self, size: &str) -> Self {
        self.key("memory", &format!("\"{size}\""))
    }

    /// Adds a disk; `more` is TOML, such as `mode = "exclusive"`.
    pub fn disk(mut self, path: &Path, more: &str) -> Self {
        let _ = write!(self.tables, "\n[[disks]]\npath = {path:?}\n{more}\n");
        self
    }

    /// Adds a network card; `more` is TOML.
    pub fn net(mut self, more: &str) -> Self {
        self.head = self.head.replace("nets = []\n", "");
        let _ = write!(self.tables, "\n[[nets]]\n{more}\n");
        self
    }

    /// Adds a table, as TOML.
    pub fn table(mut self, text: &str) -> Self {
        let _ = write!(self.tables, "\n{text}\n");
        self
    }

    /// Starts the VM with this text as the host's file.
    pub fn host_file(mut self, text: &'static str) -> Self {
        self.host = Some(text);
        self
    }

    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text of the file.
    pub fn text(&self) -> String {
        format!("{}{}", self.head, self.tables)
    }

    /// Writes the file.
    pub fn write(&self, scratch: &Scratch) -> PathBuf {
        scratch.write(&format!("{}.toml", self.name), self.text())
    }

    /// Starts the VM detached and waits until its agent answers.
    #[track_caller]
    pub fn start(&self, scratch: &Scratch) -> Vm {
        let vm = self.start_only(scratch);
        vm.wait_up();
        vm
    }

    /// Starts the VM detached and does not wait for the guest.
    #[track_caller]
    pub fn start_only(&self, scratch: &Scratch) -> Vm {
        let file = self.write(scratch);
        let mut call = mirrorball(["run", "-d"]).args([&file]);
        if let Some(text) = self.host {
            let path = scratch.write(&format!("{}-host.toml", self.name), text);
            call = call.env("MIRRORBALL_HOST_FILE", path);
        }
        let started = call.run();
        // Made before the check: should the command fail half-way, the VM ends all the same.
        let vm = Vm::named(&self.name);
        started.expect(0);
        vm
    }
}

/// The runtime directory of the command under test.
pub fn runtime_directory() -> PathBuf {
    if let Ok(path) = std::env::var("MIRRORBALL_RUNTIME") {
        return path.into();
    }
    let uid = nix::unistd::geteuid();
    match std::env::var("XDG_RUNTIME_DIR") {
        _ if uid.is_root() => "/run/mirrorball".into(),
        Ok(parent) => Path::new(&parent).join("mirrorball"),
        Err(_) => format!("/tmp/mirrorball-{uid}").into(),
    }
}

/// A running VM. Killed when dropped; when the test is failing, its logs and console are shown first.
pub struct Vm {
    name: String,
    /// Whether its end is known, so that nothing has to be killed.
    has_ended: AtomicBool,
}

/// The place of `guest-tool` in a guest.
pub const TOOL: &str = "/tmp/guest-tool";

impl Vm {
    /// A VM that another program started.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            has_ended: AtomicBool::new(false),
        }
    }

    /// Name of the VM in this test's registry.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Waits until the agent runs a program.
    #[track_caller]
    pub fn wait_up(&self) {
        wait::until(&format!("the agent of {}", self.name), BOOT_LIMIT, || {
            (self.exec(["true"]).limit(Duration::from_secs(10)).run().status == 0).then_some(())
        });
    }

    /// A call of `mirrorball exec` with this command; not yet run.
    pub fn exec<I: AsRef<std::ffi::OsStr>>(&self, command: impl IntoIterator<Item = I>) -> Call {
        mirrorball(["exec", &self.name, "--"]).args(command)
    }

    /// Runs a shell script in the guest, expects status 0, returns its stdout.
    #[track_caller]
    pub fn sh(&self, script: &str) -> String {
        self.exec(["sh", "-c", script]).ok().text()
    }

    /// Copies `guest-tool` into the guest.
    #[track_caller]
    pub fn add_tool(&self) {
        self.put(&built("guest-tool"), TOOL);
    }

    /// A call of `guest-tool` in the guest; not yet run.
    pub fn tool(&self, arguments: &[&str]) -> Call {
        self.exec([TOOL]).args(arguments)
    }

    /// Copies a file into the guest.
    #[track_caller]
    pub fn put(&self, from: &Path, to: &str) {
        let target = format!("{}:{to}", self.name);
        mirrorball(["cp"]).args([from.as_os_str(), target.as_ref()]).ok();
    }

    /// Copies a file out of the guest.
    #[track_caller]
    pub fn get(&self, from: &str, to: &Path) {
        let source = format!("{}:{from}", self.name);
        mirrorball(["cp"]).args([source.as_ref(), to.as_os_str()]).ok();
    }

    /// This VM's entry of `ps --json`, if it is there.
    #[track_caller]
    pub fn listed(&self) -> Option<Value> {
        let list = mirrorball(["ps", "--json"]).ok().json();
        let entries = list.as_array().expect("ps --json gives an array").clone();
        entries
            .into_iter()
            .find(|entry| entry["name"] == self.name.as_str())
    }

    /// The output of `inspect`.
    #[track_caller]
    pub fn inspect(&self) -> Value {
        let whole = mirrorball(["inspect", &self.name]).ok().json();
        match whole {
            Value::Array(mut one) if one.len() == 1 => one.remove(0),
            whole => whole,
        }
    }

    /// The counts of the device of this name.
    #[track_caller]
    pub fn counters(&self, device: &str) -> Value {
        let known = self.inspect();
        let devices = known["status"]["devices"].as_array();
        let found = devices.and_then(|all| all.iter().find(|one| one["name"] == device));
        found.unwrap_or_else(|| panic!("no {device} in {known:#}"))["counters"].clone()
    }

    /// Its directory in the registry.
    pub fn folder(&self) -> PathBuf {
        Self::folder_of(&self.name)
    }

    /// The directory in the registry of a VM of this name.
    pub fn folder_of(name: &str) -> PathBuf {
        runtime_directory().join("vms").join(name)
    }

    /// The process that serves it: its monitor, or its cell's.
    #[track_caller]
    pub fn monitor(&self) -> u32 {
        self.pid_of("monitor_pid")
    }

    /// The process of its keeper.
    #[track_caller]
    pub fn keeper(&self) -> u32 {
        self.pid_of("keeper_pid")
    }

    /// Processes beside its shards that work for its cards and folders: each passt, each frame filter, and
    /// each server of a folder.
    #[track_caller]
    pub fn card_processes(&self) -> Vec<u32> {
        let cards = self.inspect()["card_pids"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let pids = cards.iter().map(|pid| pid.as_u64().expect("a process number"));
        pids.map(|pid| u32::try_from(pid).expect("a process number"))
            .inspect(|pid| {
                let kinds = [host::is_passt, host::is_frame_filter, host::is_folder_server];
                assert!(kinds.iter().any(|is_kind| is_kind(*pid)), "{pid}");
            })
            .collect()
    }

    /// Kills its monitor, or its cell's process, and waits for the next one. Returns the time that took.
    #[track_caller]
    pub fn kill_monitor(&self, limit: Duration) -> Duration {
        let before = self.monitor();
        host::kill9(before);
        let killed = Instant::now();
        wait::until(&format!("the next monitor of {}", self.name), limit, || {
            // Between the two the record names a process that is gone.
            let whole = mirrorball(["inspect", &self.name]).run();
            let next = (whole.status == 0).then(|| self.monitor());
            next.filter(|next| *next != before)
        });
        killed.elapsed()
    }

    /// The process of its shard, as the host numbers it.
    #[track_caller]
    pub fn shard(&self) -> u32 {
        self.pid_of("shard_pid")
    }

    #[track_caller]
    fn pid_of(&self, field: &str) -> u32 {
        let whole = self.inspect();
        let pid = whole[field].as_u64();
        let pid = pid.unwrap_or_else(|| panic!("no {field} in inspect {}: {whole:#}", self.name));
        u32::try_from(pid).expect("a process number")
    }

    /// Starts a program in the guest that goes on when the call is over.
    #[track_caller]
    pub fn background(&self, command: &str) {
        self.sh(&format!("{command} </dev/null >/tmp/background.log 2>&1 &"));
    }

    /// Runs a script in the guest that ends the guest; the call itself may end in any way, as its guest goes
    /// away under it.
    pub fn last_words(&self, script: &str) {
        let _ = self
            .exec(["sh", "-c", script])
            .limit(Duration::from_secs(10))
            .run();
    }

    /// The guest's own number for its present boot.
    #[track_caller]
    pub fn boot_id(&self) -> String {
        self.sh("cat /proc/sys/kernel/random/boot_id")
    }

    /// Lets the guest reboot and waits until it is up again. Files in its memory are gone, `guest-tool` too.
    #[track_caller]
    pub fn reboot(&self) {
        let before = self.boot_id();
        self.last_words("sync; reboot -f");
        self.wait_rebooted(&before);
    }

    /// Waits until the guest is up in another boot than `before`.
    #[track_caller]
    pub fn wait_rebooted(&self, before: &str) {
        wait::until(
            &format!("{} up again after its reboot", self.name),
            BOOT_LIMIT,
            || {
                let id = self
                    .exec(["cat", "/proc/sys/kernel/random/boot_id"])
                    .limit(Duration::from_secs(10))
                    .run();
                (id.status == 0 && id.text() != before).then_some(())
            },
        );
    }

    /// Waits until the VM is no longer listed.
    #[track_caller]
    pub fn wait_ended(&self, limit: Duration) {
        wait::until(&format!("the end of {}", self.name), limit, || {
            self.listed().is_none().then_some(())
        });
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// `mirrorball stop`.
    #[track_caller]
    pub fn stop(&self) -> Output {
        let output = mirrorball(["stop", &self.name]).ok();
        self.has_ended.store(true, Ordering::Relaxed);
        output
    }

    /// `mirrorball kill`.
    #[track_caller]
    pub fn kill(&self) -> Output {
        let output = mirrorball(["kill", &self.name]).ok();
        self.has_ended.store(true, Ordering::Relaxed);
        output
    }

    /// Its log and console so far.
    pub fn logs(&self) -> String {
        let logs = mirrorball(["logs", &self.name])
            .limit(Duration::from_secs(10))
            .run();
        logs.text() + &logs.errors()
    }

    /// Checks that all of the guest's plain memory is on this node of the host, and bound to it; a host with
    /// one node has no other.
    #[track_caller]
    pub fn expect_memory_on(&self, node: u64) {
        let path = format!("/proc/{}/numa_maps", self.shard());
        // A kernel without NUMA has no such file.
        let Ok(maps) = std::fs::read_to_string(&path) else {
            return;
        };
        let guest: Vec<&str> = maps
            .lines()
            .filter(|line| line.contains("guest-memory"))
            .collect();
        assert!(!guest.is_empty(), "no guest memory in {path}:\n{maps}");
        // A kernel with one node has nothing to bind to.
        let binds = std::fs::metadata("/sys/devices/system/node/node1").is_ok();
        for line in guest {
            // First touch alone would put the pages there, too, as long as there is room.
            let policy = line.split(' ').nth(1);
            assert!(
                !binds || policy == Some(&format!("bind:{node}")),
                "not bound: {line}"
            );
            let nodes = line
                .split(' ')
                .filter_map(|word| word.strip_prefix('N')?.split_once('='));
            for (on, pages) in nodes {
                assert_eq!(on.parse(), Ok(node), "{pages} pages elsewhere: {line}");
            }
        }
    }

    /// The host's memory that the guest takes, in bytes.
    #[track_caller]
    pub fn resident_bytes(&self) -> u64 {
        host::proportional_bytes(self.shard())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let known = mirrorball(["inspect", &self.name])
                .limit(Duration::from_secs(20))
                .run();
            eprintln!(
                "--- {}: output of inspect, logs and console\n{}{}\n{}\n---",
                self.name,
                known.text(),
                known.errors(),
                tail(&self.logs(), 80)
            );
        }
        if self.has_ended.load(Ordering::Relaxed) {
            return;
        }
        // It may have ended by itself; then this command reports that and does nothing else.
        let _ = mirrorball(["kill", &self.name])
            .limit(Duration::from_secs(20))
            .run();
    }
}
