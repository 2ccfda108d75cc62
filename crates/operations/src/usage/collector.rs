//! Takes readings, and keeps the state for later ones.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use config::cluster::CellPlan;
use hostinfo::memory_use::MemoryUse;
use hostinfo::{cpu_time, thread_migrations};
use registry::cluster::files::Files;
use registry::cluster::interface::{CpuLending, Status};
use registry::vms::{Record, Registry, State};

use super::in_flight::InFlight;
use super::reading::{CellReading, CellState, CpuQueue, CpuReading, Reading, Unknown, VcpuReading};
use super::sources::{self, Report, Reported, Source};
use crate::failure::Failure;

/// Time that a reading waits for a source. A shard may take so long to pass the files of its statistics.
pub const SOURCE_LIMIT: Duration = Duration::from_secs(2);
/// Time between two measurements of memory: each walks the page tables of all shards.
const MEMORY_PERIOD: Duration = Duration::from_secs(5);

/// Takes readings of this host, for the calling user.
#[derive(Debug)]
pub struct Collector {
    registry: Registry,
    files: Files,
    begun: Instant,
    flight: InFlight<Source, Reported>,
    memory: Option<(Instant, MemoryUse)>,
}

/// Reports of one reading.
#[derive(Debug, Default)]
struct Reports {
    cells: BTreeMap<u16, Status>,
    /// Cells whose vCPUs are known.
    listed: BTreeSet<u16>,
    vcpus: Vec<VcpuReading>,
    /// Moves between cells by decision, by cell.
    lending: BTreeMap<u16, CpuLending>,
    /// Run queues by the host's number of the CPU.
    queues: BTreeMap<usize, CpuQueue>,
    unknown: Vec<Unknown>,
}

impl Collector {
    /// Opens the sources of this user.
    ///
    /// # Errors
    /// If the runtime directory can't be used.
    pub fn open() -> Result<Self, Failure> {
        Ok(Self {
            registry: Registry::open().map_err(Failure::host)?,
            files: Files::open().map_err(Failure::host)?,
            begun: Instant::now(),
            flight: InFlight::new(SOURCE_LIMIT),
            memory: None,
        })
    }

