//! Assembles a VM from its [`LaunchSpec`]: memory, KVM, devices, vCPUs, kernel. After [`Machine::build`]
//! nothing runs yet, and every file that the VM will need is open.

mod error;
mod kvm_vm;
mod load;
mod ready;
mod vcpus;

use std::fs::File;
use std::io;
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::GuestMemoryBackend;

use crate::arch::x86_64::cpuid::Groups;
use crate::arch::x86_64::kernel::Entry;
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::state;
use crate::bus::{Bus, BusDevice, Overlap};
use crate::ending::EndSignal;
use crate::generation::Generation;
use crate::interrupt::Wiring;
use crate::kind::{BuiltKind, OpenedKind, OpenedPlain, PlainMemory, ServedKind, VmKind};
use crate::launch::{LaunchSpec, Pages, Share};
use crate::memory::GuestRam;
use crate::memory::nodes::MemoryNodes;
use crate::paging::{DiskImage, Paging};
use crate::power::{KEYBOARD_COMMAND_PORT, KeyboardReset, POWER_PORTS, PowerButton, PowerRegisters, Pvpanic};
use crate::sandbox::Threads;
use crate::serial::{Console, SERIAL_PORTS};
use crate::sharing::{Advice, Mapper, PressureMonitor, Sharing};
use crate::snapshot::MachineState;
use crate::span::host::cpuid;
use crate::span::machine::HomeShard;
use crate::virtio::pmem::PmemRegion;
pub use error::MachineError;
use kvm_vm::{MemoryMapping, create_vm};
pub use kvm_vm::{check_kvm, create_shard_vm, map_memory};
pub(crate) use kvm_vm::{host_relies_on_tsc, tsc_khz};
use load::load;
pub use ready::{PlainVm, Ready, Running};
use vcpus::node_of_each;
pub use vcpus::{leaves_of_vcpu, prepare_vcpu, statistics};

/// Open files that the build consumes.
pub struct BootFiles {
    /// File of the kernel: bzImage or ELF.
    pub kernel: File,
    /// File of the initramfs, if the kernel is to have one.
    pub initrd: Option<File>,
}

/// A VM that is ready to run.
pub struct Machine {
    /// Descriptor of the VM in KVM.
    pub vm: Arc<VmFd>,
    /// Address map of the guest.
    pub layout: Layout,
    /// Guest memory.
    pub memory: GuestRam,
    /// Delivery of the devices' interrupts to the vCPUs.
    pub wiring: Arc<dyn Wiring>,
    /// I/O ports. Devices may be added until [`Machine::into_vcpus`].
    pub ports: Bus,
    /// Addresses outside RAM.
    pub mmio: Bus,
    /// The serial port COM1.
    pub console: Arc<Console>,
    /// The power button.
    pub button: PowerButton,
    /// The generation id.
    generation: Generation,
    /// Signal of the VM's end.
    pub end: Arc<EndSignal>,
    start: Start,
    register_numbers: Vec<u32>,
    groups: Groups,
    /// Gives KVM the guest's memory.
    memory_mapping: MemoryMapping,
}

/// State in which the vCPUs start.
enum Start {
    /// The first vCPU starts at the kernel's entry.
    Boot { cpuid: CpuId, load: KernelLoad },
    /// All vCPUs continue from a saved state.
    Resume(Box<MachineState>),
}

/// Whether the kernel is loaded.
enum KernelLoad {
    /// The kernel is in memory, with this entry.
    Loaded(Entry),
    /// The kernel is loaded once the memory is served.
    Deferred { files: BootFiles, cmdline: String },
}

/// A frozen VM to resume from.
pub struct Resume {
    /// Saved state of the machine.
    pub state: MachineState,
    /// Layers over the VM's memory.
    pub layers: Vec<File>,
}

