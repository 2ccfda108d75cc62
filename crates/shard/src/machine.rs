//! Assembles a VM from its [`LaunchSpec`]: memory, KVM, devices, vCPUs, kernel. Nothing runs yet when
//! [`Machine::build`] is done, and every file the VM will ever need is open.

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
use crate::bus::{Bus, BusDevice};
use crate::ending::EndSignal;
use crate::generation::Generation;
use crate::interrupt::Wiring;
use crate::kind::{BuiltKind, OpenedKind, ServedKind, VmKind};
use crate::launch::{LaunchSpec, Pages, Share};
use crate::memory::GuestRam;
use crate::memory::nodes::MemoryNodes;
use crate::power::{KEYBOARD_COMMAND_PORT, KeyboardReset, POWER_PORTS, PowerButton, PowerRegisters, Pvpanic};
use crate::sandbox::Threads;
use crate::serial::{Console, SERIAL_PORTS};
use crate::sharing::{Mapper, Sharing, Situations};
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
pub use vcpus::{leaves_of_vcpu, prepare_vcpu};

/// The files that building consumes, already open.
pub struct BootFiles {
    /// The kernel.
    pub kernel: File,
    /// The initramfs.
    pub initrd: Option<File>,
}

/// A VM that is ready to run.
pub struct Machine {
    /// KVM's side.
    pub vm: Arc<VmFd>,
    /// Where everything is.
    pub layout: Layout,
    /// Guest memory.
    pub memory: GuestRam,
    /// How the devices' interrupts reach the vCPUs.
    pub wiring: Arc<dyn Wiring>,
    /// I/O ports. Devices may be added until [`Machine::into_vcpus`].
    pub ports: Bus,
    /// Addresses outside RAM.
    pub mmio: Bus,
    /// COM1.
    pub console: Arc<Console>,
    /// The power button.
    pub button: PowerButton,
    /// The generation id.
    generation: Generation,
    /// How the VM ends.
    pub end: Arc<EndSignal>,
    start: Start,
    register_numbers: Vec<u32>,
    groups: Groups,
    /// Gives KVM the guest's memory.
    memory_mapping: MemoryMapping,
}

/// How the vCPUs start.
enum Start {
    /// The first at the kernel's entry.
    Boot { cpuid: CpuId, load: Load },
    /// All where they stood.
    Resume(Box<MachineState>),
}

/// The kernel's way into memory.
enum Load {
    /// It is there, and is entered here.
    Done(Entry),
    /// Once the memory is served.
    Later { files: BootFiles, cmdline: String },
}

/// A frozen VM to go on from.
pub struct Resume {
    /// Its state.
    pub state: MachineState,
    /// The layers over its memory.
    pub layers: Vec<File>,
}

impl Machine {
    /// Makes the VM of `spec`, of the kind that is open, with `memory` at `layout`. Pages of `images` may be
    /// shared.
    pub fn build(
        kvm_fd: &Kvm,
        spec: &LaunchSpec,
        mut files: BootFiles,
        layout: Layout,
        memory: GuestRam,
        images: Vec<File>,
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
            VmKind::Plain(resume) => {
                let sharing = Self::sharing(spec, &memory, images, &files)?;
                let start = match resume {
                    Some(Resume { state, layers }) => {
                        let sharing = sharing
                            .as_ref()
                            .ok_or(MachineError::Lacking("small pages for this memory"))?;
                        sharing.mapper.adopt(layers, &state.memory)?;
                        MemoryNodes::new(&spec.memory, &spec.nodes).bind(&memory, &layout)?;
                        console.restore(&state.console, end.clone())?;
                        Start::Resume(Box::new(state))
                    }
                    None => {
                        let mapper = sharing.as_ref().map(|sharing| &*sharing.mapper);
                        let cpuid = cpuid(kvm_fd, &[])?;
                        let entry = load(&memory, &layout, spec, &spec.cmdline, &mut files, mapper)?;
                        Start::Boot {
                            cpuid,
                            load: Load::Done(entry),
                        }
                    }
                };
                generation.write(&memory)?;
                (start, VmKind::Plain(sharing))
            }
            VmKind::SharedSpan(setup) => {
                let cmdline = setup.cmdline(kvm_fd, &spec.cmdline)?;
                let cpuid = setup.cpuid(kvm_fd)?;
                // What one shard lays over memory, another does not see.
                let load = Load::Done(load(&memory, &layout, spec, &cmdline, &mut files, None)?);
                generation.write(&memory)?;
                let home = HomeShard::new(&vm, setup, &mut ports, &mut mmio)?;
                (Start::Boot { cpuid, load }, VmKind::SharedSpan(home))
            }
            VmKind::CoherentSpan(setup, replica) => {
                let cmdline = setup.cmdline(kvm_fd, &spec.cmdline)?;
                let cpuid = setup.cpuid(kvm_fd)?;
                // Nobody may touch the memory before it is served.
                let load = Load::Later { files, cmdline };
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
        claim(KEYBOARD_COMMAND_PORT, 1, Arc::new(KeyboardReset(end.clone())))?;
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

    /// Has a copy of the memory served from now on, and fills it, which could not be done before.
    pub fn serve_memory(
        &mut self,
        kind: BuiltKind,
        spec: &LaunchSpec,
        threads: &Threads,
    ) -> Result<ServedKind, MachineError> {
        let kind = kind.serve(threads, &self.end)?;
        if let VmKind::CoherentSpan(..) = kind {
            self.generation.write(&self.memory)?;
        }
        // Only such memory has the kernel come later.
        if let Start::Boot { load: state, .. } = &mut self.start
            && let Load::Later { files, cmdline } = state
        {
            *state = Load::Done(load(&self.memory, &self.layout, spec, cmdline, files, None)?);
        }
        Ok(kind)
    }

    /// What guest memory shares: pages of `images`, then of the kernel, then of the initramfs. None when the
    /// memory's pages are too large for that.
    fn sharing(
        spec: &LaunchSpec,
        memory: &GuestRam,
        mut images: Vec<File>,
        boot: &BootFiles,
    ) -> io::Result<Option<Sharing>> {
        if matches!(spec.memory.pages, Pages::Huge2M | Pages::Huge1G) {
            return Ok(None);
        }
        if spec.share_boot != Share::Never {
            images.push(boot.kernel.try_clone()?);
            images.extend(boot.initrd.as_ref().map(File::try_clone).transpose()?);
        }
        let mapper = Mapper::new(memory, images, spec.memory.pages == Pages::Transparent);
        Ok(mapper.map(|mapper| Sharing {
            situations: Arc::new(Situations::open(mapper.images(), &spec.mapped)),
            mapper,
        }))
    }

    /// Shows a region of persistent memory to the guest. Each of `layout.pmem` once.
    pub fn map_pmem(&self, region: PmemRegion) -> io::Result<()> {
        // RAM has the first slots, one a region.
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
