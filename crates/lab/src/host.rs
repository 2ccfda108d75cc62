//! The hosts of a running lab: QEMU processes that end with the thread that started them.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use config::lab::{HostSpec, LabSpec};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::boot::{BootConfig, NetworkCard, READY, TOKEN_BYTES};
use crate::error::{Context, LabError};
use crate::kernel::{self, Kernel};
use crate::links::{self, Links};
use crate::module::{self, Module};
use crate::qemu::{self, Machine};
use crate::registry::Claim;
use crate::session::HostAccess;
use crate::{clock, initramfs, qmp, registry};

/// Time limit for a host to be up; measured 5 s on 2 idle cores.
const UP_MAX: Duration = Duration::from_secs(60);
/// Maximum number of restarts of a lab in which a host hangs or dies before it is up. Emulated hosts
/// sometimes hang there, and no program has run in them yet.
const FALSE_STARTS_MAX: usize = 1;
/// Lines of the console that go with the error of a host that hangs.
const HANG_LINES: usize = 60;

/// A running lab. Its hosts are killed when it is dropped, or when its thread or process dies.
pub struct Lab {
    /// In the order of the spec.
    pub hosts: Vec<Host>,
    /// The networks between them.
    pub links: Links,
    /// Why the lab had to start again, each time.
    pub false_starts: Vec<String>,
    directory: PathBuf,
    /// Consoles are kept for a person to read.
    keep: bool,
}

/// A running host.
pub struct Host {
    /// Name in the lab's file, and the host's own host name.
    pub name: String,
    /// Port and token with which the host accepts connections.
    pub access: HostAccess,
    console: PathBuf,
    child: Child,
    /// With the spare one.
    cpus: u16,
    /// QEMU ends nothing when it closes, but complains.
    monitor: UnixStream,
}

impl Lab {
    /// Starts every host of `spec` and waits until all are up. Consoles go to the directory of `claim`.
    ///
    /// Call it from a thread that lives as long as the lab: the hosts die with it.
    pub fn start(spec: &LabSpec, claim: &Claim) -> Result<Self, LabError> {
        let mut false_starts = Vec::new();
        loop {
            match Self::start_once(spec, &claim.directory) {
                Ok(mut lab) => {
                    lab.false_starts = false_starts;
                    return Ok(lab);
                }
                Err(error) => {
                    let why = match &error {
                        LabError::NotUp { host, limit, .. } => {
                            format!("host {host} was not up after {limit:?}")
                        }
                        LabError::Died { host, status, .. } => {
                            format!("host {host} ended by itself ({status})")
                        }
                        _ => return Err(error),
                    };
                    if false_starts.len() == FALSE_STARTS_MAX {
                        return Err(error);
                    }
                    let kept = claim.set_aside(&error.chain())?;
                    false_starts.push(format!(
                        "{why}; the lab starts again (console: {})",
                        kept.display()
                    ));
                }
            }
        }
    }

    fn start_once(spec: &LabSpec, directory: &Path) -> Result<Self, LabError> {
        if std::env::var_os(crate::IN_LAB_VARIABLE).is_some() {
            return Err(LabError::InLab);
        }
        let common = Common::find()?;
        let shared = spec
            .shared
            .iter()
            .map(|shared| {
                let what = || "could not make shared memory".to_string();
                let file = File::from(memfd_create(c"lab-shared", MFdFlags::MFD_CLOEXEC).context(what)?);
                file.set_len(shared.size.0).context(what)?;
                Ok(file)
            })
            .collect::<Result<Vec<File>, LabError>>()?;
        let (links, mut sockets) = Links::start(spec)?;
        let mut lab = Self {
            hosts: Vec::new(),
            links,
            false_starts: Vec::new(),
            directory: directory.to_path_buf(),
            keep: false,
        };
        for (index, host) in spec.hosts.iter().enumerate() {
            let links = std::mem::take(&mut sockets[index]);
            let memory: Vec<(RawFd, u64)> = spec
                .shared
                .iter()
                .zip(&shared)
                .filter(|(shared, _)| shared.hosts.contains(&host.name))
                .map(|(shared, file)| (file.as_raw_fd(), shared.size.0))
                .collect();
            let started = Host::start(spec, host, &common, links, &memory, directory);
            lab.hosts.push(started.inspect_err(|_| lab.keep = true)?);
        }
        let deadline = Instant::now() + UP_MAX;
        for index in 0..lab.hosts.len() {
            if let Err(error) = lab.hosts[index].wait_up(deadline) {
                lab.keep = true;
                lab.hosts[index].keep_registers();
                return Err(error);
            }
        }
        Ok(lab)
    }

