//! The drivers of a cell's CPUs, where the cluster file says `cpus = "gangs"`: a thread for each CPU, and one
//! that brings VMs to them.
//!
//! ```text
//!  adoptions, boots, updates ──► Scheduler ──► facts, vCPUs ──► CpuThread of each CPU ──► orders to shards
//!                                                                 │    ▲
//!                                                 messages between drivers, published words
//! ```
//!
//! All decisions are [`policy::cpu`]'s. [`cpu_thread`] runs a driver, [`published`] has what drivers read of
//! each other, [`gate`] decides which vCPUs are stopped, [`activity`] which have work, [`vcpu_threads`] reads
//! and orders their threads, and [`vm_table`] places VMs.
//!
//! VMs that span cells have windows in all their cells at once ([`policy::cpu::windows`]). The drivers have
//! the [`parts`] in their cell, and the process of the home stops the vCPUs ([`span_gate`]).
//!
//! VMs that span hosts, VMs with a vCPU on a CPU of another cell, VMs of other users and VMs whose monitor is
//! no cell are not scheduled here: Linux divides what the gate leaves them.

mod activity;
mod cpu_thread;
mod gate;
pub(crate) mod host_clock;
pub(crate) mod local_load;
mod observer;
mod order;
mod part_threads;
pub(crate) mod parts;
mod published;
pub(crate) mod span_gate;
#[cfg(test)]
mod tests;
mod vcpu_threads;
mod vm_table;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use config::cluster::HostNodes;
use policy::cpu::entry::VcpuEntry;
use policy::cpu::message::Event;
use policy::cpu::reserved_time::{excess, share};
use policy::cpu::topology::{CpuPlace, Topology};
use policy::cpu::tunables::Tunables;
use policy::cpu::{CpuId, VcpuId, VmId};
use registry::cluster::interface::CpuQueue;
use tracing::{debug, info, warn};
use urpc::published::Published;

use self::cpu_thread::{CpuThread, Input, Shared};
use self::local_load::LocalLoad;
use self::observer::Observer;
use self::order::Outcome;
use self::parts::{Part, ScheduledPart};
use self::published::{CpuState, VmFacts};
use self::span_gate::SpanGate;
use self::vcpu_threads::{ShardThreads, VcpuThreads};
use self::vm_table::{CpuUse, Unplaced, VmSettings, next_number, place, vcpus};
use crate::handle::{VmChange, VmHandle};

/// Interval and number of attempts to find the threads of vCPUs that have just started: each names itself.
const FIND_INTERVAL: Duration = Duration::from_millis(10);
const FIND_TRIES: u32 = 50;
/// Time limit for a report of the run queues.
const REPORT_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for the drivers to leave a VM to Linux.
const RELEASE_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for the end of the drivers' threads.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Message to the scheduler's thread. VMs are named by their addresses on the socket device.
enum Change {
    /// The cell's process serves a VM.
    Served(u32, VmHandle),
    /// It does not any more.
    Over(u32),
    Of(u32, VmChange),
    /// A vCPU of a VM is to move to this CPU of the host.
    Order(u32, u8, usize, Sender<Outcome>),
    /// The drivers are to leave a VM to Linux. The reply says whether all of them did.
    Release(u32, Sender<bool>),
    /// Report the run queues.
    Report(Sender<Vec<CpuQueue>>),
    /// Report the load by VMs in this cell alone.
    LocalWeight(Sender<u32>),
    /// These are the parts of VMs that span cells.
    Parts(BTreeMap<String, Part>),
    /// The drivers are to end; the reply comes when all VMs are Linux's again.
    End(Sender<()>),
}

/// Drivers of a cell. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub(crate) struct Scheduler {
    changes: Sender<Change>,
    span_gate: SpanGate,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scheduler")
            .field("cpus", &self.shared.host_cpus)
            .finish_non_exhaustive()
    }
}

