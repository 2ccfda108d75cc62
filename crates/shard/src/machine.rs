//! Assembles a VM from its [`LaunchSpec`]: memory, KVM, devices, vCPUs, kernel. Nothing runs yet when [`Machine::build`] is
//! done, and every file the VM will ever need is open.

mod error;
mod kvm_vm;
mod load;
mod ready;
mod vcpus;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::GuestMemoryBackend;
use vmm_sys_util::eventfd::EventFd;

use crate::arch::x86_64::cpuid::Groups;
use crate::arch::x86_64::kernel::Entry;
use crate::arch::x86_64::layout::{self, Layout};
use crate::arch::x86_64::state;
use crate::bus::{Bus, BusDevice};
use crate::cmdline;
use crate::ending::EndSignal;
use crate::generation::Generation;
use crate::interrupt::Wiring;
use crate::launch::{LaunchSpec, Pages, Share, SpanLaunch};
use crate::memory::replica::{Coherence, Replica};
use crate::memory::{self, GuestRam, SpanMemory};
use crate::power::{KEYBOARD_COMMAND_PORT, KeyboardReset, POWER_PORTS, PowerButton, PowerRegisters, Pvpanic};
use crate::rtc::{NoTimer, RTC_PORTS, Rtc, TIMER_PORTS};
use crate::sandbox::Threads;
use crate::serial::{Console, SERIAL_PORTS};
use crate::sharing::{Mapper, Sharing, Situations};
use crate::snapshot::MachineState;
use crate::span;
use crate::span::desk::IoApicDevice;
use crate::span::host::cpuid;
use crate::span::machine::SpanParts;
use crate::virtio::pmem::PmemRegion;
pub use error::MachineError;
use kvm_vm::create_vm;
pub use kvm_vm::{check_kvm, create_shard_vm, map_memory};
pub(crate) use kvm_vm::{host_relies_on_tsc, tsc_khz};
use load::load;
pub use ready::{Ready, Running};
use vcpus::node_of_each;
pub use vcpus::prepare_vcpu;

/// Registers of an IOAPIC in memory, bytes.
const IOAPIC_BYTES: u64 = 0x1000;

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
    /// What it shares with other VMs; none when its pages are too large for that.
    pub sharing: Option<Sharing>,
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
    span: Option<Home>,
    replica: Option<Box<Replica>>,
    groups: Groups,
}

/// What the home of a VM that spans cells has beside other machines.
pub struct Home {
    /// The way to the other shards.
    pub parts: SpanParts,
    /// The IOAPIC.
    pub ioapic: Arc<IoApicDevice>,
    /// The events of its pins.
    pub pins: Vec<(EventFd, u8)>,
}

/// The shards of a VM, as its home needs them to be built.
pub struct SpanBuild<'a> {
    /// What the monitor says.
    pub launch: &'a SpanLaunch,
    /// What the memory is made of.
    pub memory: SpanMemory,
    /// The way to the other shards.
    pub parts: SpanParts,
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
    /// The files of its memory: its own, then the layers.
    pub memory: Vec<File>,
}

