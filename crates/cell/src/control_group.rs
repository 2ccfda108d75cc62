//! A VM's share of the host's CPU time, memory and I/O: a control group (cgroup v2) for the processes of its
//! shards and cards (passt and frame filters).
//!
//! Linux divides a CPU fairly between threads, so that a VM with more vCPUs gets more of it. In a group of
//! its own a VM gets a share by its weight, whatever the number of its threads, and never more than its
//! limit. Memory counts for the group whose process touches it first.

mod devices;
mod promise;

use std::fs;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{IoLimitSpec, Size, VmSpec};

pub use self::devices::DevicesError;

/// The mount point of the control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Folder below [`ROOT`] with the groups of all VMs.
const OURS: &str = "mirrorball";
/// The weight of a VM that sets none, the kernel's own default.
const WEIGHT_DEFAULT: u16 = 100;
/// The kernel's greatest weight.
const WEIGHT_MAX: u16 = 10_000;
/// Period of a limit, microseconds.
const PERIOD_US: f64 = 100_000.0;
/// Maximum number of processes and threads in a group. Those of a shard can start none once they are sealed;
/// this bounds passt.
const TASKS_MAX: u32 = 2048;
/// Number and interval of attempts to remove a group whose last process has just ended.
const END_TRIES: u32 = 50;
const END_PAUSE: Duration = Duration::from_millis(10);

/// The reason why a VM can't have a group.
#[derive(Debug, thiserror::Error)]
pub enum ControlGroupError {
    /// The host does not let this user make groups, or its kernel lacks a limit that the VM has.
    #[error(
        "cannot limit what the VM uses of the host: {}: {source}; that needs root, cgroup v2 and its \
         controllers: leave cpu_weight, cpu_limit, memory_limit and io_limit out elsewhere",
        path.display()
    )]
    Host {
        /// The group's file.
        path: PathBuf,
        /// Error of the access to it.
        source: io::Error,
    },
    /// The VM's I/O can't be limited.
    #[error(transparent)]
    Devices(#[from] DevicesError),
}

/// A VM's group, which is removed when it is dropped.
#[derive(Debug)]
pub struct ControlGroup(PathBuf);

