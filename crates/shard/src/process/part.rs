//! A shard without devices of a VM that spans cells, from its first message to its last report.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::json;

use super::Files;
use super::orders::step;
use super::orders::{self, Orders};
use super::status::{clock, exits};
use super::vcpus::VcpuThreads;
use super::{ProcessError, kvm_of, log};
use crate::arch::x86_64::cpuid::Groups;
use crate::arch::x86_64::layout::Layout;
use crate::arch::x86_64::state;
use crate::ending::EndSignal;
use crate::kick;
use crate::launch::{Ending, Order, PartLaunch, Report};
use crate::machine::{self, MachineError};
use crate::memory::replica::Coherence;
use crate::memory::{self, SpanMemory};
use crate::sandbox;
use crate::span::host::cpuid;
use crate::span::local::VcpuCoherence;
use crate::span::machine::{Channels, SpanParts, forwarded, travelling, wake_promptly};
use crate::span::packet::Space;
use crate::span::router::Router;
use crate::vcpu::{Vcpu, VcpuCounters};

/// The running shard as its first thread has it.
pub struct Part {
    orders: Orders,
    end: Arc<EndSignal>,
    router: Arc<Router>,
    vcpus: VcpuThreads,
    coherence: Option<&'static Coherence>,
    /// Kept: the guest's memory lives as long as its vCPUs.
    _memory: memory::GuestRam,
}

/// Makes the shard, closes its sandbox, starts its threads. Its vCPUs wait for others to start them.
pub fn start(control: &mut UnixStream, launch: PartLaunch, mut files: Files) -> Result<Part, ProcessError> {
    let PartLaunch {
        kvm,
        memory: memory_launch,
        span,
        log,
        sandbox,
    } = launch;
    let kvm = kvm_of(kvm, &mut files)?;
    kick::catch()?;
    wake_promptly();
    let _log = log::to_file(files.take(log)?);
    let channels = Channels::take(&span, &mut files)?;
    let made_of = SpanMemory::take(&span, memory_launch.bytes, &mut files).map_err(MachineError::from)?;
    drop(files);

    let failed = |what| move |source| MachineError::Kvm { what, source };
    let count = u8::try_from(span.vcpus.len()).map_err(|_| MachineError::Lacking("so many vCPUs"))?;
    machine::check_kvm(&kvm, count)?;
    let layout = Layout::new(memory_launch.bytes, &[]).ok_or(MachineError::Layout)?;
    let memory =
        memory::create_spanning(&layout, &memory_launch, &span, &made_of).map_err(MachineError::from)?;
    let vm = machine::create_shard_vm(&kvm)?;
    machine::map_memory(&vm, &memory)?;
    let cpuid = cpuid(&kvm, &span.cpuid)?;
    let numbers = travelling(&state::register_numbers(&kvm).map_err(MachineError::from)?);
    let end = Arc::new(EndSignal::new()?);
    let layout = Arc::new(layout);
    let parts = SpanParts::new(&span, channels);
    let groups = match span.coherence {
        Some(_) => Groups::of_coherent(&span.vcpus),
        None => Groups::of(&span.vcpus),
    };

    // The one place where the sandbox closes: every file is open, and one thread runs.
    let closed = sandbox::close(sandbox)?;
    let coherence = match made_of {
        SpanMemory::Replica(replica) => {
            let served = replica.start(&closed.threads, &end);
            Some(served.map_err(MachineError::from)?)
        }
        SpanMemory::Files(_) => None,
    };
    let mut vcpus = Vec::with_capacity(usize::from(count));
    for id in 0..count {
        let mut fd = vm.create_vcpu(u64::from(id)).map_err(failed("make a vCPU"))?;
        parts.pace(&fd)?;
        machine::prepare_vcpu(&fd, &cpuid, id, groups, true)?;
        let counters = Arc::new(VcpuCounters::default());
        let mut local = parts.vcpu(&numbers, &fd, id, &memory, counters.clone())?;
        if let Some(coherence) = coherence {
            local.follow(VcpuCoherence::of(&mut fd, id, coherence));
        }
        let bus = |space| forwarded(space, id, &parts.router, &layout).map_err(MachineError::from);
        let vcpu = Vcpu {
            fd,
            ports: bus(Space::Ports)?,
            mmio: bus(Space::Memory)?,
            end: end.clone(),
            counters,
            local,
        };
        vcpus.push(vcpu.into_thread());
    }
    if let Some(causal) = coherence.and_then(Coherence::causal) {
        parts.router.follow(causal);
    }
    let router = parts.start(&closed.threads, &end, None)?;
    let vcpus = VcpuThreads::start(&closed.threads, vcpus)?;
    orders::report(
        control,
        &Report::Running {
            sandbox_missing: closed.missing,
            sandbox_notes: closed.notes,
        },
    )?;
    closed.threads.seal_first()?;
    Ok(Part {
        orders: Orders::new(control.try_clone()?),
        end,
        router,
        vcpus,
        coherence,
        _memory: memory,
    })
}

impl Part {
    /// Serves orders until the VM ends.
    pub fn wait(mut self) -> Ending {
        let ending = loop {
            if let Some(ending) = self.end.cause() {
                break ending;
            }
            let mut files = [
                PollFd::new(self.end.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.orders.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut files, PollTimeout::NONE) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(error) => {
                    break Ending::ShardFailed {
                        detail: format!("cannot wait: {error}"),
                    };
                }
            }
            let ordered = files[1].any().unwrap_or(false);
            let (counters, coherence, router) = (&self.vcpus.counters, self.coherence, &self.router);
            if ordered
                && let Some(ending) = self
                    .orders
                    .receive(|orders, order| obey(orders, &order, counters, coherence, router))
            {
                break ending;
            }
        };
        self.end.end(ending);
        self.router.end();
        // Those that wait for a page that comes no more wait for ever.
        if self.coherence.is_none_or(Coherence::is_whole) {
            self.vcpus.stop();
        }
        self.end.cause().unwrap_or(Ending::Quit)
    }
}

fn obey(
    orders: &mut Orders,
    order: &Order,
    counters: &[Arc<VcpuCounters>],
    coherence: Option<&Coherence>,
    router: &Router,
) -> Option<Ending> {
    match order {
        Order::Quit => Some(Ending::Quit),
        Order::Status => {
            let coherence = coherence.map(Coherence::status);
            let clock = clock(router);
            let status = json!({ "exits": exits(counters, true), "coherence": coherence, "clock": clock });
            orders.answer(&Report::Status(status));
            None
        }
        Order::Step { offset } => {
            step(router, *offset);
            None
        }
        // These are for the home.
        Order::PowerButton | Order::Balloon { .. } | Order::Move { .. } | Order::Shared { .. } => None,
    }
}
