//! State of the host: processes, descriptors, memory, remains of VMs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::wait;

/// The directory in which the command under test keeps images and overlays.
#[track_caller]
pub fn data_directory() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from);
    set("MIRRORBALL_DATA")
        .or_else(|| set("XDG_DATA_HOME").map(|place| place.join("mirrorball")))
        .or_else(|| set("HOME").map(|home| home.join(".local/share/mirrorball")))
        .expect("HOME is set")
}

/// Whether this host is a lab's, whose CPUs are emulated.
pub fn in_lab() -> bool {
    std::env::var_os("MIRRORBALL_IN_LAB").is_some()
}

/// Whether the host has cgroup v2 with these controllers.
pub fn has_controllers(needed: &[&str]) -> bool {
    let known = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    needed
        .iter()
        .all(|name| known.split_whitespace().any(|known| known == *name))
}

/// The kernel's scanner for equal pages of memory (KSM). Its settings come back when this is dropped.
pub struct PageScanner {
    before: Vec<(&'static str, String)>,
}

impl PageScanner {
    /// File that starts and stops it; absent on a kernel without a scanner.
    pub const RUN: &'static str = "/sys/kernel/mm/ksm/run";
    const PAGES: &'static str = "/sys/kernel/mm/ksm/pages_to_scan";
    const REST: &'static str = "/sys/kernel/mm/ksm/sleep_millisecs";

    /// Stops it.
    #[track_caller]
    pub fn stopped() -> Self {
        let before = [Self::PAGES, Self::REST, Self::RUN]
            .map(|file| (file, fs::read_to_string(file).expect("a kernel with a scanner")));
        let scanner = Self {
            before: before.into(),
        };
        scanner.set(Self::RUN, "0");
        scanner
    }

    /// Starts it, so that it finds equal pages within seconds.
    #[track_caller]
    pub fn start(&self) {
        self.set(Self::PAGES, "10000");
        self.set(Self::REST, "20");
        self.set(Self::RUN, "1");
    }

    #[track_caller]
    fn set(&self, file: &str, value: &str) {
        fs::write(file, value).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
}

impl Drop for PageScanner {
    fn drop(&mut self) {
        for (file, value) in &self.before {
            // The host of a test that ends anyway.
            let _ = fs::write(file, value.trim());
        }
    }
}

/// Running processes of ours: programs named `mirrorball` or `passt`, threads not counted, zombies neither.
pub fn processes() -> BTreeSet<u32> {
    let numbers = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    numbers
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id() && is_ours(*pid))
        .collect()
}

fn is_ours(pid: u32) -> bool {
    let binary = crate::command::binary();
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let program = String::from_utf8_lossy(&line);
    let program = program.split('\0').next().unwrap_or_default();
    let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let same_file = exe == binary || exe.file_name() == binary.file_name();
    is_running(pid) && (same_file || program.starts_with("mirrorball") || name.starts_with("passt"))
}

/// True while the process runs; a zombie does not.
pub fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

/// The parent of a process.
#[track_caller]
pub fn parent(pid: u32) -> u32 {
    parent_of(pid).unwrap_or_else(|| panic!("process {pid} does not run"))
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}

/// Whether a process is a passt.
pub fn is_passt(pid: u32) -> bool {
    describe(pid).contains("passt")
}

/// Whether a process is a card's frame filter.
pub fn is_frame_filter(pid: u32) -> bool {
    describe(pid).contains(" --frame-filter ")
}

/// Whether a process serves a shared folder.
pub fn is_folder_server(pid: u32) -> bool {
    describe(pid).contains(" --folder-server ")
}

/// CPU time that a process has used, in the host's clock ticks.
#[track_caller]
pub fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a running process");
    let after_name = stat.rsplit(')').next().expect("a name in parentheses");
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // User and system time are fields 14 and 15 of the line, whose third follows the name.
    [11, 12]
        .map(|at: usize| fields[at].parse::<u64>().expect("a number"))
        .iter()
        .sum()
}

