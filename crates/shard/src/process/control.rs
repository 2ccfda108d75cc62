//! The first thread while the VM runs: it serves the monitor's orders, waits for the end and stops the other
//! threads.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use diskstore::disk::BaseWatch;
use nix::poll::{PollFd, PollFlags, poll};
use vmm_sys_util::eventfd::EventFd;

use super::freeze::Freezer;
use super::hold::{DRAIN_TIMEOUT, Hold};
use super::orders::{Orders, Outcome, step};
use super::status::status;
use super::vcpus::VcpuThreads;
use crate::chain::chain;
use crate::kind::{RunningKind, VmKind};
use crate::launch::{Answer, Ending, MoveReport, Order, Report};
use crate::machine::{PlainVm, Running};
use crate::memory::nodes::MemoryNodes;
use crate::pci::PciBus;
use crate::quiescer::Quiescer;
use crate::span::router::Router;
use crate::virtio::balloon::BalloonHandle;
use crate::virtio::block::{DiskLimiters, FullDisks};

/// Interval of the first thread's checks of the disks: changed bases and full disks, milliseconds.
const WATCH_INTERVAL: u16 = 1000;
/// Time limit of a vCPU's migration: the vCPU may be waiting for a device.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(5);

/// The running VM as its first thread uses it.
pub struct Control {
    pub orders: Orders,
    pub running: Running,
    pub vcpus: VcpuThreads,
    /// Pauses the VM.
    pub quiescer: Arc<Quiescer>,
    pub freezer: Freezer,
    pub bus: PciBus,
    pub balloon: Option<BalloonHandle>,
    /// Watch of the disks' bases, which must not change.
    pub watch: BaseWatch,
    /// Disks whose writes wait for room on the host.
    pub full: ReportedDisks,
    /// Limits of the disks' requests.
    pub limiters: DiskLimiters,
    /// Ends the background thread of sharing when dropped.
    pub _stop_sharing: mpsc::Sender<()>,
    pub console_thread: JoinHandle<()>,
    pub stop_console: EventFd,
    /// The kind of VM.
    pub kind: RunningKind,
}

impl Control {
    /// Serves orders until the VM ends, then stops all threads.
    pub fn wait(mut self) -> Ending {
        let quiescer = self.quiescer.clone();
        let mut hold = Hold::new(&quiescer);
        let mut has_waited = false;
        let ending = loop {
            if let Some(ending) = self.running.end.cause() {
                break ending;
            }
            let mut files = [
                PollFd::new(self.running.end.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.orders.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.freezer.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut files, WATCH_INTERVAL) {
                Ok(_) | Err(nix::Error::EINTR) => {
                    if let Some(detail) = self.watch.changed() {
                        break Ending::ShardFailed { detail };
                    }
                }
                Err(error) => {
                    break Ending::ShardFailed {
                        detail: format!("cannot wait: {error}"),
                    };
                }
            }
            if !std::mem::replace(&mut has_waited, true) {
                // The first wait is over, and with it the start.
                page::program::release();
            }
            let [_, ordered, asked_to_freeze] = files.map(|file| file.any().unwrap_or(false));
            if let Some(disks) = self.full.changed() {
                self.orders.report(&Report::FullDisks { disks });
            }
            if ordered {
                let mut context = OrderContext {
                    hold: &mut hold,
                    running: &self.running,
                    vcpus: &self.vcpus,
                    nodes: &mut self.freezer.nodes,
                    bus: &self.bus,
                    balloon: self.balloon.as_ref(),
                    limiters: &self.limiters,
                    kind: &self.kind,
                };
                if let Some(ending) = self.orders.receive(|order| context.perform(order)) {
                    break ending;
                }
            }
            if asked_to_freeze {
                self.freezer.serve(&self.running, &self.bus, &self.kind, &hold);
            }
        };
        let end = self.running.end.clone();
        end.end(ending);
        // Resumes paused vCPUs, so that they see the end.
        drop(hold);
        self.stop();
        // The first cause: a power-off may have preceded an order to quit.
        end.cause().unwrap_or(Ending::Quit)
    }

    /// Stops the vCPUs, then sends the rest of the console's output.
    fn stop(self) {
        self.kind.end();
        // If pages can't be fetched, vCPUs and devices wait forever. Data that are not on a disk yet are
        // lost, as by a power cut.
        if self.kind.memory_is_whole(PlainVm::memory_is_whole) {
            self.vcpus.stop();
            // Disks write the data that they have acknowledged.
            self.bus.stop();
        }
        let _ = self.stop_console.write(1);
        let _ = self.console_thread.join();
    }
}

/// The full disks, and those of them that the monitor has received.
pub struct ReportedDisks {
    full: FullDisks,
    reported: Vec<u16>,
}

impl ReportedDisks {
    /// Creates the state in which the monitor has received no full disk.
    pub fn new(full: FullDisks) -> Self {
        Self {
            full,
            reported: Vec::new(),
        }
    }

