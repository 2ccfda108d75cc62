//! The shard's process, from the first message of its monitor to the last report.
//!
//! Order matters: receive the spec and the files; make the machine and every device; close the sandbox before
//! any thread serves the guest; start the threads; report; seal the first thread; run the vCPUs; wait.

mod control;
mod freeze;
mod hold;
mod log;
mod open;
pub(crate) mod order_reader;
mod orders;
mod secondary;
mod status;
mod vcpus;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};

use kvm_ioctls::Kvm;
use nix::sys::signal::{SigHandler, Signal, signal};
use shard_api::control::ControlSocket;
use tracing::error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::layout::{
    ECAM_BYTES, ECAM_START, Layout, MMIO32_BYTES, MMIO32_START, PCI_CONFIG_PORT, PCI_CONFIG_PORTS,
};
use crate::bus::Overlap;
use crate::chain::chain;
use crate::devices::{self, DeviceFiles, DevicesError};
use crate::interrupt::Interrupts;
use crate::kick;
use crate::kind::{ResumedSpan, VmKind};
use crate::launch::{Ending, Fd, Launch, LaunchSpec, Report};
use crate::machine::{self, BootFiles, Machine, MachineError, Ready};
use crate::memory::nodes::MemoryNodes;
use crate::pci::PciBus;
use crate::sandbox::{self, SandboxError, ThreadKind};
use crate::serial;
use crate::sharing::{Background, Sharing};
use control::{Control, ReportedDisks};
use freeze::Freezer;
use orders::Orders;
pub use shard_api::message::{FILES_MAX, Files, ReceiveError, receive, receive_by, send};
pub use shard_api::version::{LaunchError, VERSIONS, receive_launch};
use vcpus::VcpuThreads;

/// Reason why a shard could not start.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The first message is invalid.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A file of the first message is missing.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The kind of VM is contradictory.
    #[error(transparent)]
    Kind(#[from] ResumedSpan),
    /// The machine can't be created.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A device can't be created.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The sandbox can't be closed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The host refused a resource of the process itself.
    #[error("the shard's process cannot start")]
    Host(#[from] io::Error),
}

/// Runs the VM whose spec arrives over `control`. Returns once the VM has ended and the end was reported to
/// the monitor. The exit status reports the end, too ([`Ending::exit_status`]).
pub fn run(control: &ControlSocket) -> ExitCode {
    allow_huge_pages();
    ignore_file_limit();
    let launch = receive_launch(control);
    if let Err(LaunchError::VersionMismatch(error)) = &launch {
        error!("{error}");
        // The log receives the error, too.
        let versions = VERSIONS;
        let _ = control.send(&Report::Unlike { versions }, &[]);
        return ExitCode::FAILURE;
    }
    let ended = launch
        .map_err(ProcessError::from)
        .and_then(|(launch, files)| match launch {
            Launch::Vm(spec) => start(control, *spec, files).map(Control::wait),
            Launch::Secondary(launch) => {
                secondary::start(control, *launch, files).map(secondary::SecondaryShard::wait)
            }
        });
    let ending = ended.unwrap_or_else(|error| Ending::ShardFailed {
        detail: chain(&error),
    });
    let status = ending.exit_status();
    // The monitor may be gone; then there is no receiver.
    let _ = control.send(&Report::Ended(ending), &[]);
    ExitCode::from(status)
}

/// Allows huge pages for guest memory. The command forbids them for itself and the processes that it starts.
fn allow_huge_pages() {
    // SAFETY: clears a flag of this process's memory.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0) };
}

/// Makes a write beyond the file size limit of this process fail, instead of ending the process.
fn ignore_file_limit() {
    // SAFETY: no handler is installed.
    let _ = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
}

fn start(control: &ControlSocket, spec: LaunchSpec, mut files: Files) -> Result<Control, ProcessError> {
    let kvm = kvm_of(spec.kvm, &mut files)?;
    let boot = BootFiles {
        kernel: files.take(spec.kernel)?,
        initrd: spec.initrd.map(|fd| files.take(fd)).transpose()?,
    };
    let console_socket = files.take(spec.console)?;
    set_nonblocking(&console_socket)?;
    kick::catch()?;
    // The file of standard error, which receives the log of this process.
    drop(files.take(spec.log)?);
    let log = log::of_devices();
    let device_files = DeviceFiles::take(&spec, &mut files)?;
    let handover = UnixStream::from(OwnedFd::from(files.take(spec.handover)?));
    let pmem_bytes = device_files.pmem_bytes(&spec)?;
    let layout = Layout::new(spec.memory.bytes, &pmem_bytes).ok_or(MachineError::Layout)?;
    machine::check_kvm(&kvm, spec.vcpus)?;
    let (kind, memory) = open::vm(&spec, &layout, &mut files)?;
    // Further files of the message are closed.
    drop(files);
    let (images, mut shares): (Vec<_>, Vec<_>) = device_files.images(&spec)?.into_iter().unzip();
    let disk_images = images.len();
    let overlays = device_files.overlays()?;
    let (mut machine, kind) = Machine::build(&kvm, &spec, boot, layout, memory, images, kind)?;
    let bus = PciBus::new(machine.layout.mmio64.clone());
    claim_windows(&mut machine, &bus).map_err(MachineError::from)?;

    let background = match kind.sharing() {
        Some(Sharing { mapper, pressure }) if !mapper.images().is_empty() => {
            // Kernel and initramfs follow the disks.
            shares.resize(mapper.images().len(), spec.share_boot);
            Some(Background::open(mapper.clone(), pressure.clone(), shares))
        }
        _ => None,
    };

    // The sandbox is closed here and nowhere else: every file is open, and no thread serves the guest yet.
    let closed = sandbox::close(spec.sandbox.clone())?;

    let threads = closed.threads;
    let kind = machine.serve_memory(kind, &spec, &threads)?;
    let interrupts = Interrupts::new(machine.wiring.clone());
    let parts = devices::DeviceContext {
        machine: &machine,
        kind: &kind,
        threads: &threads,
        bus: &bus,
        interrupts: &interrupts,
        log: &log,
    };
    let mut built = devices::build(&spec, device_files, &parts)?;
    if let Some(sharing) = kind.sharing() {
        for file in sharing.mapper.images().iter().skip(disk_images) {
            built.watch.watch_file("kernel", file.as_fd())?;
        }
    }
    let Ready {
        vcpus,
        running,
        functions,
        kind,
    } = machine.into_vcpus(spec.vcpus, kind)?;
    if let Some(functions) = functions {
        bus.restore(&functions)?;
    }
    let stop_console = EventFd::new(EFD_NONBLOCK)?;
    let (console, stop) = (running.console.clone(), stop_console.try_clone()?);
    let console_thread = threads.spawn(ThreadKind::Serial, "console", move || {
        serial::pump(&console, console_socket, &stop)
    })?;
    let (ports, mmio) = (running.ports.clone(), running.mmio.clone());
    let kind = kind.try_map_span(|home| home.start(&threads, &running.end, ports, mmio))?;
    if let VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) = &kind {
        let router = router.clone();
        threads.quiescer().set_waker(move || router.wake_waiters());
    }
    let vcpus = VcpuThreads::start(&threads, vcpus)?;
    let running_report = Report::Running {
        sandbox_missing: closed.missing,
        sandbox_notes: closed.notes,
        versions: VERSIONS,
    };
    control.send(&running_report, &[])?;
    let orders = Orders::start(control, &threads)?;
    let (stop_sharing, stopped) = mpsc::channel();
    if let Some(background) = background {
        let quiescer = threads.quiescer().clone();
        threads.spawn(ThreadKind::Sharing, "sharing", move || {
            background.run(&quiescer, &stopped)
        })?;
    }
    threads.seal_first()?;
    Ok(Control {
        orders,
        running,
        vcpus,
        quiescer: threads.quiescer().clone(),
        freezer: Freezer {
            socket: handover,
            overlays,
            nodes: MemoryNodes::new(&spec.memory, &spec.nodes),
            full: built.full.clone(),
        },
        bus,
        balloon: built.balloon,
        watch: built.watch,
        full: ReportedDisks::new(built.full),
        _stop_sharing: stop_sharing,
        console_thread,
        stop_console,
        kind,
    })
}