/// Kills a process with SIGKILL.
#[track_caller]
pub fn kill9(pid: u32) {
    let target = nix::unistd::Pid::from_raw(pid as i32);
    let sent = nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGKILL);
    sent.unwrap_or_else(|error| panic!("kill -9 {pid}: {error}"));
}

/// Stops a process with SIGSTOP, so that it does nothing until it is killed or continued.
#[track_caller]
pub fn stop(pid: u32) {
    let target = nix::unistd::Pid::from_raw(pid as i32);
    let sent = nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGSTOP);
    sent.unwrap_or_else(|error| panic!("kill -STOP {pid}: {error}"));
}

/// Lets a process go on that [`stop`] has stopped.
#[track_caller]
pub fn go_on(pid: u32) {
    let target = nix::unistd::Pid::from_raw(pid as i32);
    let sent = nix::sys::signal::kill(target, nix::sys::signal::Signal::SIGCONT);
    sent.unwrap_or_else(|error| panic!("kill -CONT {pid}: {error}"));
}

/// Waits until these processes are gone.
#[track_caller]
pub fn wait_gone(pids: &[u32], limit: Duration) {
    let gone = wait::within(limit, || pids.iter().all(|pid| !is_running(*pid)).then_some(()));
    let left: Vec<String> = pids
        .iter()
        .filter(|pid| is_running(**pid))
        .map(|pid| describe(*pid))
        .collect();
    assert!(gone.is_some(), "still running {limit:?} later: {left:?}");
}

/// A process for messages: number and command line.
pub fn describe(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    format!("{pid}: {}", String::from_utf8_lossy(&line).replace('\0', " "))
}

/// Memory that only this process uses, plus its share of common memory, in bytes; shared memory in memfds
/// included.
#[track_caller]
pub fn proportional_bytes(pid: u32) -> u64 {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    kib_field(&text, "Pss:").unwrap_or_else(|| panic!("no Pss in {path}:\n{text}"))
}

/// The host's shared memory (tmpfs and memfds), in bytes: the real memory of its guests.
pub fn shared_bytes() -> u64 {
    meminfo("Shmem:")
}

/// The host's NUMA nodes that have memory.
pub fn nodes() -> Vec<u32> {
    let folder = fs::read_dir("/sys/devices/system/node")
        .expect("a kernel with nodes")
        .flatten();
    let numbered = folder.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok());
    let has_memory = |node: &u32| {
        let path = format!("/sys/devices/system/node/node{node}/meminfo");
        let meminfo = fs::read_to_string(path).unwrap_or_default();
        !meminfo.contains("MemTotal:              0 kB")
    };
    let mut nodes: Vec<u32> = numbered.filter(has_memory).collect();
    nodes.sort_unstable();
    nodes
}

/// Memory of the host, in bytes.
pub fn total_bytes() -> u64 {
    meminfo("MemTotal:")
}

/// Memory that the host could still give to programs, in bytes.
pub fn available_bytes() -> u64 {
    meminfo("MemAvailable:")
}

fn meminfo(field: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").expect("/proc is mounted");
    kib_field(&text, field).unwrap_or_else(|| panic!("no {field} in /proc/meminfo"))
}