    /// Returns the full disks if they have changed.
    fn changed(&mut self) -> Option<Vec<u16>> {
        let now = self.full.now();
        (now != self.reported).then(|| {
            self.reported.clone_from(&now);
            now
        })
    }
}

fn for_plain_vms() -> Answer {
    let why = "a VM that spans cells does not do this; start it without `span`".to_owned();
    Answer::Refused { why }
}

fn not_paused() -> Answer {
    let why = format!(
        "its disks take more than {} s to finish the I/O in flight, so that it cannot be paused",
        DRAIN_TIMEOUT.as_secs()
    );
    Answer::Refused { why }
}

/// The parts of the running VM that an order may use and change.
struct OrderContext<'a, 'quiescer> {
    hold: &'a mut Hold<'quiescer>,
    running: &'a Running,
    vcpus: &'a VcpuThreads,
    nodes: &'a mut MemoryNodes,
    bus: &'a PciBus,
    balloon: Option<&'a BalloonHandle>,
    limiters: &'a DiskLimiters,
    kind: &'a RunningKind,
}

impl OrderContext<'_, '_> {
    fn perform(&mut self, order: Order) -> Outcome {
        let answer = match order {
            Order::PowerButton => {
                // The counter can't overflow; a pending press suffices.
                let _ = self.running.button.press();
                Answer::Done
            }
            Order::Balloon { bytes } => {
                if let Some(balloon) = self.balloon {
                    balloon.set_bytes(bytes);
                }
                Answer::Done
            }
            Order::Status => {
                let console = self.running.console.counters();
                Answer::Status(status(self.vcpus, console, self.bus, self.kind))
            }
            Order::VcpuStatistics { first } => return self.vcpus.pass_statistics(first),
            Order::Move { vcpu, shard } => Answer::Moved(self.move_vcpu(vcpu, shard)),
            Order::Step { offset } => {
                match self.kind {
                    VmKind::Plain(_) => {}
                    VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) => step(router, offset),
                }
                Answer::Done
            }
            Order::Shared { files } => {
                if let VmKind::Plain(plain) = self.kind
                    && let Some(sharing) = plain.memory.sharing()
                {
                    sharing.pressure.set_shared(&files);
                }
                Answer::Done
            }
            Order::MemoryNodes { nodes, from } => self.place_memory(&nodes, from),
            Order::PageMap { from } => self.page_map(from),
            Order::Resident { bytes } => self.limit_resident(bytes),
            Order::LimitDisks(limits) => match self.limiters.set(&limits) {
                Ok(()) => Answer::Done,
                Err(why) => Answer::Refused { why: why.to_owned() },
            },
            Order::Pause => self.pause(),
            Order::Resume => {
                let plain = match self.kind {
                    VmKind::Plain(plain) => Some(plain),
                    VmKind::SharedSpan(_) | VmKind::CoherentSpan(..) => None,
                };
                self.hold.end(plain);
                Answer::Done
            }
            Order::StopVcpu { vcpu, for_ms } => self.vcpus.obey_stop(vcpu, for_ms, self.router()),
            Order::ContinueVcpu { vcpu } => self.vcpus.obey_continue(vcpu, self.router()),
            Order::Nmi => self.nmi(),
            Order::Reset => return Outcome::End(Ending::Reboot),
            Order::Quit => return Outcome::End(Ending::Quit),
        };
        Outcome::Answer(answer)
    }