impl Scheduler {
    /// Starts the drivers of a cell's CPUs, which are sorted. `host` has the nodes of the CPUs.
    ///
    /// # Errors
    /// If the host has no threads left.
    pub(crate) fn start(cpus: &[usize], host: &HostNodes, tunables: Tunables) -> io::Result<Self> {
        let topology = topology(cpus, host);
        let shared = Arc::new(Shared::new(cpus.to_vec(), topology, tunables));
        let table = VmTable::start(Arc::clone(&shared))?;
        let span_gate = SpanGate::start()?;
        let (changes, changed) = mpsc::channel();
        std::thread::Builder::new()
            .name("scheduler".into())
            .spawn(move || table.run(&changed))?;
        info!(
            ?cpus,
            "the vCPUs of each VM run together on the CPUs of this cell"
        );
        Ok(Self {
            changes,
            span_gate,
            shared,
        })
    }

    /// Schedules a VM from now on, through its reboots.
    pub(crate) fn serve(&self, vm: u32, handle: &VmHandle) {
        handle.observe(Box::new(Observer::new(vm, self.clone())));
        let _ = self.changes.send(Change::Served(vm, handle.clone()));
    }

    /// Schedules a VM no longer: it has ended, or another process serves it.
    pub(crate) fn is_over(&self, vm: u32) {
        let _ = self.changes.send(Change::Over(vm));
    }

    /// The run queues of the CPUs, as their drivers last published them. Empty if the scheduler does not
    /// answer within [`REPORT_LIMIT`].
    pub(crate) fn queues(&self) -> Vec<CpuQueue> {
        let (tell, told) = mpsc::channel();
        let _ = self.changes.send(Change::Report(tell));
        told.recv_timeout(REPORT_LIMIT).unwrap_or_default()
    }

    /// The sum of the weights of the busy vCPUs of VMs in this cell alone, for each CPU. 0 if the scheduler
    /// does not answer within [`REPORT_LIMIT`].
    pub(crate) fn local_weight(&self) -> u32 {
        let (tell, told) = mpsc::channel();
        let _ = self.changes.send(Change::LocalWeight(tell));
        told.recv_timeout(REPORT_LIMIT).unwrap_or(0)
    }

    /// Gives the drivers the parts of VMs that span cells, by the VMs' names.
    pub(crate) fn set_parts(&self, parts: BTreeMap<String, Part>) {
        let _ = self.changes.send(Change::Parts(parts));
    }

    /// The thread that stops vCPUs of VMs that span cells and have their home in this cell.
    pub(crate) fn span_gate(&self) -> &SpanGate {
        &self.span_gate
    }

    /// Ends the drivers, and lets the vCPUs use all their CPUs again. Their stops run out within 100 ms.
    pub(crate) fn end(&self) {
        self.span_gate.end();
        let (tell, told) = mpsc::channel();
        if self.changes.send(Change::End(tell)).is_ok() {
            // The process ends in any case.
            let _ = told.recv_timeout(END_LIMIT);
        }
    }
}

/// The places of a cell's CPUs. The cell's own number is of no use here: all are of one cell.
fn topology(cpus: &[usize], host: &HostNodes) -> Topology {
    let node = |cpu: &usize| {
        let mut nodes = host.0.iter();
        let known = nodes.find(|(_, node)| node.cpus.contains(cpu));
        known.map_or(0, |(number, _)| u16::try_from(*number).unwrap_or(u16::MAX))
    };
    let place = |cpu| CpuPlace {
        cell: 0,
        node: node(cpu),
    };
    Topology::new(cpus.iter().map(place).collect())
}

/// The VMs of the cell, as the drivers have them.
struct VmTable {
    shared: Arc<Shared>,
    peers: Vec<Sender<Input>>,
    vms: BTreeMap<u32, KnownVm>,
    /// Parts of VMs that span cells, by name.
    parts: BTreeMap<String, ScheduledPart>,
    local_load: LocalLoad,
    last_number: VmId,
}

struct KnownVm {
    handle: VmHandle,
    /// Attempts that are left to find the threads of its vCPUs; none if it is not awaited.
    tries: Option<u32>,
    scheduled: Option<ScheduledVm>,
}

struct ScheduledVm {
    number: VmId,
    settings: VmSettings,
    facts: Arc<VmFacts>,
}

impl VmTable {
    /// An empty table, and the thread of each CPU.
    fn start(shared: Arc<Shared>) -> io::Result<Self> {
        let cpus = &shared.host_cpus;
        let (peers, inputs): (Vec<_>, Vec<_>) = cpus.iter().map(|_| mpsc::channel()).unzip();
        for ((id, cpu), inputs) in (0..).zip(cpus).zip(inputs) {
            let thread = CpuThread::new(CpuId(id), Arc::clone(&shared), peers.clone());
            std::thread::Builder::new()
                .name(format!("cpu{cpu}"))
                .spawn(move || thread.run(&inputs))?;
        }
        Ok(Self {
            shared,
            peers,
            vms: BTreeMap::new(),
            parts: BTreeMap::new(),
            local_load: LocalLoad::default(),
            last_number: VmId::default(),
        })
    }

