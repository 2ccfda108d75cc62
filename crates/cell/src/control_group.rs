//! A VM's share of the host's CPU time, memory and I/O: a control group (cgroup v2) for the processes of its
//! shards and cards (passt and frame filters).
//!
//! Linux divides a CPU fairly between threads, so that a VM with more vCPUs gets more of it. In a group of
//! its own a VM gets by its weight, however many they are, and never more than its limit. Memory counts for
//! the group whose process touches it first.

mod devices;

use std::fs;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{IoLimitSpec, Size, VmSpec};

pub use self::devices::DevicesError;

/// Where control groups are.
const ROOT: &str = "/sys/fs/cgroup";
/// Below it, the groups of all VMs.
const OURS: &str = "mirrorball";
/// The weight of a group that asks for none, the kernel's own default.
const WEIGHT_DEFAULT: u16 = 100;
/// Over which a limit holds, microseconds.
const PERIOD_US: f64 = 100_000.0;
/// Processes and threads that a group has at most. Those of a shard can start none once they are sealed; this
/// bounds passt.
const TASKS_MAX: u32 = 2048;
/// How often, and how long apart, the end of a group is tried: its last process has just ended.
const END_TRIES: u32 = 50;
const END_PAUSE: Duration = Duration::from_millis(10);

/// Why a VM can't have one.
#[derive(Debug, thiserror::Error)]
pub enum ControlGroupError {
    /// The host does not let this user make groups, or its kernel can't do what is asked of them.
    #[error(
        "cannot limit what the VM uses of the host: {}: {source}; that needs root, cgroup v2 and its controllers: leave \
         cpu_weight, cpu_limit, memory_limit and io_limit out elsewhere",
        path.display()
    )]
    Host {
        /// The group's file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The VM's I/O can't be limited.
    #[error(transparent)]
    Devices(#[from] DevicesError),
}

/// A VM's group; ends with it.
#[derive(Debug)]
pub struct ControlGroup(PathBuf);

impl ControlGroup {
    /// The group of the VM called `name`; none if it asks for nothing. `owner` is a process that lives as
    /// long as the VM; `files` are those of its disks, with the disks' names.
    ///
    /// # Errors
    /// If the host does not let this user make groups, or a disk's I/O can't be limited that is to be.
    pub fn of<'a>(
        name: &str,
        owner: u32,
        spec: &VmSpec,
        files: impl Iterator<Item = (&'a str, BorrowedFd<'a>)>,
    ) -> Result<Option<Self>, ControlGroupError> {
        if spec.cpu_weight.is_none()
            && spec.cpu_limit.is_none()
            && spec.memory_limit.is_none()
            && spec.io_limit.is_none()
        {
            return Ok(None);
        }
        let group = Self::make(name, owner, spec.io_limit.is_some())?;
        group.limit(spec)?;
        if let Some(limit) = &spec.io_limit {
            group.limit_io(limit, files)?;
        }
        Ok(Some(group))
    }

    /// The VM's group that a process of it is in, which a predecessor of this process made; none if it is in
    /// none.
    pub(crate) fn of_process(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        group_of(&text).map(|name| Self(Path::new(ROOT).join(OURS).join(name)))
    }

    /// A group of the VM called `name`, without limits but that of tasks. `owner` is a process that lives as
    /// long as the VM.
    ///
    /// # Errors
    /// If the host does not let this user make groups.
    pub(crate) fn make(name: &str, owner: u32, limits_io: bool) -> Result<Self, ControlGroupError> {
        // Not every kernel has the last.
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
        // By the owner's number, too: other users of this machine's root may have VMs of this name.
        let group = Self(ours.join(format!("{name}.{owner}")));
        make(&group.0)?;
        write(&group.0.join("pids.max"), &TASKS_MAX.to_string())?;
        // A VM whose cards are gone is of no use.
        write(&group.0.join("memory.oom.group"), "1")?;
        Ok(group)
    }

    /// Sets the weight and the limits of CPUs and memory that `spec` asks for, and takes away those that it
    /// does not.
    pub(crate) fn limit(&self, spec: &VmSpec) -> Result<(), ControlGroupError> {
        let most = |bytes: Size| bytes.0.to_string();
        let cpus = |cpus: f64| format!("{:.0} {PERIOD_US:.0}", cpus * PERIOD_US);
        let unlimited = || "max".to_owned();
        let memory = spec.memory_limit.map_or_else(unlimited, most);
        write(&self.0.join("memory.max"), &memory)?;
        let weight = spec.cpu_weight.unwrap_or(WEIGHT_DEFAULT);
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

    /// Puts a process, and all that it starts, into the group. One that has ended needs no group.
    pub fn add(&self, pid: i32) -> Result<(), ControlGroupError> {
        let path = self.0.join("cgroup.procs");
        match put(&path, &pid.to_string()) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(failed(&path, error)),
            _ => Ok(()),
        }
    }

    /// How many processes of the group the kernel has killed because it used more memory than it may.
    pub fn killed_for_memory(&self) -> u64 {
        fs::read_to_string(self.0.join("memory.events")).map_or(0, |events| killed(&events))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        for _ in 0..END_TRIES {
            match fs::remove_dir(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(END_PAUSE),
                _ => return,
            }
        }
    }
}

/// The name of the group of ours that a process is in, by its `/proc` file `cgroup`.
fn group_of(text: &str) -> Option<&str> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let name = path.strip_prefix(OURS)?.strip_prefix('/')?;
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

/// How many processes were killed for memory, by a group's `memory.events`.
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
            // One that still has processes stays.
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

/// Writes to a file that is there: where no cgroup v2 is mounted a new one would limit nothing.
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