    /// Takes a reading, in at most [`SOURCE_LIMIT`] and the time of the registry's lock.
    ///
    /// # Errors
    /// If the registry, the files of the cells or the host's `/proc` can't be read.
    pub fn read(&mut self) -> Result<Reading, Failure> {
        let deadline = Instant::now() + SOURCE_LIMIT;
        let records = self.registry.list().map_err(Failure::host)?;
        let plan = self.files.plan().map_err(Failure::host)?;
        let mut reports = Reports::default();
        self.flight.retain(|source| match source {
            Source::Vm(vm) => records.iter().any(|record| record.name == *vm),
            Source::Cell(cell) | Source::CellVcpus(cell) => plan.iter().any(|own| own.number == *cell),
            Source::HostCluster | Source::Memory => true,
        });
        let asked = self.ask(&plan, &records, &mut reports.unknown);
        self.flight.wait(&asked, deadline);
        self.take_cells(&plan, &mut reports);
        self.take_vms(&plan, &records, deadline, &mut reports);
        self.take_memory();
        let cpus = cpu_time::read().map_err(Failure::host)?;
        let (cells, vcpus) = (
            self.cells(&plan, &mut reports),
            self.vcpus(&plan, &records, &mut reports),
        );
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Reading {
            unix_ms: whole_ms(unix),
            at_ms: whole_ms(self.begun.elapsed()),
            cells,
            cpus: cpus
                .into_iter()
                .map(|time| cpu(time, reports.queues.remove(&time.cpu)))
                .collect(),
            vms: records.iter().map(|record| self.vm(record)).collect(),
            vcpus,
            unknown: reports.unknown,
        })
    }

    /// Queries all sources but VMs of cells; returns those to wait for.
    fn ask(&mut self, plan: &[CellPlan], records: &[Record], unknown: &mut Vec<Unknown>) -> BTreeSet<Source> {
        let mut asked = BTreeSet::new();
        let mut note = |source: Source, begun: io::Result<()>| match begun {
            Ok(()) => _ = asked.insert(source),
            Err(error) => unknown.push(Unknown::new(name_of(&source), &error.to_string())),
        };
        for cell in plan.iter().map(|cell| cell.number) {
            let files = self.files.cell(cell);
            if files.has_failed() {
                continue;
            }
            let own = files.clone();
            let begun = self
                .flight
                .ask(Source::Cell(cell), move || sources::ask_cell(&own));
            note(Source::Cell(cell), begun);
            let begun = self
                .flight
                .ask(Source::CellVcpus(cell), move || sources::ask_cell_vcpus(&files));
            note(Source::CellVcpus(cell), begun);
        }
        if plan.is_empty() {
            let begun = self.flight.ask(Source::HostCluster, sources::ask_host_cluster);
            note(Source::HostCluster, begun);
        }
        for record in records.iter().filter(|record| !is_in(plan, record)) {
            let begun = self.ask_vm(record);
            note(Source::Vm(record.name.clone()), begun);
        }
        let is_old = |(at, _): &(Instant, MemoryUse)| at.elapsed() >= MEMORY_PERIOD;
        if self.memory.as_ref().is_none_or(is_old) {
            let records = records.to_vec();
            let begun = self
                .flight
                .ask(Source::Memory, move || sources::measure_memory(&records));
            if self.memory.is_none() {
                note(Source::Memory, begun);
            }
        }
        asked
    }

    /// Queries the process that serves a VM, if the VM runs.
    fn ask_vm(&mut self, record: &Record) -> io::Result<()> {
        if record.state != State::Running {
            return Ok(());
        }
        let folder = self.registry.folder_of(&record.name)?;
        let source = Source::Vm(record.name.clone());
        self.flight.ask(source, move || sources::ask_vm(&folder))
    }

    /// Takes the reports of cells and of their vCPUs.
    fn take_cells(&mut self, plan: &[CellPlan], reports: &mut Reports) {
        for cell in plan.iter().map(|cell| cell.number) {
            if self.files.cell(cell).has_failed() {
                continue;
            }
            let mut take = |source: Source| match self.flight.take(&source) {
                Some(arrived) => arrived.answer.map(|report| (arrived.at, report)),
                None => Err(format!("no answer within {} s", SOURCE_LIMIT.as_secs())),
            };
            let status = take(Source::Cell(cell));
            let vcpus = take(Source::CellVcpus(cell));
            let mut fail = |why: &str| reports.unknown.push(Unknown::new(format!("cell {cell}"), why));
            match &status {
                Ok((_, Report::Cell(status))) => _ = reports.cells.insert(cell, status.clone()),
                Err(why) => fail(why),
                Ok(_) => {}
            }
            match vcpus {
                Ok((at, Report::CellVcpus(known))) => {
                    reports.listed.insert(cell);
                    reports
                        .lending
                        .extend(known.lending.map(|lending| (cell, lending)));
                    let at_ms = whole_ms(at.saturating_duration_since(self.begun));
                    let queues = known.queues.iter();
                    reports
                        .queues
                        .extend(queues.map(|queue| (queue.cpu, sources::queue(queue))));
                    let vcpus = known.vcpus.into_iter();
                    reports.vcpus.extend(vcpus.map(|vcpu| sources::vcpu(vcpu, at_ms)));
                    let missing = known.missing.iter();
                    reports
                        .unknown
                        .extend(missing.map(|(vm, why)| Unknown::new(vm, why)));
                }
                Err(why) if status.is_ok() => fail(&format!("its vCPUs are not known: {why}")),
                _ => {}
            }
        }
    }

    /// Takes the reports of VMs outside the cells, and queries those that their cell does not serve.
    fn take_vms(&mut self, plan: &[CellPlan], records: &[Record], deadline: Instant, reports: &mut Reports) {
        let is_told = |record: &&Record| {
            let of_cell = reports.vcpus.iter().any(|vcpu| vcpu.vm == record.name);
            of_cell
                || reports
                    .unknown
                    .iter()
                    .any(|unknown| unknown.source == record.name)
        };
        let left = |record: &&Record| {
            !is_in(plan, record) || record.cell.is_some_and(|cell| reports.listed.contains(&cell))
        };
        let own: Vec<&Record> = records
            .iter()
            .filter(|record| record.state == State::Running)
            .filter(left)
            .filter(|record| !is_told(record))
            .collect();
        let mut asked = BTreeSet::new();
        for record in own.iter().filter(|record| is_in(plan, record)) {
            if self.ask_vm(record).is_ok() {
                asked.insert(Source::Vm(record.name.clone()));
            }
        }
        self.flight.wait(&asked, deadline);
        for record in own {
            match self.flight.take(&Source::Vm(record.name.clone())) {
                Some(arrived) => match arrived.answer {
                    Ok(Report::Vm(status)) => {
                        let at_ms = whole_ms(arrived.at.saturating_duration_since(self.begun));
                        reports.vcpus.extend(sources::vcpus_of_vm(record, &status, at_ms));
                    }
                    Ok(_) => {}
                    Err(why) => reports.unknown.push(Unknown::new(&record.name, &why)),
                },
                None => {
                    let why = format!("no answer within {} s", SOURCE_LIMIT.as_secs());
                    reports.unknown.push(Unknown::new(&record.name, &why));
                }
            }
        }
    }

    fn take_memory(&mut self) {
        if let Some(arrived) = self.flight.take(&Source::Memory)
            && let Ok(Report::Memory(table)) = arrived.answer
        {
            self.memory = Some((arrived.at, table));
        }
    }

    /// Returns the cells as the first one that answers reports them, each that answers as it reports itself.
    fn cells(&mut self, plan: &[CellPlan], reports: &mut Reports) -> Vec<CellReading> {
        let is_here = |number| plan.iter().any(|cell| cell.number == number);
        let of = |status: &Status, number: u16| {
            let cell = status.cells.iter().find(|cell| cell.plan.number == number);
            cell.map(|cell| sources::cell(cell, is_here(number)))
        };
        let mut cells: BTreeMap<u16, CellReading> = BTreeMap::new();
        if let Some(status) = reports.cells.values().next() {
            let numbers = status.cells.iter().map(|cell| cell.plan.number);
            cells.extend(numbers.filter_map(|number| Some((number, of(status, number)?))));
        }
        for plan in plan {
            let number = plan.number;
            let own = reports.cells.get(&number).and_then(|status| of(status, number));
            let is_silent = own.is_none();
            let known = own.or_else(|| cells.remove(&number));
            let mut cell = known.unwrap_or_else(|| planned(plan));
            if self.files.cell(number).has_failed() {
                cell.state = Some(CellState::Failed);
            } else if is_silent {
                cell.state = Some(CellState::Silent);
            }
            cell.cpu_lending = reports.lending.get(&number).copied();
            cells.insert(number, cell);
        }
        if plan.is_empty()
            && let Some(arrived) = self.flight.take(&Source::HostCluster)
        {
            match arrived.answer {
                Ok(Report::HostCluster(Some(status))) => return sources::host_cells(&status),
                Ok(_) => {}
                Err(why) => reports.unknown.push(Unknown::new("the host's cluster", &why)),
            }
        }
        cells.into_values().collect()
    }

    /// Returns the vCPUs in order, with pins from the registry and moves from the host's scheduler.
    fn vcpus(&self, plan: &[CellPlan], records: &[Record], reports: &mut Reports) -> Vec<VcpuReading> {
        let mut vcpus = std::mem::take(&mut reports.vcpus);
        vcpus.sort_by(|one, other| (&one.vm, one.vcpu).cmp(&(&other.vm, other.vcpu)));
        for vcpu in &mut vcpus {
            let record = records.iter().find(|record| record.name == vcpu.vm);
            vcpu.is_pinned = record.is_some_and(|record| record.pins.contains_key(&vcpu.vcpu));
            vcpu.moved_by = record.and_then(|record| sources::moved_by(record, vcpu.vcpu));
            // Processes of other hosts have ids that are here those of others.
            let is_here = vcpu
                .cell
                .is_none_or(|cell| plan.iter().any(|own| own.number == cell));
            if let (true, Some(process), Some(thread)) = (is_here, vcpu.shard_pid, vcpu.thread_id) {
                vcpu.counters.migrations = thread_migrations::read(process, thread);
            }
        }
        vcpus
    }

    fn vm(&self, record: &Record) -> super::VmReading {
        let memory = self.memory.as_ref().and_then(|(_, table)| {
            let mut vms = table.vms.iter();
            vms.find(|vm| vm.name == record.name)
        });
        super::VmReading {
            host_bytes: memory.map(|memory| memory.host_bytes),
            swapped_bytes: memory.map(|memory| memory.swapped_bytes),
            ..sources::vm(record)
        }
    }
}

/// Whether a cell of the plan has the VM.
fn is_in(plan: &[CellPlan], record: &Record) -> bool {
    record
        .cell
        .is_some_and(|cell| plan.iter().any(|own| own.number == cell))
}

/// A cell of which no report is there.
fn planned(plan: &CellPlan) -> CellReading {
    CellReading {
        cell: plan.number,
        host: plan.host.clone(),
        is_here: true,
        cpus: plan.cpus.clone(),
        nodes: plan.nodes.clone(),
        memory_bytes: Some(plan.memory_bytes),
        ..CellReading::default()
    }
}

fn cpu(time: cpu_time::CpuTime, queue: Option<CpuQueue>) -> CpuReading {
    CpuReading {
        cpu: time.cpu,
        busy_ticks: time.busy_ticks,
        total_ticks: time.total_ticks,
        queue,
    }
}

fn name_of(source: &Source) -> String {
    match source {
        Source::Cell(cell) | Source::CellVcpus(cell) => format!("cell {cell}"),
        Source::HostCluster => "the host's cluster".to_owned(),
        Source::Vm(vm) => vm.clone(),
        Source::Memory => "memory".to_owned(),
    }
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