/// Claims all address ranges of the bus.
fn claim_windows(machine: &mut Machine, bus: &PciBus) -> Result<(), Overlap> {
    let (port, ports) = (u64::from(PCI_CONFIG_PORT), u64::from(PCI_CONFIG_PORTS));
    machine
        .ports
        .claim(port..port + ports, Arc::new(bus.config_ports()))?;
    machine
        .mmio
        .claim(ECAM_START..ECAM_START + ECAM_BYTES, Arc::new(bus.ecam()))?;
    let low = MMIO32_START..MMIO32_START + MMIO32_BYTES;
    machine.mmio.claim(low, Arc::new(bus.window_at(MMIO32_START)))?;
    machine
        .mmio
        .claim(machine.layout.mmio64.clone(), Arc::new(bus.window()))
}

fn kvm_of(kvm: Fd, files: &mut Files) -> Result<Kvm, ProcessError> {
    use std::os::fd::FromRawFd;
    let file = files.take(kvm)?;
    // SAFETY: the descriptor is open and ours alone. That it is KVM shows at the first call.
    Ok(unsafe { Kvm::from_raw_fd(file.into_raw_fd()) })
}

fn set_nonblocking(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use urpc::version::Versions;

    use super::*;

    /// Returns the exit code of a shard that is launched by `message`, and all its reports.
    fn launched(message: &Value) -> (ExitCode, Vec<Value>) {
        let (monitor, control) = ControlSocket::pair().unwrap();
        monitor.send(message, &[]).unwrap();
        let code = run(&control);
        drop(control);
        let mut reports = Vec::new();
        while let Ok((report, _)) = monitor.receive_with_files() {
            reports.push(serde_json::from_slice(&report).unwrap());
        }
        (code, reports)
    }

    /// Promise HOSTILE-08.
    #[test]
    fn launch_of_an_unlike_version_is_answered_with_ours_and_nothing_else() {
        let theirs = Versions::up_to(VERSIONS.newest + 2);
        let launch = json!({ "versions": theirs, "launch": [] });
        let (code, reports) = launched(&launch);
        assert_eq!(code, ExitCode::FAILURE);
        assert_eq!(reports, [json!({ "unlike": { "versions": VERSIONS } })]);
    }

    /// Promise HOSTILE-43.
    #[test]
    fn shard_that_cannot_start_reports_the_reason_and_exits_with_the_status_of_a_failure() {
        let (code, reports) = launched(&json!({ "versions": VERSIONS, "launch": [] }));
        assert_eq!(code, ExitCode::from(73));
        assert_eq!(reports.len(), 1);
        assert_eq!(reports[0]["ended"]["how"], "shard-failed");
    }
}
