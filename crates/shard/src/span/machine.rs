//! KVM setup of a shard of a VM that spans cells, and its connections to the other shards.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvm_bindings::{
    CpuId, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_EXIT_REASON_INVAL,
    KVM_MSR_EXIT_REASON_UNKNOWN, kvm_enable_cap,
};
use kvm_ioctls::{Cap, Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd};

use super::clock::GuestTsc;
use super::device_proxy_client::DeviceProxyClient;
use super::device_proxy_server::{DeviceProxyServer, IO_REQUESTS_MAX, IoRequest};
use super::host;
use super::ioapic::IoApicDevice;
use super::ioctls;
use super::link::stream::{self, Writer};
use super::link::{Receiving, Sending};
use super::packet::Space;
use super::pv_eoi::{KVM_FEATURE_PV_EOI, MSR_KVM_PV_EOI_EN};
use super::router::{HOME, Router};
use super::span_vcpu::{Reset, SpanVcpu, TSC_PER_TICK, VcpuCoherence};
use super::tsc_step_barrier::TscStepBarrier;
use super::wiring::{SpanWiring, watch_pins};
use crate::arch::x86_64::cpuid::Groups;
use crate::arch::x86_64::layout::{IOAPIC_START, Layout, RTC_PORT, TIMER_PORT};
use crate::arch::x86_64::msr::{MSR_TSC, MSR_TSC_ADJUST, MSR_TSC_DEADLINE};
use crate::arch::x86_64::state;
use crate::bus::{Bus, BusDevice, Overlap};
use crate::cmdline;
use crate::ending::EndSignal;
use crate::interrupt::Wiring;
use crate::kind::SpanKind;
use crate::launch::{Ending, Leaf, ShardChannels, SpanLaunch, TscLaunch};
use crate::machine::{self, MachineError};
use crate::memory::GuestRam;
use crate::memory::replica::Coherence;
use crate::process::{Files, ReceiveError};
use crate::rtc::{NoTimer, RTC_PORTS, Rtc, TIMER_PORTS};
use crate::sandbox::{ThreadKind, Threads};
use crate::vcpu::VcpuCounters;

/// APIC base register. KVM implements it but must leave it to the shard, as it must the TSC, which is one for
/// the VM, and the deadline timer.
const MSR_APIC_BASE: u32 = 0x1B;
/// Registers of KVM's paravirtual clock, asynchronous page faults and others, which guests that span cells
/// do not see.
const KVM_MSRS: std::ops::Range<u32> = 0x4B56_4D00..0x4B56_4E00;
/// Registers that do not migrate: the TSC is one for the VM, and [`apic::LocalApic`] holds the others.
const NOT_MIGRATED_MSRS: [u32; 4] = [MSR_TSC, MSR_TSC_ADJUST, MSR_TSC_DEADLINE, MSR_APIC_BASE];
/// APIC base register: enabled, in x2APIC mode.
const APIC_BASE: u64 = 0xFEE0_0C00;
/// APIC base register: bootstrap processor.
const APIC_BASE_BOOTSTRAP: u64 = 1 << 8;

/// Size of the registers of an IOAPIC in memory, bytes.
const IOAPIC_BYTES: u64 = 0x1000;

/// Time for which a shard that has lost its connection to another waits before it ends: its monitor may
/// report the cause meanwhile.
const PEER_LOSS_GRACE: Duration = Duration::from_secs(1);

/// Channels to the other shards, by shard index.
pub struct Channels(Vec<Option<Channel>>);

struct Channel {
    sending: Sending,
    incoming: Incoming,
}

struct Incoming {
    receiving: Receiving,
    remote: Option<Remote>,
}

/// Connection to a shard of another host.
struct Remote {
    /// Description of the other shard, for messages.
    peer: String,
    writer: Writer,
}