impl ControlGroup {
    /// The group of the VM called `name`; none if its spec has no weight and no limit. `owner` is a process
    /// that lives as long as the VM; `files` are those of its disks, with the disks' names.
    ///
    /// # Errors
    /// If the host does not let this user make groups, or the I/O of a disk with a limit can't be limited.
    pub fn of<'a>(
        name: &str,
        owner: u32,
        spec: &VmSpec,
        files: impl Iterator<Item = (&'a str, BorrowedFd<'a>)>,
    ) -> Result<Option<Self>, ControlGroupError> {
        if !has_limits(spec) {
            // A promise is kept as far as the host allows.
            let promised = spec.memory_min.and_then(|_| Self::make(name, owner, false).ok());
            return Ok(promised.filter(|group| group.limit(spec).is_ok()));
        }
        let group = Self::make(name, owner, spec.io_limit.is_some())?;
        group.limit(spec)?;
        if let Some(limit) = &spec.io_limit {
            group.limit_io(limit, files)?;
        }
        Ok(Some(group))
    }

    /// The group of the VM that a process of it is in, which a predecessor of this process made; none if it
    /// is in none.
    pub(crate) fn of_process(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        group_of(&text).map(|name| Self(Path::new(ROOT).join(OURS).join(name)))
    }

    /// A group of the VM called `name`, with a limit of tasks only. `owner` is a process that lives as long
    /// as the VM.
    ///
    /// # Errors
    /// If the host does not let this user make groups.
    pub(crate) fn make(name: &str, owner: u32, limits_io: bool) -> Result<Self, ControlGroupError> {
        // Not every kernel has the controller `io`.
        let controllers = if limits_io {
            "+cpu +memory +pids +io"
        } else {
            "+cpu +memory +pids"
        };
        let ours = Path::new(ROOT).join(OURS);
        write(&Path::new(ROOT).join("cgroup.subtree_control"), controllers)?;
        make(&ours)?;
        write(&ours.join("cgroup.subtree_control"), controllers)?;
        remove_abandoned(&ours);
        // The owner's number is part of the name: other users of this machine's root may have VMs of this
        // name.
        let group = Self(ours.join(format!("{name}.{owner}")));
        make(&group.0)?;
        write(&group.0.join("pids.max"), &TASKS_MAX.to_string())?;
        // A VM whose cards were killed is of no use.
        write(&group.0.join("memory.oom.group"), "1")?;
        Ok(group)
    }

    /// Sets the weight and the limits of CPUs and memory of `spec`, and removes those that it does not have.
    /// Protects the memory that it promises, as far as the host allows.
    pub(crate) fn limit(&self, spec: &VmSpec) -> Result<(), ControlGroupError> {
        let most = |bytes: Size| bytes.0.to_string();
        let cpus = |cpus: f64| format!("{:.0} {PERIOD_US:.0}", cpus * PERIOD_US);
        let unlimited = || "max".to_owned();
        let memory = spec.memory_limit.map_or_else(unlimited, most);
        write(&self.0.join("memory.max"), &memory)?;
        promise::set(&self.0, spec.memory_min);
        let weight = spec.cpu_weight.unwrap_or_else(|| default_weight(spec));
        write(&self.0.join("cpu.weight"), &weight.to_string())?;
        let cpus = spec.cpu_limit.map_or_else(unlimited, cpus);
        write(&self.0.join("cpu.max"), &cpus)
    }

    /// Limits the I/O of each device that holds disks of the VM.
    fn limit_io<'a>(
        &self,
        limit: &IoLimitSpec,
        files: impl Iterator<Item = (&'a str, BorrowedFd<'a>)>,
    ) -> Result<(), ControlGroupError> {
        for device in devices::of_disks(files)? {
            write(&self.0.join("io.max"), &devices::line(device, limit))?;
        }
        Ok(())
    }

    /// Whether the kernel keeps so much memory of the group from programs outside.
    ///
    /// # Errors
    /// The reason why it does not.
    pub(crate) fn keeps(&self, promised: Size) -> Result<(), String> {
        promise::check(&self.0, promised)
    }

    /// Adds a process, and all that it starts, to the group. One that has ended is ignored.
    pub fn add(&self, pid: i32) -> Result<(), ControlGroupError> {
        let path = self.0.join("cgroup.procs");
        match put(&path, &pid.to_string()) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(failed(&path, error)),
            _ => Ok(()),
        }
    }

    /// Number of the group's processes that the kernel has killed because it used more memory than its limit.
    pub fn killed_for_memory(&self) -> u64 {
        fs::read_to_string(self.0.join("memory.events")).map_or(0, |events| killed(&events))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for _ in 0..END_TRIES {
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(END_PAUSE),
                _ => break,
            }
        }
        if let Some(ours) = self.0.parent() {
            promise::add_up(ours);
        }
    }
}

/// Whether a VM has a weight of CPUs or a limit, which its group must enforce.
fn has_limits(spec: &VmSpec) -> bool {
    spec.cpu_weight.is_some()
        || spec.cpu_limit.is_some()
        || spec.memory_limit.is_some()
        || spec.io_limit.is_some()
}

/// The weight of CPUs of a VM that sets none. A VM that has a group for its promise alone keeps the part that
/// its vCPUs would have without a group.
fn default_weight(spec: &VmSpec) -> u16 {
    match has_limits(spec) {
        true => WEIGHT_DEFAULT,
        false => WEIGHT_DEFAULT
            .saturating_mul(u16::from(spec.cpus))
            .min(WEIGHT_MAX),
    }
}

/// Limits of VMs that this user and this host can't enforce, by their names in a VM's file.
pub fn absent_limits() -> Vec<&'static str> {
    let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers")).unwrap_or_default();
    let is_root = nix::unistd::geteuid().is_root();
    absent(if is_root { &controllers } else { "" })
}

/// Limits without a controller among these. A group of a VM needs those of CPUs, memory and tasks, whatever
/// its limits are.
fn absent(controllers: &str) -> Vec<&'static str> {
    let has = |name| controllers.split_whitespace().any(|known| known == name);
    if !["cpu", "memory", "pids"].into_iter().all(has) {
        return vec!["cpu_weight", "cpu_limit", "memory_limit", "io_limit"];
    }
    match has("io") {
        true => Vec::new(),
        false => vec!["io_limit"],
    }
}

