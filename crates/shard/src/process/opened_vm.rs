//! A VM between its launch message and its threads: its files are open, and its machine exists.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use shard_api::control::ControlSocket;
use shard_api::version::VERSIONS;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::control::{Control, ReportedDisks};
use super::freeze::Freezer;
use super::orders::Orders;
use super::vcpus::VcpuThreads;
use super::{Files, ProcessError, kvm_of, log, open};
use crate::arch::x86_64::layout::{
    ECAM_BYTES, ECAM_START, Layout, MMIO32_BYTES, MMIO32_START, PCI_CONFIG_PORT, PCI_CONFIG_PORTS,
};
use crate::bus::Overlap;
use crate::devices::{self, BuiltDevices, DeviceContext, DeviceFiles};
use crate::interrupt::Interrupts;
use crate::kick;
use crate::kind::{BuiltKind, VmKind};
use crate::launch::{LaunchSpec, Report};
use crate::machine::{self, BootFiles, Machine, MachineError, Ready};
use crate::memory::nodes::MemoryNodes;
use crate::pci::PciBus;
use crate::sandbox::{Closed, ThreadKind, Threads};
use crate::serial::{self, Console};
use crate::sharing::{Background, Sharing};
use crate::virtio::transport::Log;

/// A VM whose files are open and whose machine exists. None of its threads runs, and the sandbox is open.
pub struct OpenedVm {
    machine: Machine,
    kind: BuiltKind,
    bus: PciBus,
    /// Writes the devices' warnings into the log of the process.
    log: Log,
    device_files: DeviceFiles,
    /// Number of images that are disks; kernel and initramfs follow them.
    disk_images: usize,
    /// The temporary overlay of each disk that has one.
    overlays: Vec<Option<File>>,
    console_socket: File,
    /// Socket by which the monitor freezes the VM.
    handover: UnixStream,
    /// Sharing in the background; none without images to share.
    background: Option<Background>,
}

impl OpenedVm {
    /// Takes the files of `spec`, and makes the machine. Further files of the message are closed.
    pub fn open(spec: &LaunchSpec, mut files: Files) -> Result<Self, ProcessError> {
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
        let device_files = DeviceFiles::take(spec, &mut files)?;
        let handover = UnixStream::from(OwnedFd::from(files.take(spec.handover)?));
        let pmem_bytes = device_files.pmem_bytes(spec)?;
        let layout = Layout::new(spec.memory.bytes, &pmem_bytes).ok_or(MachineError::Layout)?;
        machine::check_kvm(&kvm, spec.vcpus)?;
        let (kind, memory) = open::vm(spec, &layout, &mut files)?;
        drop(files);
        let (images, mut shares): (Vec<_>, Vec<_>) = device_files.images(spec)?.into_iter().unzip();
        let disk_images = images.len();
        let overlays = device_files.overlays()?;
        let (mut machine, kind) = Machine::build(&kvm, spec, boot, layout, memory, images, kind)?;
        let bus = PciBus::new(machine.layout.mmio64.clone());
        claim_windows(&mut machine, &bus).map_err(MachineError::from)?;
        let shares_folders = spec.folders.iter().any(|folder| folder.share);
        let background = match kind.sharing() {
            Some(Sharing { mapper, pressure }) if !mapper.images().is_empty() || shares_folders => {
                shares.resize(mapper.images().len(), spec.share_boot);
                Some(Background::open(mapper.clone(), pressure.clone(), shares))
            }
            _ => None,
        };
        Ok(Self {
            machine,
            kind,
            bus,
            log: log::of_devices(),
            device_files,
            disk_images,
            overlays,
            console_socket,
            handover,
            background,
        })
    }