impl Channels {
    /// Takes the channels from the monitor's message.
    pub fn take(span: &SpanLaunch, files: &mut Files) -> Result<Self, ReceiveError> {
        let invalid = |error| ReceiveError::Io(std::io::Error::other(error));
        let mut channels = Vec::with_capacity(span.channels.len());
        for channel in &span.channels {
            channels.push(match channel {
                Some(ShardChannels::Rings { outgoing, incoming }) => Some(Channel {
                    sending: Sending::ring(files.take(*outgoing)?).map_err(invalid)?,
                    incoming: Incoming {
                        receiving: Receiving::ring(files.take(*incoming)?).map_err(invalid)?,
                        remote: None,
                    },
                }),
                Some(ShardChannels::Stream { socket, peer }) => {
                    let (sending, writer, receiving) = stream::open(files.take(*socket)?)?;
                    let peer = peer.clone();
                    Some(Channel {
                        sending: Sending::Stream(sending),
                        incoming: Incoming {
                            receiving: Receiving::Stream(receiving),
                            remote: Some(Remote { peer, writer }),
                        },
                    })
                }
                None => None,
            });
        }
        Ok(Self(channels))
    }
}

/// Setup of a shard before its threads start.
pub struct SpanSetup {
    /// Router of the shard.
    pub router: Arc<Router>,
    receiving: Vec<(u8, Incoming)>,
    io_requests: Option<mpsc::Receiver<IoRequest>>,
    tsc: TscLaunch,
    /// CPUID of the guest; all that this host supports when empty.
    leaves: Vec<Leaf>,
}

impl AsRef<Router> for SpanSetup {
    fn as_ref(&self) -> &Router {
        &self.router
    }
}

impl SpanSetup {
    /// Sets up a shard from its description and its channels.
    pub fn new(span: &SpanLaunch, channels: Channels) -> Self {
        let (mut sending, mut receiving) = (Vec::new(), Vec::new());
        for (shard, channel) in (0..=u8::MAX).zip(channels.0) {
            sending.push(channel.map(|channel| {
                receiving.push((shard, channel.incoming));
                channel.sending
            }));
        }
        let (submitter, io_requests) = mpsc::sync_channel(IO_REQUESTS_MAX);
        let is_home = span.shard == HOME;
        let router = Router::new(span.shard, &span.vcpus, sending, is_home.then_some(submitter));
        let is_over_hosts = receiving.iter().any(|(_, incoming)| incoming.remote.is_some());
        if let (true, Some(khz)) = (is_over_hosts, span.tsc.khz) {
            router.set_tsc_step_barrier(Arc::new(TscStepBarrier::new(span.tsc.offset, khz)));
        }
        Self {
            router: Arc::new(router),
            receiving,
            io_requests: is_home.then_some(io_requests),
            tsc: span.tsc,
            leaves: span.cpuid.clone(),
        }
    }

    /// Returns the CPUID of the guest.
    ///
    /// # Errors
    /// Fails if KVM refuses to report.
    pub fn cpuid(&self, kvm_fd: &Kvm) -> Result<CpuId, MachineError> {
        host::cpuid(kvm_fd, &self.leaves)
    }

    /// Returns the kernel's command line with the options of the TSC. The guest may rely on the TSC if the
    /// hosts do.
    ///
    /// # Errors
    /// Fails if KVM refuses to report the frequency of the TSC.
    pub fn cmdline(&self, kvm_fd: &Kvm, cmdline: &str) -> Result<String, MachineError> {
        let is_relied_on = machine::host_relies_on_tsc() && self.tsc.is_relied_on;
        let khz = machine::tsc_khz(kvm_fd)?;
        Ok(cmdline::with_tsc(cmdline, is_relied_on, khz))
    }

    /// Puts vCPU `id` into the state that firmware leaves: sets the frequency of its TSC, and its CPUID,
    /// which reports that frequency.
    ///
    /// # Errors
    /// Fails if KVM refuses.
    pub fn prepare_vcpu(
        &self,
        fd: &VcpuFd,
        cpuid: &CpuId,
        id: u8,
        groups: Groups,
    ) -> Result<(), MachineError> {
        let kvm = |what| move |source| MachineError::Kvm { what, source };
        if let Some(khz) = self.tsc.khz {
            fd.set_tsc_khz(khz).map_err(kvm("set the frequency of the TSC"))?;
        }
        let mut leaves = machine::leaves_of_vcpu(cpuid, id, groups)?;
        let khz = fd.get_tsc_khz().map_err(kvm("read the frequency of the TSC"))?;
        adjust_cpuid(&mut leaves, khz);
        machine::prepare_vcpu(fd, &leaves)
    }