    /// The first host that has ended, as an error; the lab's consoles are then kept.
    pub fn died(&mut self) -> Option<LabError> {
        let error = self.hosts.iter_mut().find_map(Host::died)?;
        self.keep = true;
        Some(error)
    }

    /// The error of a host that does not answer.
    pub fn silent(&mut self, index: usize, limit: Duration) -> LabError {
        self.keep = true;
        // The host at fault may be another one than that which does not answer.
        self.hosts.iter().for_each(Host::keep_registers);
        let host = &self.hosts[index];
        host.tell();
        LabError::Silent {
            limit,
            host: host.name.clone(),
            console: host.console.clone(),
            tail: last_lines(&host.console, HANG_LINES),
        }
    }

    /// The error of a run that took too long.
    pub fn time_limit(&mut self, limit: Duration) -> LabError {
        self.keep = true;
        let host = &self.hosts[0];
        host.tell();
        LabError::TimeLimit {
            limit,
            host: host.name.clone(),
            console: host.console.clone(),
            tail: last_lines(&host.console, HANG_LINES),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            let _ = host.child.kill();
            let _ = host.child.wait();
        }
        if !self.keep {
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Files and settings that all hosts of a lab share.
struct Common {
    kernel: Kernel,
    modules: Vec<Module>,
    tsc_khz: u64,
}

impl Common {
    fn find() -> Result<Self, LabError> {
        let kernel = kernel::find(&registry::cache()?)?;
        Ok(Self {
            modules: module::in_order(&kernel.modules)?,
            kernel,
            tsc_khz: clock::tsc_khz(),
        })
    }
}

impl Host {
    fn start(
        lab: &LabSpec,
        spec: &HostSpec,
        common: &Common,
        links: Vec<(NetworkCard, OwnedFd)>,
        shared: &[(RawFd, u64)],
        directory: &Path,
    ) -> Result<Self, LabError> {
        let what = || format!("could not start lab host {}", spec.name);
        let mut token = [0; TOKEN_BYTES];
        File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut token))
            .context(what)?;
        let boot = boot_config(lab, spec, common, &links, token);
        let initramfs = initramfs::build(&common.modules, &boot)?;
        let (monitor, theirs) = UnixStream::pair().context(what)?;
        let console = directory.join(format!("{}.console", spec.name));
        let cards: Vec<(NetworkCard, RawFd)> = links
            .iter()
            .map(|(card, fd)| (card.clone(), fd.as_raw_fd()))
            .collect();
        let machine = Machine {
            spec,
            cpus: cpus(spec),
            memory_bytes: memory_bytes(spec, lab.hosts.len()),
            tsc_khz: common.tsc_khz,
            kernel: &common.kernel,
            initramfs: initramfs.as_raw_fd(),
            monitor: theirs.as_raw_fd(),
            console: &console,
            links: &cards,
            shared,
        };
        let mut inherited = vec![initramfs.as_raw_fd(), theirs.as_raw_fd()];
        inherited.extend(cards.iter().map(|(_, fd)| *fd));
        inherited.extend(shared.iter().map(|(fd, _)| *fd));
        let log = directory.join(format!("{}.qemu", spec.name));
        let output = File::create(&log).context(what)?;
        let child = spawn_qemu(&machine, inherited, output).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => LabError::NoQemu,
            _ => LabError::Io { what: what(), source },
        })?;
        drop(theirs);
        let mut host = Self {
            name: spec.name.clone(),
            access: HostAccess { port: 0, token },
            console,
            child,
            cpus: qemu::SPARE_CPUS + cpus(spec),
            monitor,
        };
        match qmp::forwarded_port(&host.monitor, crate::boot::PORT) {
            Ok(port) => host.access.port = port,
            Err(error) => return Err(qemu_failure(&spec.name, log, &error)),
        }
        Ok(host)
    }

    fn wait_up(&mut self, deadline: Instant) -> Result<(), LabError> {
        loop {
            if fs::read(&self.console).is_ok_and(|text| contains(&text, READY.as_bytes())) {
                return Ok(());
            }
            if let Some(error) = self.died() {
                return Err(error);
            }
            if Instant::now() > deadline {
                return Err(LabError::NotUp {
                    host: self.name.clone(),
                    limit: UP_MAX,
                    console: self.console.clone(),
                    tail: tail(&self.console),
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes the host print the state of its CPUs and stuck tasks on its console, if it still can.
    fn tell(&self) {
        if self.access.tell().is_ok() {
            // The console is a slow one.
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Writes the registers of its CPUs to a file beside its console.
    fn keep_registers(&self) {
        let text = qmp::registers(&self.monitor, self.cpus).unwrap_or_else(|error| error.chain());
        // An error here must not hide the silence itself.
        let _ = fs::write(self.console.with_extension("registers"), text);
    }

    fn died(&mut self) -> Option<LabError> {
        let status = self.child.try_wait().ok()??;
        Some(LabError::Died {
            host: self.name.clone(),
            status: status.to_string(),
            console: self.console.clone(),
            tail: tail(&self.console),
        })
    }
}

/// The configuration that a host's first process reads.
fn boot_config(
    lab: &LabSpec,
    spec: &HostSpec,
    common: &Common,
    links: &[(NetworkCard, OwnedFd)],
    token: [u8; TOKEN_BYTES],
) -> BootConfig {
    let out = NetworkCard {
        mac: qemu::OUT_MAC.into(),
        address: Ipv4Addr::new(10, 0, 2, 15),
        gateway: Some(Ipv4Addr::new(10, 0, 2, 2)),
    };
    BootConfig {
        name: spec.name.clone(),
        token,
        modules: common
            .modules
            .iter()
            .map(|module| (module.name.clone(), module.parameters.clone()))
            .collect(),
        modules_to_mount: module::count_to_mount(&common.modules),
        cards: std::iter::once(out)
            .chain(links.iter().map(|(card, _)| card.clone()))
            .collect(),
        names: links::names(lab),
        cached: registry::images()
            .into_iter()
            .filter(|path| path.is_dir())
            .collect(),
        time_s: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.as_secs()),
    }
}

/// Starts QEMU in a process group of its own, with `inherited` descriptors. It ends with this process.
fn spawn_qemu(machine: &Machine<'_>, inherited: Vec<RawFd>, output: File) -> io::Result<Child> {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(qemu::arguments(machine))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(output);
    // Ctrl-C is for the program in the lab.
    command.process_group(0);
    let parent = std::process::id();
    // SAFETY: prctl, getppid and fcntl are async-signal-safe; the descriptors are open until after the
    // spawn.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid().cast_unsigned() != parent {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            for fd in &inherited {
                libc::fcntl(*fd, libc::F_SETFD, 0);
            }
            Ok(())
        });
    }
    command.spawn()
}

/// The error of a QEMU that does not answer: the last line that it wrote to `log`.
fn qemu_failure(host: &str, log: PathBuf, error: &impl fmt::Display) -> LabError {
    // Its output precedes its end.
    std::thread::sleep(Duration::from_millis(100));
    let words = fs::read_to_string(&log).unwrap_or_default();
    let last = words.lines().rfind(|line| !line.contains("TCG doesn't support"));
    LabError::Qemu {
        host: host.to_owned(),
        reason: last.map_or_else(|| error.to_string(), str::to_string),
        log,
    }
}

fn cpus(spec: &HostSpec) -> u16 {
    let nodes: u16 = spec.nodes.iter().map(|node| node.cpus).sum();
    let here =
        std::thread::available_parallelism().map_or(1, |count| u16::try_from(count.get()).unwrap_or(255));
    match (spec.cpus, nodes) {
        (Some(cpus), _) => cpus,
        (None, 0) => here.clamp(1, 64),
        (None, nodes) => nodes,
    }
}

/// Returns three quarters of the available memory, divided among the hosts, at most 64 GiB: QEMU uses only
/// what the host touches.
fn memory_bytes(spec: &HostSpec, hosts: usize) -> u64 {
    let nodes: u64 = spec.nodes.iter().map(|node| node.memory.0).sum();
    if let Some(memory) = spec.memory {
        return memory.0;
    }
    if nodes > 0 {
        return nodes;
    }
    let available_kib = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text
                .lines()
                .find(|line| line.starts_with("MemAvailable:"))?
                .to_string();
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .unwrap_or(4 << 20);
    let share = available_kib * 1024 / 4 * 3 / hosts.max(1) as u64;
    share.clamp(1 << 30, 64 << 30) >> 21 << 21
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|window| window == word)
}

/// The last lines of a console, each after a line break.
fn tail(console: &Path) -> String {
    last_lines(console, 12)
}

fn last_lines(console: &Path, count: usize) -> String {
    let text = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(count)..]
        .iter()
        .map(|line| format!("\n    {}", line.trim_end().escape_debug()))
        .collect()
}
