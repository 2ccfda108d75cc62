//! A lab host's first process.
//!
//! It loads the modules, changes to this machine's root, and splits: process 1 only reaps; its child serves
//! connections. If either can't continue, the host powers off, which ends QEMU.

mod kvm;
mod mounts;
mod network;
mod serve;

use std::ffi::CString;
use std::fs::{self, File};
use std::path::Path;

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::boot::BootConfig;
use crate::qemu::SPARE_CPUS;

/// Greatest number of open files that a process on the host may request.
const OPEN_FILES_MAX: u64 = 1 << 20;

/// Reason why a host can't start.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Runs the host; never returns.
pub fn main() -> ! {
    if let Err(error) = start() {
        println!("mirrorball lab: the host can't start: {error}");
    }
    power_off()
}

fn start() -> Result<(), Failure> {
    let boot: BootConfig = serde_json::from_slice(&fs::read("/boot.json")?)?;
    fs::remove_file("/boot.json")?;
    mounts::basic()?;
    // As systemd does, for programs that raise the soft limit.
    setrlimit(Resource::RLIMIT_NOFILE, 1024, OPEN_FILES_MAX)?;
    // Opened before the root changes.
    let modules = boot
        .modules
        .iter()
        .map(Loadable::open)
        .collect::<Result<Vec<_>, _>>()?;
    let (first, rest) = modules.split_at(boot.modules_to_mount.min(modules.len()));
    // With the drivers of the devices on the first CPU alone, for which see the kernel's command line.
    first.iter().try_for_each(Loadable::load)?;
    bring_cpus_online()?;
    leave_spare_cpus()?;
    set_clock(boot.time_s);
    nix::unistd::sethostname(&boot.name)?;
    // Another CPU loads the modules that the root does not need.
    std::thread::scope(|scope| {
        let loader = scope.spawn(|| rest.iter().try_for_each(Loadable::load));
        mounts::change_root(&boot)?;
        network::configure(&boot.cards)?;
        loader.join().map_err(|_| "the module loader failed")?
    })?;
    kvm::open();
    // Kept by both processes below.
    let _keys = kvm::hold_keys();
    // The reaper must stay alone in process 1, or it would take exit statuses from under the agent's feet.
    // SAFETY: the only thread there was has ended, so the child may do anything.
    match unsafe { fork() }? {
        ForkResult::Child => match serve::run(&boot) {
            Ok(()) => Ok(()),
            Err(error) => {
                println!("mirrorball lab: the host can't serve: {error}");
                std::process::exit(1);
            }
        },
        ForkResult::Parent { child } => loop {
            match waitpid(None, None) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) if pid == child => {
                    return Err("the serving process ended".into());
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        },
    }
}

/// A module's open file.
struct Loadable {
    name: String,
    file: File,
    parameters: CString,
}

impl Loadable {
    fn open((name, parameters): &(String, String)) -> Result<Self, Failure> {
        Ok(Self {
            name: name.clone(),
            file: File::open(Path::new("/modules").join(format!("{name}.ko")))?,
            parameters: CString::new(parameters.as_str())?,
        })
    }

    fn load(&self) -> Result<(), Failure> {
        match finit_module(&self.file, &self.parameters, ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST) => Ok(()),
            Err(error) => Err(format!("module {}: {error}", self.name).into()),
        }
    }
}

/// Brings the CPUs online that the kernel was started without.
fn bring_cpus_online() -> Result<(), Failure> {
    for number in 1.. {
        let online = format!("/sys/devices/system/cpu/cpu{number}/online");
        match fs::write(&online, "1") {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
            Err(error) => return Err(format!("{online}: {error}").into()),
        }
    }
    Ok(())
}

/// Keeps this process, and with it every process of this host, off the CPUs that guests break.
fn leave_spare_cpus() -> Result<(), Failure> {
    let mut allowed = sched_getaffinity(Pid::from_raw(0))?;
    for cpu in 0..SPARE_CPUS.into() {
        allowed.unset(cpu)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &allowed)?)
}

/// The emulated clock has whole seconds and may be off: file times must agree with the outer machine's.
fn set_clock(time_s: u64) {
    let Ok(tv_sec) = libc::time_t::try_from(time_s) else {
        return;
    };
    let now = libc::timespec { tv_sec, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec for the whole call.
    unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &now) };
}

fn power_off() -> ! {
    nix::unistd::sync();
    let _ = reboot(RebootMode::RB_POWER_OFF);
    // Only reached without the right to power off: process 1 must not end, or the kernel panics.
    loop {
        std::thread::park();
    }
}