    /// Creates the spanning vCPU of `fd`, which has its CPUID already. `memory` is the guest's.
    pub fn vcpu(
        &self,
        kvm_numbers: &[u32],
        fd: &mut VcpuFd,
        vcpu: u8,
        memory: SpanKind<&GuestRam, &Coherence>,
        counters: Arc<VcpuCounters>,
    ) -> Result<SpanVcpu, MachineError> {
        let kvm = |what| move |source| MachineError::Kvm { what, source };
        let reset = set_reset(fd, vcpu)?;
        let khz = fd.get_tsc_khz().map_err(kvm("read the frequency of the TSC"))?;
        let tsc = GuestTsc {
            offset: self.tsc.offset,
            ratio: self.tsc.ratio,
            khz,
        };
        if !ioctls::has_tsc_offset(fd) {
            return Err(MachineError::Lacking("offset of the TSC (Linux 5.16 has it)"));
        }
        ioctls::set_tsc_offset(fd, self.tsc.offset).map_err(kvm("set the offset of the TSC"))?;
        let numbers = state::present(fd, kvm_numbers).map_err(MachineError::State)?;
        let router = self.router.clone();
        let memory = match memory {
            SpanKind::SharedSpan(ram) => SpanKind::SharedSpan(ram.clone()),
            SpanKind::CoherentSpan(ram, coherence) => {
                SpanKind::CoherentSpan(ram.clone(), VcpuCoherence::of(fd, vcpu, coherence))
            }
        };
        Ok(SpanVcpu::new(
            vcpu,
            router,
            tsc,
            reset,
            Arc::new(numbers),
            memory,
            counters,
        ))
    }

    /// Starts the receiving threads and, in the home, the device proxy server.
    pub fn start(
        self,
        threads: &Threads,
        end: &Arc<EndSignal>,
        home: Option<(Arc<Bus>, Arc<Bus>, Arc<IoApicDevice>)>,
    ) -> std::io::Result<Arc<Router>> {
        if let (Some(io_requests), Some((ports, memory, ioapic))) = (self.io_requests, home) {
            let router = self.router.clone();
            let server = DeviceProxyServer {
                io_requests,
                router,
                ports,
                memory,
                ioapic,
            };
            // The server writes devices' registers as vCPUs' threads do, and needs their system calls: a
            // driver that starts a device makes KVM bind its doorbells.
            threads.spawn(ThreadKind::Vcpu, "device-proxy", move || server.run())?;
        }
        for (shard, Incoming { receiving, remote }) in self.receiving {
            let (router, end) = (self.router.clone(), end.clone());
            let peer = remote.map(|Remote { peer, writer }| {
                let writing = threads.spawn(ThreadKind::Link, &format!("to shard{shard}"), || writer.run());
                writing.map(|_| peer)
            });
            let peer = peer.transpose()?;
            threads.spawn(ThreadKind::Link, &format!("from shard{shard}"), move || {
                let received = receiving.run(|packet| router.receive(shard, packet));
                let detail = match (received, peer) {
                    (Err(error), _) => format!("shard {shard} sent a malformed message: {error}"),
                    (Ok(()), Some(peer)) => {
                        std::thread::sleep(PEER_LOSS_GRACE);
                        format!("the connection to its shard in {peer} is lost")
                    }
                    // The monitor detects its exit.
                    (Ok(()), None) => return,
                };
                end.end(Ending::ShardFailed { detail });
            })?;
        }
        Ok(self.router)
    }
}

/// Returns those of the model-specific registers `numbers`, as KVM lists them, that migrate with a vCPU.
pub fn migrated_msrs(numbers: &[u32]) -> Vec<u32> {
    let is_migrated = |number: &&u32| !NOT_MIGRATED_MSRS.contains(number) && !KVM_MSRS.contains(number);
    numbers.iter().filter(is_migrated).copied().collect()
}

/// Makes threads that start later wake at their deadline, not up to 50 us after it: vCPUs block with
/// time-outs.
pub fn wake_promptly() {
    const SLACK_NS: libc::c_ulong = 1;
    // SAFETY: sets the timer slack of the calling thread, which the threads that it starts inherit.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0) };
}

/// Checks that this KVM can run a shard of a spanning VM.
///
/// # Errors
/// Fails with the name of a capability that KVM lacks.
pub fn check(kvm_fd: &Kvm) -> Result<(), MachineError> {
    for (cap, name) in [
        (Cap::X86UserSpaceMsr, "model-specific registers in user space"),
        (Cap::X86MsrFilter, "filter of model-specific registers"),
        (Cap::ImmediateExit, "immediate exit"),
    ] {
        if !kvm_fd.check_extension(cap) {
            return Err(MachineError::Lacking(name));
        }
    }
    Ok(())
}