    /// Binds the memory to these nodes and moves some of the pages that are elsewhere. Pages of image files
    /// stay.
    fn place_memory(&mut self, nodes: &[u32], from: u64) -> Answer {
        let VmKind::Plain(plain) = self.kind else {
            return for_plain_vms();
        };
        let Running { memory, layout, .. } = self.running;
        let of_images = |range: &Range<u64>| {
            let sharing = plain.memory.sharing();
            sharing.map_or_else(Vec::new, |sharing| sharing.mapper.of_images(range))
        };
        let changed = self.nodes.change(memory, layout, nodes);
        match changed.and_then(|()| self.nodes.move_from(memory, layout, from, of_images)) {
            Ok(next) => Answer::MemoryMoved { next },
            Err(error) => Answer::Refused { why: chain(&error) },
        }
    }

    /// Reports the origins of some pages.
    fn page_map(&self, from: u64) -> Answer {
        let sharing = match self.kind {
            VmKind::Plain(plain) => plain.memory.sharing(),
            VmKind::SharedSpan(_) | VmKind::CoherentSpan(..) => None,
        };
        let Some(sharing) = sharing else {
            return Answer::Refused {
                why: "the origins of its pages are not recorded, as they are not shared: it spans cells, is \
                      paged, or has huge pages of the host's pool"
                    .to_owned(),
            };
        };
        match sharing.mapper.page_map(from) {
            Ok(part) => Answer::PageMap(part),
            Err(error) => Answer::Refused { why: chain(&error) },
        }
    }

    /// Sets the limit of pages in memory.
    fn limit_resident(&self, bytes: u64) -> Answer {
        let paging = match self.kind {
            VmKind::Plain(plain) => plain.memory.paging(),
            VmKind::SharedSpan(_) | VmKind::CoherentSpan(..) => None,
        };
        match paging {
            Some(paging) => {
                paging.set_limit(bytes);
                Answer::Done
            }
            None => Answer::Refused {
                why: "the VM's memory is not paged; start it with `resident`".to_owned(),
            },
        }
    }

    fn pause(&mut self) -> Answer {
        // Of a VM that spans cells this is the home. The monitor pauses the other shards first: their vCPUs
        // may wait for a device.
        if self.hold.begin(DRAIN_TIMEOUT) {
            Answer::Done
        } else {
            not_paused()
        }
    }

    /// Returns the router of a VM that spans cells.
    fn router(&self) -> Option<&Router> {
        match self.kind {
            VmKind::Plain(_) => None,
            VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) => Some(router),
        }
    }

    /// Sends each vCPU a non-maskable interrupt. KVM accepts it from other threads while the vCPUs of a plain
    /// VM are paused.
    fn nmi(&self) -> Answer {
        let vcpus = match self.kind {
            VmKind::Plain(PlainVm { vcpus, .. }) => vcpus,
            VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) => {
                // It waits in the event slot of a vCPU that is paused.
                router.nmi_all();
                return Answer::Done;
            }
        };
        let Some(_pause) = self.hold.pause_for_caller() else {
            return not_paused();
        };
        match vcpus.iter().try_for_each(|vcpu| vcpu.nmi()) {
            Ok(()) => Answer::Done,
            Err(error) => Answer::Refused {
                why: format!("KVM takes no non-maskable interrupt: {error}"),
            },
        }
    }

    fn move_vcpu(&self, vcpu: u8, shard: u8) -> MoveReport {
        let refused = |why: &str| MoveReport::Refused { why: why.to_owned() };
        if self.hold.is_held() {
            return refused("the VM is paused; resume it first, by `mirrorball resume`");
        }
        let router = match self.kind {
            VmKind::Plain(_) => return refused("the VM does not span cells; start it with `span`"),
            VmKind::SharedSpan(router) | VmKind::CoherentSpan(router, _) => router,
        };
        match router.owner(vcpu) {
            None => return refused("the VM has no such vCPU"),
            Some(owner) if owner.shard == shard => return MoveReport::Done { still_ns: 0 },
            Some(_) => {}
        }
        let end = &self.running.end;
        let deadline = Instant::now() + MIGRATION_TIMEOUT;
        match router.move_vcpu(vcpu, shard, deadline, || end.stopping()) {
            Some(outcome) if outcome.refused => refused("the other shard cannot take it; its log says why"),
            Some(outcome) => MoveReport::Done {
                still_ns: outcome.still_ns,
            },
            None if end.stopping() => refused("the VM is ending"),
            None => {
                refused("it does not leave the guest: a device or the host keeps it; it moves when it does")
            }
        }
    }
}