fn kib_field(text: &str, field: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = rest.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

/// Open descriptors of a process.
#[track_caller]
pub fn descriptors(pid: u32) -> usize {
    let path = format!("/proc/{pid}/fd");
    fs::read_dir(&path)
        .unwrap_or_else(|error| panic!("{path}: {error}"))
        .count()
}

/// Threads of a process.
#[track_caller]
pub fn threads(pid: u32) -> usize {
    let path = format!("/proc/{pid}/task");
    fs::read_dir(&path)
        .unwrap_or_else(|error| panic!("{path}: {error}"))
        .count()
}

/// All traces that a VM could leave on the host.
#[derive(Debug)]
pub struct Traces {
    processes: BTreeSet<u32>,
    files: BTreeSet<String>,
    sockets: BTreeSet<String>,
    interfaces: BTreeSet<String>,
    mounts: usize,
}

impl Traces {
    /// Records the present state.
    pub fn now() -> Self {
        let mut files = BTreeSet::new();
        for place in runtime_places() {
            list(Path::new(&place), 0, &mut files);
        }
        // The registry's own files stay, and measurements of the host; a VM's do not.
        const KEPT: [&str; 11] = [
            "/mirrorball",
            "/vms",
            "/vms/.cid",
            "/vms/.lock",
            "/vms/.mirrorball",
            "/events",
            "/events/current",
            "/events/lock",
            "/events/previous",
            "/measured.facts",
            "/measuring.lock",
        ];
        files.retain(|name| !KEPT.iter().any(|own| name.ends_with(own)));
        let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let sockets = sockets.lines().filter_map(|line| line.split_whitespace().nth(7));
        let interfaces = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
        let mounts = fs::read_to_string("/proc/self/mounts")
            .unwrap_or_default()
            .lines()
            .count();
        Self {
            processes: processes(),
            files,
            sockets: sockets
                .filter(|name| name.contains("mb-") || name.contains("mirrorball"))
                .map(String::from)
                .collect(),
            interfaces: interfaces
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect(),
            mounts,
        }
    }

    /// Whether nothing is new since `before`; other programs' remains may have gone since.
    fn within(&self, before: &Self) -> bool {
        self.processes.is_subset(&before.processes)
            && self.files.is_subset(&before.files)
            && self.sockets.is_subset(&before.sockets)
            && self.interfaces.is_subset(&before.interfaces)
            && self.mounts <= before.mounts
    }

    /// Panics with the list of new traces, unless there is none at once or within 5 s: a process that should
    /// end may need a moment.
    #[track_caller]
    pub fn expect_unchanged(&self, after: &str) {
        let same = wait::within(Duration::from_secs(5), || Self::now().within(self).then_some(()));
        if same.is_some() {
            return;
        }
        let now = Self::now();
        let left: Vec<String> = now
            .processes
            .difference(&self.processes)
            .map(|pid| describe(*pid))
            .collect();
        let files: Vec<_> = now.files.difference(&self.files).collect();
        let sockets: Vec<_> = now.sockets.difference(&self.sockets).collect();
        let interfaces: Vec<_> = now.interfaces.difference(&self.interfaces).collect();
        panic!(
            "left behind after {after}:\n  processes {left:?}\n  files {files:?}\n  sockets {sockets:?}\n  \
             interfaces {interfaces:?}\n  mounts {} (before {})",
            now.mounts, self.mounts
        );
    }
}

/// Directories in which programs keep files that should not outlive them.
fn runtime_places() -> Vec<String> {
    let mut places: Vec<String> = ["/run", "/tmp", "/dev/shm", "/var/tmp"]
        .map(String::from)
        .to_vec();
    places.extend(std::env::var("XDG_RUNTIME_DIR"));
    places.extend(std::env::var("TMPDIR"));
    places
}

/// Adds names of files, not deep: a VM's own directory may be two levels down. Other programs' are left out.
fn list(place: &Path, depth: u32, into: &mut BTreeSet<String>) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.to_string_lossy().into_owned();
        let ours = depth > 0
            || ["mirrorball", "mb-", "passt"]
                .iter()
                .any(|word| name.contains(word));
        let test = name.contains("guest-tests");
        if !ours || test {
            continue;
        }
        if depth < 3 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&path, depth + 1, into);
        }
        into.insert(name);
    }
}

/// Number of open descriptors of all processes that this one may look at. (The kernel's own count, `file-nr`,
/// moves in steps of 32 for each CPU.)
pub fn open_descriptors() -> usize {
    let processes = fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let descriptors = processes.filter_map(|process| fs::read_dir(process.path().join("fd")).ok());
    descriptors.map(Iterator::count).sum()
}
