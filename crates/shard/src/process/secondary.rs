//! A secondary shard (without devices) of a VM that spans cells, from its first message to its last report.

use std::os::fd::AsFd;
use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};
use shard_api::control::ControlSocket;
use shard_api::version::VERSIONS;

use super::Files;
use super::hold::{Hold, PARK_TIMEOUT};
use super::orders::{Orders, Outcome, step};
use super::status::{clock, span_exits, stops};
use super::vcpus::VcpuThreads;
use super::{ProcessError, kvm_of, open};
use crate::arch::x86_64::layout::Layout;
use crate::arch::x86_64::state;
use crate::ending::EndSignal;
use crate::kick;
use crate::kind::SpanKind;
use crate::launch::{Answer, Ending, Order, Report, SecondaryLaunch};
use crate::machine::{self, MachineError};
use crate::memory::GuestRam;
use crate::memory::replica::Coherence;
use crate::quiescer::Quiescer;
use crate::sandbox;
use crate::span::machine::{SpanSetup, migrated_msrs, remote_bus};
use crate::span::packet::Space;
use crate::span::router::Router;
use crate::vcpu::{Vcpu, VcpuCounters};

/// The running shard as its first thread uses it.
pub struct SecondaryShard {
    orders: Orders,
    end: Arc<EndSignal>,
    kind: SpanKind<Arc<Router>, &'static Coherence>,
    vcpus: VcpuThreads,
    /// Pauses the vCPUs.
    quiescer: Arc<Quiescer>,
    /// Kept because guest memory must live as long as the vCPUs.
    _memory: GuestRam,
}

/// Creates the shard, closes its sandbox and starts its threads. Its vCPUs wait for a start-up interrupt from
/// other vCPUs.
pub fn start(
    control: &ControlSocket,
    launch: SecondaryLaunch,
    mut files: Files,
) -> Result<SecondaryShard, ProcessError> {
    let SecondaryLaunch {
        kvm,
        memory: memory_launch,
        span,
        log,
        sandbox,
    } = launch;
    let kvm = kvm_of(kvm, &mut files)?;
    kick::catch()?;
    // The file of standard error, which receives the log of this process.
    drop(files.take(log)?);
    let failed = |what| move |source| MachineError::Kvm { what, source };
    let count = u8::try_from(span.vcpus.len()).map_err(|_| MachineError::Lacking("so many vCPUs"))?;
    machine::check_kvm(&kvm, count)?;
    let layout = Layout::new(memory_launch.bytes, &[]).ok_or(MachineError::Layout)?;
    let (kind, memory) = open::span(&span, &memory_launch, &layout, &mut files)?;
    drop(files);

    let vm = machine::create_shard_vm(&kvm)?;
    machine::map_memory(&vm, &memory)?;
    let kind: SpanKind<SpanSetup, _> = kind;
    let cpuid = kind.span().cpuid(&kvm)?;
    let numbers = migrated_msrs(&state::register_numbers(&kvm).map_err(MachineError::from)?);
    let end = Arc::new(EndSignal::new()?);
    let layout = Arc::new(layout);
    let groups = kind.groups(&span.vcpus);

    // The sandbox is closed here and nowhere else: every file is open, and one thread runs.
    let closed = sandbox::close(sandbox)?;
    let kind = kind.serve(&closed.threads, &end).map_err(MachineError::from)?;
    let setup = kind.span();
    let mut vcpus = Vec::with_capacity(usize::from(count));
    for id in 0..count {
        let mut fd = vm.create_vcpu(u64::from(id)).map_err(failed("make a vCPU"))?;
        setup.prepare_vcpu(&fd, &cpuid, id, groups)?;
        let counters = Arc::new(VcpuCounters::default());
        let local = setup.vcpu(&numbers, &mut fd, id, kind.with_span(&memory), counters.clone())?;
        let bus = |space| remote_bus(space, id, &setup.router, &layout).map_err(MachineError::from);
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
    let kind = kind.try_map_span(|setup| setup.start(&closed.threads, &end, None))?;
    let router = kind.span().clone();
    let quiescer = closed.threads.quiescer().clone();
    quiescer.set_waker(move || router.wake_waiters());
    let vcpus = VcpuThreads::start(&closed.threads, vcpus)?;
    let running = Report::Running {
        sandbox_missing: closed.missing,
        sandbox_notes: closed.notes,
        versions: VERSIONS,
    };
    control.send(&running, &[])?;
    let orders = Orders::start(control, &closed.threads)?;
    closed.threads.seal_first()?;
    Ok(SecondaryShard {
        orders,
        end,
        kind,
        vcpus,
        quiescer,
        _memory: memory,
    })
}

impl SecondaryShard {
    /// Serves orders until the VM ends.
    pub fn wait(mut self) -> Ending {
        let quiescer = self.quiescer.clone();
        let mut hold = Hold::new(&quiescer);
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
            let (vcpus, kind) = (&self.vcpus, &self.kind);
            let receive = |order| perform(&order, vcpus, kind, &mut hold);
            if ordered && let Some(ending) = self.orders.receive(receive) {
                break ending;
            }
        };
        self.end.end(ending);
        // Resumes paused vCPUs, so that they see the end.
        drop(hold);
        self.kind.end();
        // Threads that wait for a page of a lost shard wait forever.
        if self.kind.memory_is_whole(|never| match *never {}) {
            self.vcpus.stop();
        }
        self.end.cause().unwrap_or(Ending::Quit)
    }
}

fn perform(
    order: &Order,
    vcpus: &VcpuThreads,
    kind: &SpanKind<Arc<Router>, &Coherence>,
    hold: &mut Hold<'_>,
) -> Outcome {
    let answer = match order {
        Order::Quit => return Outcome::End(Ending::Quit),
        Order::Status => {
            let coherence = match kind {
                SpanKind::SharedSpan(_) => Value::Null,
                SpanKind::CoherentSpan(_, coherence) => coherence.status(),
                SpanKind::Plain(never) => match *never {},
            };
            let clock = clock(kind.span());
            Answer::Status(json!({
                "exits": span_exits(&vcpus.counters),
                "stops": stops(&vcpus.stops),
                "coherence": coherence,
                "clock": clock,
            }))
        }
        Order::Step { offset } => {
            step(kind.span(), *offset);
            Answer::Done
        }
        Order::Pause => pause(hold),
        Order::Resume => {
            hold.end(None);
            Answer::Done
        }
        Order::StopVcpu { vcpu, for_ms } => vcpus.obey_stop(*vcpu, *for_ms, Some(kind.span())),
        Order::ContinueVcpu { vcpu } => vcpus.obey_continue(*vcpu, Some(kind.span())),
        Order::VcpuStatistics { first } => return vcpus.pass_statistics(*first),
        Order::PowerButton
        | Order::Balloon { .. }
        | Order::Move { .. }
        | Order::Shared { .. }
        | Order::MemoryNodes { .. }
        | Order::PageMap { .. }
        | Order::Resident { .. }
        | Order::LimitDisks(_)
        | Order::Nmi
        | Order::Reset => Answer::Refused {
            why: "the order is for the VM's home".to_owned(),
        },
    };
    Outcome::Answer(answer)
}

/// Pauses the vCPUs of this shard. Pages and packets of the other shards are served meanwhile, by threads
/// that do not take part in a pause.
fn pause(hold: &mut Hold<'_>) -> Answer {
    if hold.begin(PARK_TIMEOUT) {
        return Answer::Done;
    }
    Answer::Refused {
        why: format!(
            "its vCPUs do not leave the guest within {} s, so that it cannot be paused",
            PARK_TIMEOUT.as_secs()
        ),
    }
}