    /// Starts all threads in the closed sandbox, reports that to the monitor, and seals the first thread.
    pub fn start(
        self,
        control: &ControlSocket,
        spec: &LaunchSpec,
        closed: Closed,
    ) -> Result<Control, ProcessError> {
        let Closed {
            threads,
            missing,
            notes,
        } = closed;
        let (mut machine, bus) = (self.machine, self.bus);
        let kind = machine.serve_memory(self.kind, spec, &threads)?;
        let context = DeviceContext {
            machine: &machine,
            kind: &kind,
            threads: &threads,
            bus: &bus,
            interrupts: &Interrupts::new(machine.wiring.clone()),
            log: &self.log,
        };
        let built = build_devices(spec, self.device_files, self.disk_images, &context)?;
        let Ready {
            vcpus,
            running,
            functions,
            kind,
        } = machine.into_vcpus(spec.vcpus, kind)?;
        if let Some(functions) = functions {
            bus.restore(&functions)?;
        }
        let (console_thread, stop_console) = start_console(&threads, &running.console, self.console_socket)?;
        let (ports, mmio) = (running.ports.clone(), running.mmio.clone());
        let kind = kind.try_map_span(|home| home.start(&threads, &running.end, ports, mmio))?;
        if let VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) = &kind {
            let router = router.clone();
            threads.quiescer().set_waker(move || router.wake_waiters());
        }
        let vcpus = VcpuThreads::start(&threads, vcpus)?;
        let report = Report::Running {
            sandbox_missing: missing,
            sandbox_notes: notes,
            versions: VERSIONS,
        };
        control.send(&report, &[])?;
        let orders = Orders::start(control, &threads)?;
        let stop_sharing = start_sharing(&threads, self.background)?;
        threads.seal_first()?;
        Ok(Control {
            orders,
            running,
            vcpus,
            quiescer: threads.quiescer().clone(),
            freezer: Freezer {
                socket: self.handover,
                overlays: self.overlays,
                nodes: MemoryNodes::new(&spec.memory, &spec.nodes),
                full: built.full.clone(),
            },
            bus,
            balloon: built.balloon,
            watch: built.watch,
            full: ReportedDisks::new(built.full),
            limiters: built.limiters,
            _stop_sharing: stop_sharing,
            console_thread,
            stop_console,
            kind,
        })
    }
}

/// Makes the devices, and has changes of shared kernels and initramfs noticed as those of disks: they follow
/// the first `disk_images` images.
fn build_devices(
    spec: &LaunchSpec,
    files: DeviceFiles,
    disk_images: usize,
    context: &DeviceContext<'_>,
) -> Result<BuiltDevices, ProcessError> {
    let mut built = devices::build(spec, files, context)?;
    if let Some(sharing) = context.kind.sharing() {
        for file in sharing.mapper.images().iter().skip(disk_images) {
            built.watch.watch_file("kernel", file.as_fd())?;
        }
    }
    Ok(built)
}

/// Starts the thread that moves bytes between the console and its socket; an event of the returned file ends
/// it.
fn start_console(
    threads: &Threads,
    console: &Arc<Console>,
    socket: File,
) -> Result<(JoinHandle<()>, EventFd), ProcessError> {
    let stop_console = EventFd::new(EFD_NONBLOCK)?;
    let (console, stop) = (console.clone(), stop_console.try_clone()?);
    let thread = threads.spawn(ThreadKind::Serial, "console", move || {
        serial::pump(&console, socket, &stop)
    })?;
    Ok((thread, stop_console))
}

/// Starts the background thread of sharing, if there is anything to share. It ends when the result is
/// dropped.
fn start_sharing(threads: &Threads, background: Option<Background>) -> io::Result<mpsc::Sender<()>> {
    let (stop_sharing, stopped) = mpsc::channel();
    if let Some(background) = background {
        let quiescer = threads.quiescer().clone();
        threads.spawn(ThreadKind::Sharing, "sharing", move || {
            background.run(&quiescer, &stopped)
        })?;
    }
    Ok(stop_sharing)
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

fn set_nonblocking(file: &File) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let flags = OFlag::from_bits_truncate(fcntl(file, FcntlArg::F_GETFL)?);
    fcntl(file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