    fn run(mut self, changes: &Receiver<Change>) {
        loop {
            let is_awaited = self.vms.values().any(|vm| vm.tries.is_some());
            let change = match is_awaited {
                true => changes.recv_timeout(FIND_INTERVAL),
                false => changes.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match change {
                Ok(Change::End(tell)) => {
                    self.end();
                    let _ = tell.send(());
                    return;
                }
                Ok(change) => self.take(change),
                Err(RecvTimeoutError::Timeout) => self.retry(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn take(&mut self, change: Change) {
        match change {
            Change::Served(vm, handle) => {
                self.remove(vm);
                let known = KnownVm {
                    handle,
                    tries: None,
                    scheduled: None,
                };
                self.vms.insert(vm, known);
                self.await_threads(vm);
            }
            Change::Over(vm) => {
                self.remove(vm);
                self.vms.remove(&vm);
            }
            Change::Of(vm, VmChange::Booted) => {
                self.remove(vm);
                self.await_threads(vm);
            }
            Change::Of(vm, VmChange::Ended) => self.remove(vm),
            Change::Of(vm, VmChange::Updated) => self.update(vm),
            Change::Order(vm, vcpu, cpu, tell) => self.order(vm, vcpu, cpu, tell),
            Change::Release(vm, tell) => _ = tell.send(self.release(vm)),
            Change::Report(tell) => _ = tell.send(self.queues()),
            Change::LocalWeight(tell) => _ = tell.send(self.local_weight()),
            Change::Parts(parts) => self.set_parts(parts),
            Change::End(_) => {}
        }
    }

    fn await_threads(&mut self, vm: u32) {
        if let Some(known) = self.vms.get_mut(&vm) {
            known.tries = Some(FIND_TRIES);
        }
        self.retry();
    }

    /// Tries to schedule the VMs whose threads are awaited.
    fn retry(&mut self) {
        let awaited: Vec<u32> = self
            .vms
            .iter()
            .filter(|(_, vm)| vm.tries.is_some())
            .map(|(vm, _)| *vm)
            .collect();
        for vm in awaited {
            let Some(known) = self.vms.get_mut(&vm) else {
                continue;
            };
            let (handle, tries) = (known.handle.clone(), known.tries.unwrap_or(0));
            let settings = settings_of(&handle);
            let is_driven = |settings: &VmSettings| !settings.is_away && handle.running_home().is_some();
            let Some(settings) = settings.filter(is_driven) else {
                // Its boot, or the return of its vCPUs, is reported.
                known.tries = None;
                continue;
            };
            match ShardThreads::find(&handle, settings.vcpus) {
                Ok(threads) => {
                    known.tries = None;
                    self.schedule(vm, settings, Arc::new(threads));
                }
                Err(error) => {
                    known.tries = tries.checked_sub(1);
                    if known.tries.is_none() {
                        warn!(%error, "the vCPUs of a VM are left to Linux");
                    }
                }
            }
        }
    }

    /// Brings a VM's vCPUs to the drivers of the CPUs where there is most room.
    fn schedule(&mut self, vm: u32, settings: VmSettings, threads: Arc<dyn VcpuThreads>) {
        let placed = self.number().and_then(|number| {
            let cpus = place(
                &settings,
                &self.shared.host_cpus,
                &self.shared.topology,
                &self.cpu_use(),
            );
            Ok((number, cpus?))
        });
        let (number, cpus) = match placed {
            Ok(placed) => placed,
            Err(unplaced) => {
                warn!("the vCPUs of a VM are left to Linux: {unplaced}");
                return;
            }
        };
        let entry = |cpu: &CpuId| {
            let entry = VcpuEntry {
                cpu: *cpu,
                ..VcpuEntry::default()
            };
            Published::new(entry.pack())
        };
        let facts = Arc::new(VmFacts {
            terms: settings.terms(),
            cpus: settings.cpus(&self.shared.host_cpus),
            entries: cpus.iter().map(entry).collect(),
            threads,
            windows: None,
        });
        debug!(vm, number = number.0, ?cpus, "the drivers have a VM");
        self.last_number = number;
        // All drivers know the VM before one of them can send a message about it.
        self.send_facts(number, Some(&facts));
        for (vcpu, cpu) in vcpus(number, settings.vcpus).zip(&cpus) {
            let is_awake = true;
            self.send(*cpu, Input::Event(Event::Add { vcpu, is_awake }));
        }
        if let Some(known) = self.vms.get_mut(&vm) {
            known.scheduled = Some(ScheduledVm {
                number,
                settings,
                facts,
            });
        }
    }

    /// Takes a VM's vCPUs from the drivers.
    fn remove(&mut self, vm: u32) {
        let scheduled = self.vms.get_mut(&vm).and_then(|known| {
            known.tries = None;
            known.scheduled.take()
        });
        if let Some(scheduled) = scheduled {
            self.send_facts(scheduled.number, None);
        }
    }

    /// Takes a VM from the drivers, and waits until each of them has left its threads alone.
    fn release(&mut self, vm: u32) -> bool {
        self.remove(vm);
        let (tell, told) = mpsc::channel();
        for cpu in 0..self.peers.len() {
            self.send(CpuId(cpu as u16), Input::Passed(tell.clone()));
        }
        drop(tell);
        let deadline = Instant::now() + RELEASE_LIMIT;
        (0..self.peers.len()).all(|_| {
            let left = deadline.saturating_duration_since(Instant::now());
            told.recv_timeout(left).is_ok()
        })
    }

    /// Applies new terms of a VM; places it anew if its pins have changed. A pin has widened the affinity of
    /// the vCPU's thread, so that the drivers restrict all threads of the VM again.
    fn update(&mut self, vm: u32) {
        let Some(known) = self.vms.get_mut(&vm) else {
            return;
        };
        let settings = settings_of(&known.handle);
        let (settings, scheduled) = match (settings, &mut known.scheduled) {
            (Some(settings), Some(scheduled)) if !settings.is_away => (settings, scheduled),
            (Some(settings), None) if !settings.is_away => return self.await_threads(vm),
            _ => return self.remove(vm),
        };
        if settings.pins != scheduled.settings.pins {
            let threads = Arc::clone(&scheduled.facts.threads);
            self.remove(vm);
            self.schedule(vm, settings, threads);
            return;
        }
        let facts = VmFacts {
            terms: settings.terms(),
            ..VmFacts::clone(&scheduled.facts)
        };
        let before = scheduled.settings.reservation_permille;
        scheduled.facts = Arc::new(facts);
        scheduled.settings = settings;
        let is_larger = scheduled.settings.reservation_permille > before;
        let (number, facts) = (scheduled.number, Arc::clone(&scheduled.facts));
        self.send_facts(number, Some(&facts));
        if is_larger {
            self.make_room(vm);
        }
    }

    /// Places a VM anew whose larger reservation has no room on the CPUs of its vCPUs.
    fn make_room(&mut self, vm: u32) {
        let scheduled = self.vms.get(&vm).and_then(|vm| vm.scheduled.as_ref());
        let Some(scheduled) = scheduled.filter(|scheduled| self.is_overcommitted(scheduled)) else {
            return;
        };
        let (settings, threads) = (scheduled.settings.clone(), Arc::clone(&scheduled.facts.threads));
        self.remove(vm);
        self.schedule(vm, settings, threads);
    }

    /// Has the driver of a CPU take a vCPU, or reports why none can.
    fn order(&self, vm: u32, vcpu: u8, cpu: usize, tell: Sender<Outcome>) {
        let scheduled = self.vms.get(&vm).and_then(|vm| vm.scheduled.as_ref());
        let Some(scheduled) = scheduled else {
            // A client that has gone gets no answer.
            let _ = tell.send(Outcome::NotDriven);
            return;
        };
        let Some(id) = self.shared.host_cpus.iter().position(|own| *own == cpu) else {
            let _ = tell.send(Outcome::NoCpu);
            return;
        };
        let vcpu = VcpuId {
            vm: scheduled.number,
            index: vcpu.into(),
        };
        self.send(CpuId(id as u16), Input::Order(vcpu, tell));
    }

    fn queues(&self) -> Vec<CpuQueue> {
        let name = |number: VmId| {
            let numbered = |vm: &&KnownVm| vm.scheduled.as_ref().is_some_and(|vm| vm.number == number);
            let Some(vm) = self.vms.values().find(numbered) else {
                let part = self.parts.iter().find(|(_, part)| part.number == number);
                return part.map(|(name, _)| name.clone());
            };
            vm.handle.recorder().read(|record| record.name.clone())
        };
        let cpus = self.shared.cpus.iter().zip(&self.shared.host_cpus);
        let queue = |(state, cpu): (&CpuState, &usize)| {
            let (word, counts) = (state.word(), state.counts());
            let [moved_idle, moved_periodic, moved_ordered] = counts.moved;
            CpuQueue {
                cpu: *cpu,
                gang: word.runs(word.vm).then(|| name(word.vm)).flatten(),
                waiting: u32::try_from(counts.waiting).unwrap_or(u32::MAX),
                ungated: u32::try_from(counts.ungated).unwrap_or(u32::MAX),
                load: word.load.into(),
                moved_idle,
                moved_periodic,
                moved_ordered,
                refused: counts.refused,
            }
        };
        cpus.map(queue).collect()
    }

    /// Gives all VMs back to Linux.
    fn end(&mut self) {
        for cpu in 0..self.peers.len() {
            self.send(CpuId(cpu as u16), Input::End);
        }
        for known in self.vms.values().filter(|known| known.scheduled.is_some()) {
            known.handle.restore_affinity();
        }
    }

    fn local_weight(&mut self) -> u32 {
        let scheduled = self.vms.values().filter_map(|vm| vm.scheduled.as_ref());
        let vms = scheduled.map(|vm| (vm.number, &*vm.facts));
        self.local_load
            .weight(vms, self.shared.host_cpus.len(), Instant::now())
    }

    fn number(&self) -> Result<VmId, Unplaced> {
        let used = |number: VmId| {
            let mut scheduled = self.vms.values().filter_map(|vm| vm.scheduled.as_ref());
            scheduled.any(|vm| vm.number == number) || self.parts.values().any(|part| part.number == number)
        };
        next_number(self.last_number, used)
    }

    /// vCPUs and reserved time of each CPU.
    fn cpu_use(&self) -> CpuUse {
        let mut usage = CpuUse::none(self.shared.host_cpus.len());
        let scheduled = self.vms.values().filter_map(|vm| vm.scheduled.as_ref());
        let parts = self.parts.values().map(|part| &part.facts);
        for facts in scheduled.map(|vm| &vm.facts).chain(parts) {
            let share = share(&facts.terms);
            for entry in facts.entries.iter() {
                usage.add(VcpuEntry::unpack(entry.read_or_torn()).cpu, share);
            }
        }
        usage
    }

    /// Whether a CPU has more reserved time than its limit, and a vCPU of the VM.
    fn is_overcommitted(&self, scheduled: &ScheduledVm) -> bool {
        let usage = self.cpu_use();
        let mut entries = scheduled.facts.entries.iter();
        entries.any(|entry| {
            let cpu = VcpuEntry::unpack(entry.read_or_torn()).cpu;
            excess(usage.reserved.get(cpu.index()).copied().unwrap_or(0)) > 0
        })
    }

    fn send_facts(&self, number: VmId, facts: Option<&Arc<VmFacts>>) {
        for cpu in 0..self.peers.len() {
            self.send(CpuId(cpu as u16), Input::Vm(number, facts.cloned()));
        }
    }

    fn send(&self, cpu: CpuId, input: Input) {
        if let Some(peer) = self.peers.get(cpu.index()) {
            // A driver ends with the process alone.
            let _ = peer.send(input);
        }
    }
}

/// The settings of a VM that concern its CPUs; none if it has ended.
fn settings_of(handle: &VmHandle) -> Option<VmSettings> {
    handle.recorder().read(|record| VmSettings {
        vcpus: record.spec.cpus,
        weight: record.spec.cpu_weight,
        limit: record.spec.cpu_limit,
        reservation_permille: record.spec.cpu_reservation_permille(),
        is_loose: !record.spec.gang,
        pins: record.pins.clone(),
        is_away: !record.borrowed_cpus.is_empty(),
    })
}