/// Makes accesses to the model-specific registers that the shard implements exit to it.
pub fn prepare(vm: &VmFd) -> Result<(), MachineError> {
    let kvm = |what| move |source| MachineError::Kvm { what, source };
    let reasons = KVM_MSR_EXIT_REASON_FILTER | KVM_MSR_EXIT_REASON_INVAL | KVM_MSR_EXIT_REASON_UNKNOWN;
    vm.enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        args: [u64::from(reasons), 0, 0, 0],
        ..Default::default()
    })
    .map_err(kvm("make accesses to model-specific registers exit"))?;
    // A zero bit denies an access, and a denied access exits to the shard.
    const DENIED: [u8; 1] = [0];
    let range = |flags, base| MsrFilterRange {
        flags,
        base,
        msr_count: 1,
        bitmap: &DENIED,
    };
    let both = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
    let ranges = [
        range(both, MSR_APIC_BASE),
        range(both, MSR_TSC_DEADLINE),
        range(both, MSR_KVM_PV_EOI_EN),
        range(MsrFilterRangeFlags::WRITE, MSR_TSC),
        range(both, MSR_TSC_ADJUST),
    ];
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges)
        .map_err(kvm("filter model-specific registers"))
}

/// Returns the bus of a vCPU in a shard without devices.
pub fn remote_bus(
    space: Space,
    vcpu: u8,
    router: &Arc<Router>,
    layout: &Arc<Layout>,
) -> Result<Arc<Bus>, Overlap> {
    let mut bus = Bus::default();
    let (router, layout) = (router.clone(), layout.clone());
    bus.claim(
        0..u64::MAX,
        Arc::new(DeviceProxyClient {
            space,
            vcpu,
            router,
            layout,
        }),
    )?;
    Ok(Arc::new(bus))
}

/// Home of a VM that spans cells: the shard with the devices.
pub struct HomeShard {
    /// Setup of the shard.
    pub setup: SpanSetup,
    wiring: Arc<SpanWiring>,
    ioapic: Arc<IoApicDevice>,
}

impl AsRef<Router> for HomeShard {
    fn as_ref(&self) -> &Router {
        &self.setup.router
    }
}

impl HomeShard {
    /// Puts the IOAPIC on the bus, with the clock and timer that a kernel without KVM's clock probes.
    ///
    /// # Errors
    /// Fails if the addresses overlap those of other devices.
    pub fn new(vm: &Arc<VmFd>, setup: SpanSetup, ports: &mut Bus, memory: &mut Bus) -> Result<Self, Overlap> {
        let wiring = Arc::new(SpanWiring::new(vm.clone(), setup.router.clone()));
        let ioapic = Arc::new(IoApicDevice::new(setup.router.clone()));
        memory.claim(IOAPIC_START..IOAPIC_START + IOAPIC_BYTES, ioapic.clone())?;
        let mut claim = |port: u16, count: u64, device: Arc<dyn BusDevice>| {
            ports.claim(u64::from(port)..u64::from(port) + count, device)
        };
        claim(RTC_PORT, RTC_PORTS, Arc::new(Rtc::default()))?;
        claim(TIMER_PORT, TIMER_PORTS, Arc::new(NoTimer))?;
        Ok(Self {
            setup,
            wiring,
            ioapic,
        })
    }

    /// Returns the wiring of the devices' interrupts.
    pub fn wiring(&self) -> Arc<dyn Wiring> {
        self.wiring.clone()
    }

    /// Starts the threads of the home other than those of vCPUs and devices. The devices are on the buses
    /// `ports` and `memory`.
    ///
    /// # Errors
    /// Fails if a thread cannot be started.
    pub fn start(
        self,
        threads: &Threads,
        end: &Arc<EndSignal>,
        ports: Arc<Bus>,
        memory: Arc<Bus>,
    ) -> std::io::Result<Arc<Router>> {
        let Self {
            setup,
            wiring,
            ioapic,
        } = self;
        let pins = wiring.take_pins();
        let router = setup.start(threads, end, Some((ports, memory, ioapic.clone())))?;
        threads.spawn(ThreadKind::Pins, "pins", move || watch_pins(&pins, &ioapic))?;
        Ok(router)
    }
}