impl Machine {
    /// Builds the VM of `spec`, of the opened kind, with `memory` at `layout`. Pages of `images` may be
    /// shared.
    pub fn build(
        kvm_fd: &Kvm,
        spec: &LaunchSpec,
        mut files: BootFiles,
        layout: Layout,
        memory: GuestRam,
        images: Vec<DiskImage>,
        kind: OpenedKind,
    ) -> Result<(Self, BuiltKind), MachineError> {
        let groups = kind.groups(&node_of_each(&spec.nodes, spec.vcpus));
        let vm = Arc::new(match &kind {
            VmKind::Plain(_) => create_vm(kvm_fd)?,
            VmKind::SharedSpan(_) | VmKind::CoherentSpan(..) => create_shard_vm(kvm_fd)?,
        });
        let memory_mapping = MemoryMapping::begin(&vm, &memory)?;
        let end = Arc::new(EndSignal::new()?);
        let console = Arc::new(Console::new(end.clone())?);
        let generation = Generation::new()?;
        let (mut ports, mut mmio) = (Bus::default(), Bus::default());
        let (start, kind) = match kind {
            VmKind::Plain(opened) => {
                let (served, resume) = match opened {
                    OpenedPlain::BootPaged(files) => {
                        (PlainMemory::Paged(Paging::open(&memory, files, images)?), None)
                    }
                    OpenedPlain::Boot => (Self::sharing(spec, &memory, images, &files)?, None),
                    OpenedPlain::Resume(resume) => {
                        (Self::sharing(spec, &memory, images, &files)?, Some(resume))
                    }
                };
                if spec.memory.scan {
                    sharing_of(&served)?.mapper.begin_scan(resume.is_none())?;
                    MemoryNodes::new(&spec.memory, &spec.nodes).bind(&memory, &layout)?;
                }
                let start = match resume {
                    Some(Resume { state, layers }) => {
                        sharing_of(&served)?.mapper.adopt(layers, &state.memory)?;
                        MemoryNodes::new(&spec.memory, &spec.nodes).bind(&memory, &layout)?;
                        console.restore(&state.console, end.clone())?;
                        Start::Resume(Box::new(state))
                    }
                    None => {
                        let mapper = served.sharing().map(|sharing| &*sharing.mapper);
                        let cpuid = cpuid(kvm_fd, &[])?;
                        let entry = load(&memory, &layout, spec, &spec.cmdline, &mut files, mapper)?;
                        Start::Boot {
                            cpuid,
                            load: KernelLoad::Loaded(entry),
                        }
                    }
                };
                generation.write(&memory)?;
                (start, VmKind::Plain(served))
            }
            VmKind::SharedSpan(setup) => {
                let cmdline = setup.cmdline(kvm_fd, &spec.cmdline)?;
                let cpuid = setup.cpuid(kvm_fd)?;
                // Mappings that one shard puts over memory are invisible to another shard.
                let load = KernelLoad::Loaded(load(&memory, &layout, spec, &cmdline, &mut files, None)?);
                generation.write(&memory)?;
                let home = HomeShard::new(&vm, setup, &mut ports, &mut mmio)?;
                (Start::Boot { cpuid, load }, VmKind::SharedSpan(home))
            }
            VmKind::CoherentSpan(setup, replica) => {
                let cmdline = setup.cmdline(kvm_fd, &spec.cmdline)?;
                let cpuid = setup.cpuid(kvm_fd)?;
                // The memory must not be accessed before it is served.
                let load = KernelLoad::Deferred { files, cmdline };
                let home = HomeShard::new(&vm, setup, &mut ports, &mut mmio)?;
                (Start::Boot { cpuid, load }, VmKind::CoherentSpan(home, replica))
            }
        };
        let wiring: Arc<dyn Wiring> = match &kind {
            VmKind::Plain(_) => vm.clone(),
            VmKind::SharedSpan(home) | VmKind::CoherentSpan(home, _) => home.wiring(),
        };
        let button = PowerButton::new()?;
        wiring.bind_interrupt(console.interrupt(), layout::SERIAL_GSI)?;
        wiring.bind_interrupt(button.event(), layout::EVENT_GSI)?;
        wiring.bind_interrupt(generation.event(), layout::GENERATION_GSI)?;
        add_legacy_devices(&mut ports, &console, &end)?;
        let machine = Self {
            vm,
            layout,
            memory,
            wiring,
            ports,
            mmio,
            console,
            button,
            generation,
            end,
            start,
            register_numbers: state::register_numbers(kvm_fd)?,
            groups,
            memory_mapping,
        };
        Ok((machine, kind))
    }