/// The name of the VM's group that a process is in, by its `/proc` file `cgroup`.
fn group_of(text: &str) -> Option<&str> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let name = path.strip_prefix(OURS)?.strip_prefix('/')?;
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

/// Number of processes that were killed for memory, by a group's `memory.events`.
fn killed(events: &str) -> u64 {
    let count = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
    events.lines().find_map(count).unwrap_or(0)
}

/// Removes the groups of VMs whose owners were killed.
fn remove_abandoned(ours: &Path) {
    for entry in fs::read_dir(ours).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.rsplit_once('.'));
        if let Some((_, pid)) = pid
            && pid.parse::<u32>().is_ok()
            && !Path::new("/proc").join(pid).exists()
        {
            // A group that still has processes stays.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

fn make(path: &Path) -> Result<(), ControlGroupError> {
    match fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(path, error)),
        _ => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), ControlGroupError> {
    put(path, text).map_err(|error| failed(path, error))
}

/// Writes to an existing file: where no cgroup v2 is mounted a new file would limit nothing.
fn put(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(path)?;
    file.write_all(text.as_bytes())
}

fn failed(path: &Path, source: io::Error) -> ControlGroupError {
    ControlGroupError::Host {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn limits_without_their_controllers_are_absent() {
        assert!(absent("cpuset cpu io memory hugetlb pids\n").is_empty());
        assert_eq!(absent("cpuset cpu memory pids"), ["io_limit"]);
        for controllers in ["", "cpu memory io", "cpuset memory pids", "cpu pids io"] {
            assert_eq!(absent(controllers).len(), 4, "{controllers}");
        }
    }

    /// A file on the first disk of this host that takes limits.
    fn disk() -> Option<(PathBuf, fs::File)> {
        let devices = fs::read_dir("/sys/block").ok()?.flatten();
        let mut paths = devices.map(|device| Path::new("/dev").join(device.file_name()));
        paths.find_map(|path| fs::File::open(&path).ok().map(|file| (path, file)))
    }

    #[test]
    fn a_group_limits_the_device_that_holds_the_vms_disk() {
        let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers")).unwrap_or_default();
        let can = nix::unistd::geteuid().is_root() && controllers.split_whitespace().any(|name| name == "io");
        let Some((path, disk)) = disk().filter(|_| can) else {
            return eprintln!("left out: it takes root, the io controller of cgroup v2, and a block device");
        };
        let limit = "[io_limit]\nread_bytes = \"1M\"\nwrites = 500\n";
        let spec = config::parse("vm.toml", &format!("image = \"x\"\n{limit}")).unwrap();
        let files = [("disk0", disk.as_fd())].into_iter();
        let group = ControlGroup::of("io-limit-test", std::process::id(), &spec, files)
            .unwrap()
            .unwrap();
        let lines = fs::read_to_string(group.0.join("io.max")).unwrap();
        let limit = "rbps=1048576 wbps=max riops=max wiops=500";
        assert!(lines.trim().ends_with(limit), "{}: {lines:?}", path.display());
        let left = group.0.clone();
        drop(group);
        assert!(!left.exists());
    }

    #[test]
    fn group_of_a_process_is_found_if_it_is_one_of_ours() {
        assert_eq!(group_of("0::/mirrorball/web.42\n"), Some("web.42"));
        assert_eq!(group_of("12:cpu:/x\n0::/mirrorball/web.42\n"), Some("web.42"));
        for other in [
            "",
            "0::/\n",
            "0::/mirrorball\n",
            "0::/mirrorball/\n",
            "0::/mirrorball/a/b\n",
            "0::/mirrorballs/a\n",
        ] {
            assert_eq!(group_of(other), None, "{other:?}");
        }
    }

    #[test]
    fn processes_killed_for_memory_are_counted() {
        let events = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(killed(events), 2);
        assert_eq!(killed("low 0\noom_kill 0\n"), 0);
        assert_eq!(killed(""), 0);
        assert_eq!(killed("oom_kill many\n"), 0);
    }
}