impl Machine {
    /// Makes the VM of `spec` with `pmem_bytes` of persistent memory regions. Pages of `images` may be shared. It boots, or
    /// goes on from `resume`.
    pub fn build(
        kvm_fd: &Kvm,
        spec: &LaunchSpec,
        mut files: BootFiles,
        pmem_bytes: &[u64],
        images: Vec<File>,
        resume: Option<Resume>,
        span: Option<SpanBuild<'_>>,
    ) -> Result<Self, MachineError> {
        let layout = Layout::new(spec.memory.bytes, pmem_bytes).ok_or(MachineError::Layout)?;
        check_kvm(kvm_fd, spec.vcpus)?;
        let (saved, mut frozen) = match resume {
            Some(Resume { state, memory }) => (Some(Box::new(state)), VecDeque::from(memory)),
            None => (None, VecDeque::new()),
        };
        let others_rely = span.as_ref().is_none_or(|span| span.launch.tsc.is_relied_on);
        let leaves = span.as_ref().map_or(&[][..], |span| &span.launch.cpuid);
        let (memory, parts, replica) = match span {
            Some(span) => {
                let memory = memory::create_spanning(&layout, &spec.memory, span.launch, &span.memory)?;
                let replica = match span.memory {
                    SpanMemory::Replica(replica) => Some(replica),
                    SpanMemory::Files(_) => None,
                };
                (memory, Some(span.parts), replica)
            }
            None => {
                let memory = memory::create(&layout, &spec.memory, &spec.nodes, frozen.pop_front())?;
                (memory, None, None)
            }
        };
        let vm = Arc::new(if parts.is_some() {
            create_shard_vm(kvm_fd)?
        } else {
            create_vm(kvm_fd)?
        });
        map_memory(&vm, &memory)?;
        // What one shard lays over memory, another does not see.
        let sharing = match &parts {
            Some(_) => None,
            None => Self::sharing(spec, &memory, images, &files)?,
        };
        let mut cmdline = spec.cmdline.clone();
        if parts.is_some() {
            // What the hosts rely on, the guest can.
            let is_relied_on = host_relies_on_tsc() && others_rely;
            cmdline = cmdline::with_tsc(&cmdline, is_relied_on, tsc_khz(kvm_fd)?);
        }
        let end = Arc::new(EndSignal::new()?);
        let console = Arc::new(Console::new(end.clone())?);
        let start = match saved {
            Some(saved) => {
                let sharing = sharing
                    .as_ref()
                    .ok_or(MachineError::Lacking("small pages for this memory"))?;
                sharing.mapper.adopt(frozen.into(), &saved.memory)?;
                memory::bind_nodes(&memory, &layout, &spec.nodes)?;
                console.restore(&saved.console, end.clone())?;
                Start::Resume(saved)
            }
            None => Start::Boot {
                cpuid: cpuid(kvm_fd, leaves)?,
                load: match replica {
                    Some(_) => Load::Later { files, cmdline },
                    None => {
                        let mapper = sharing.as_ref().map(|sharing| &*sharing.mapper);
                        Load::Done(load(&memory, &layout, spec, &cmdline, &mut files, mapper)?)
                    }
                },
            },
        };
        let button = PowerButton::new()?;
        let mut mmio = Bus::default();
        let (wiring, home): (Arc<dyn Wiring>, _) = match parts {
            Some(parts) => {
                let (wiring, ioapic) = span::machine::home_wiring(&vm, &parts.router);
                mmio.claim(
                    layout::IOAPIC_START..layout::IOAPIC_START + IOAPIC_BYTES,
                    ioapic.clone(),
                )?;
                (wiring.clone(), Some((parts, wiring, ioapic)))
            }
            None => (vm.clone(), None),
        };
        wiring.bind_interrupt(console.interrupt(), layout::SERIAL_GSI)?;
        wiring.bind_interrupt(button.event(), layout::EVENT_GSI)?;
        let generation = Generation::new()?;
        if replica.is_none() {
            generation.write(&memory)?;
        }
        wiring.bind_interrupt(generation.event(), layout::GENERATION_GSI)?;
        let span = home.map(|(parts, wiring, ioapic)| Home {
            parts,
            ioapic,
            pins: wiring.take_pins(),
        });
        let mut ports = Bus::default();
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
        if span.is_some() {
            // What a kernel looks for that has no clock of KVM's.
            claim(layout::RTC_PORT, RTC_PORTS, Arc::new(Rtc::default()))?;
            claim(layout::TIMER_PORT, TIMER_PORTS, Arc::new(NoTimer))?;
        }
        let nodes = node_of_each(&spec.nodes, spec.vcpus);
        let groups = match &replica {
            Some(_) => Groups::of_coherent(&nodes),
            None => Groups::of(&nodes),
        };
        Ok(Self {
            vm,
            layout,
            memory,
            sharing,
            wiring,
            ports,
            mmio,
            console,
            button,
            generation,
            end,
            start,
            register_numbers: state::register_numbers(kvm_fd)?,
            span,
            replica,
            groups,
        })
    }

    /// Has a memory of the shard's own served from now on, and fills it, which could not be done before. Nothing to do for
    /// other memory.
    pub fn serve_memory(
        &mut self,
        spec: &LaunchSpec,
        threads: &Threads,
    ) -> Result<Option<&'static Coherence>, MachineError> {
        let Some(replica) = self.replica.take() else {
            return Ok(None);
        };
        let coherence = replica.start(threads, &self.end)?;
        self.generation.write(&self.memory)?;
        if let Start::Boot { load: state, .. } = &mut self.start
            && let Load::Later { files, cmdline } = state
        {
            *state = Load::Done(load(&self.memory, &self.layout, spec, cmdline, files, None)?);
        }
        Ok(Some(coherence))
    }

    /// What guest memory shares: pages of `images`, then of the kernel, then of the initramfs. None when the memory's pages
    /// are too large for that.
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