/// Puts the local APIC of a new vCPU into x2APIC mode, as far as KVM depends on it. Returns its registers
/// after reset.
fn set_reset(fd: &VcpuFd, vcpu: u8) -> Result<Reset, MachineError> {
    let kvm = |what| move |source| MachineError::Kvm { what, source };
    let mut special = fd.get_sregs().map_err(kvm("read registers"))?;
    special.apic_base = APIC_BASE | if vcpu == 0 { APIC_BASE_BOOTSTRAP } else { 0 };
    fd.set_sregs(&special).map_err(kvm("set registers"))?;
    let registers = fd.get_regs().map_err(kvm("read registers"))?;
    Ok(Reset { registers, special })
}

/// Adjusts CPUID for a guest without KVM's clock, with an invariant TSC of `tsc_khz`.
///
/// On Intel hosts KVM handles writes of the deadline timer before it consults the filter, and loses them
/// where it has no local APIC (`handle_fastpath_set_tscdeadline`, Linux 5.8 and later). So the guest has the
/// plain timer there, and its frequency, which it need not measure.
pub fn adjust_cpuid(leaves: &mut CpuId, tsc_khz: u32) {
    const FEATURES: u32 = 1;
    const TSC_DEADLINE: u32 = 1 << 24;
    const CRYSTAL: u32 = 0x15;
    const KVM_FEATURES: u32 = 0x4000_0001;
    const POWER: u32 = 0x8000_0007;
    const INVARIANT_TSC: u32 = 1 << 8;
    let leaf_0 = leaves.as_slice().iter().find(|leaf| leaf.function == 0);
    let is_intel = leaf_0.is_some_and(|leaf| leaf.ebx == u32::from_le_bytes(*b"Genu"));
    for leaf in leaves.as_mut_slice() {
        match leaf.function {
            FEATURES if is_intel => leaf.ecx &= !TSC_DEADLINE,
            CRYSTAL if is_intel => {
                let hz = u64::from(tsc_khz) * 1000 / u64::from(TSC_PER_TICK);
                (leaf.eax, leaf.ebx, leaf.ecx) = (1, TSC_PER_TICK, u32::try_from(hz).unwrap_or(0));
            }
            KVM_FEATURES => (leaf.eax, leaf.edx) = (KVM_FEATURE_PV_EOI, 0),
            POWER => leaf.edx |= INVARIANT_TSC,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    fn adjusted(vendor: [u8; 4]) -> impl Fn(u32) -> kvm_cpuid_entry2 {
        let leaf = |function| kvm_cpuid_entry2 {
            function,
            ebx: u32::from_le_bytes(vendor),
            eax: u32::MAX,
            ecx: u32::MAX,
            ..Default::default()
        };
        let mut leaves =
            CpuId::from_entries(&[0, 1, 0x15, 0x4000_0001, 0x8000_0007].map(leaf)).expect("few leaves");
        adjust_cpuid(&mut leaves, 3_200_000);
        move |function| {
            let found = leaves.as_slice().iter().find(|leaf| leaf.function == function);
            *found.expect("it was there")
        }
    }

    #[test]
    fn tsc_deadline_timer_is_hidden_on_intel_hosts_only() {
        let (amd, intel) = (adjusted(*b"Auth"), adjusted(*b"Genu"));
        assert_ne!(amd(1).ecx & 1 << 24, 0);
        assert_eq!(intel(1).ecx & 1 << 24, 0);
        let crystal = intel(0x15);
        assert_eq!((crystal.ebx / crystal.eax, crystal.ecx), (16, 200_000_000));
        for leaf in [amd, intel] {
            assert_eq!(
                (leaf(0x4000_0001).eax, leaf(0x4000_0001).edx),
                (KVM_FEATURE_PV_EOI, 0)
            );
            assert_ne!(leaf(0x8000_0007).edx & 1 << 8, 0);
        }
    }

    #[test]
    fn vm_wide_msrs_do_not_migrate() {
        let numbers = [0x10, 0x3B, 0x174, 0x6E0, 0x4B56_4D00, 0x4B56_4D04, 0xC000_0080];
        assert_eq!(migrated_msrs(&numbers), [0x174, 0xC000_0080]);
    }
}