    /// Starts to serve a replica of the memory, and loads the kernel, which was not possible before. Of a
    /// plain VM it starts to page the memory, which has the kernel already.
    pub fn serve_memory(
        &mut self,
        kind: BuiltKind,
        spec: &LaunchSpec,
        threads: &Threads,
    ) -> Result<ServedKind, MachineError> {
        let kind = kind.serve(threads, &self.end)?;
        if let Some(paging) = kind.paging() {
            paging.start(threads, &self.end)?;
        }
        if let VmKind::CoherentSpan(..) = kind {
            self.generation.write(&self.memory)?;
        }
        // Only with such memory is the kernel loaded late.
        if let Start::Boot { load: state, .. } = &mut self.start
            && let KernelLoad::Deferred { files, cmdline } = state
        {
            *state = KernelLoad::Loaded(load(&self.memory, &self.layout, spec, cmdline, files, None)?);
        }
        Ok(kind)
    }

    /// Returns memory that shares pages of `images`, then of the kernel, then of the initramfs, unless the
    /// memory's pages are too large for that.
    fn sharing(
        spec: &LaunchSpec,
        memory: &GuestRam,
        images: Vec<DiskImage>,
        boot: &BootFiles,
    ) -> io::Result<PlainMemory> {
        if matches!(spec.memory.pages, Pages::Huge2M | Pages::Huge1G) {
            return Ok(PlainMemory::Whole);
        }
        let mut images: Vec<File> = images.into_iter().map(|image| image.file).collect();
        if spec.share_boot != Share::Never {
            images.push(boot.kernel.try_clone()?);
            images.extend(boot.initrd.as_ref().map(File::try_clone).transpose()?);
        }
        let advice = match spec.memory.pages {
            _ if spec.memory.scan => Advice::Scan,
            Pages::Transparent => Advice::Huge,
            _ => Advice::Ordinary,
        };
        let mapper = Mapper::new(memory, images, advice);
        let shared = |mapper: Arc<Mapper>| {
            let pressure = Arc::new(PressureMonitor::open(mapper.images(), &spec.mapped));
            PlainMemory::Shared(Sharing { mapper, pressure })
        };
        Ok(mapper.map_or(PlainMemory::Whole, shared))
    }

    /// Maps a region of persistent memory into the guest. Must be called once for each region of
    /// `layout.pmem`.
    pub fn map_pmem(&self, region: PmemRegion) -> io::Result<()> {
        // RAM has the first slots, one per region.
        let index = self
            .layout
            .pmem
            .iter()
            .position(|range| range.start == region.guest);
        let slot = self.memory.num_regions() + index.ok_or(io::ErrorKind::InvalidInput)?;
        let slot = kvm_userspace_memory_region {
            slot: slot as u32,
            guest_phys_addr: region.guest,
            memory_size: region.bytes,
            userspace_addr: region.host,
            flags: if region.read_only { KVM_MEM_READONLY } else { 0 },
        };
        // SAFETY: the device's mapping has that size and is never undone (`PmemRegion::host`).
        Ok(unsafe { self.vm.set_user_memory_region(slot) }?)
    }
}

/// Returns the sharing of a VM that needs small pages.
fn sharing_of(memory: &PlainMemory) -> Result<&Sharing, MachineError> {
    memory
        .sharing()
        .ok_or(MachineError::Lacking("small pages for this memory"))
}

/// Adds the devices at ports of their own: serial port, panic reports, power and reset.
fn add_legacy_devices(ports: &mut Bus, console: &Arc<Console>, end: &Arc<EndSignal>) -> Result<(), Overlap> {
    let mut claim = |port: u16, count: u64, device: Arc<dyn BusDevice>| {
        ports.claim(u64::from(port)..u64::from(port) + count, device)
    };
    claim(layout::COM1_PORT, SERIAL_PORTS, console.clone())?;
    claim(layout::PVPANIC_PORT, 1, Arc::new(Pvpanic(end.clone())))?;
    claim(
        layout::SLEEP_CONTROL_PORT,
        POWER_PORTS,
        Arc::new(PowerRegisters(end.clone())),
    )?;
    claim(KEYBOARD_COMMAND_PORT, 1, Arc::new(KeyboardReset(end.clone())))
}
