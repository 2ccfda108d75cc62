//! Windows of VMs that span cells, where the cluster file says `cpus = "gangs"`.
//!
//! All decisions are [`policy::cpu::windows`]'s. A thread of each cell's process reports the cell's load and
//! its VMs to the arbiter, the lowest cell of the host that answers, and passes the schedule of the reply to
//! the cell's drivers, and to the thread that stops the vCPUs of VMs with their home here. A cell that does
//! not answer is left out for a while; then the next one is the arbiter. Nothing is recorded: a process that
//! dies leaves its schedule to run out.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use config::cluster::CellPlan;
use locks::lock;
use policy::cpu::Nanos;
use policy::cpu::entitlement::WEIGHT_DEFAULT;
use policy::cpu::windows::{
    Arbiter, BUSY_PERMILLE, Follower, REPORT_INTERVAL, Report, Schedule, SpanningVm, UNLIMITED, VMS_MAX,
    Window, limited_permille,
};
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse};
use registry::cluster::windows as wire;
use tracing::{debug, info};

use super::adoptions::Adoptions;
use crate::handle::cell_requests::{exchange, other_answer};
use crate::handle::{SpanThreads, VmHandle};
use crate::scheduler::Scheduler;
use crate::scheduler::host_clock::monotonic;
use crate::scheduler::parts::Part;
use crate::scheduler::span_gate::{GatedVcpu, GatedVm};

/// Interval of reports while no VM has a window. Ours.
const REST_INTERVAL: Duration = Duration::from_secs(1);
/// Least time between two measures of the VMs' threads.
const MEASURE_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which a cell that did not answer is not asked. Ours: longer than the wait for it.
const AVOIDANCE: Duration = Duration::from_secs(5);
/// Time after which a VM counts as silent whose shards do not report where its vCPUs are: the wait holds up
/// the windows of other VMs.
const SILENCE_MIN: Duration = Duration::from_millis(500);
/// Time for which a silent VM is not asked. Ours: far longer than the 5 s of such a wait.
const SILENCE_AVOIDANCE: Duration = Duration::from_secs(120);
/// Greatest number of vCPUs of a VM in a report: that of any VM.
const VCPUS_MAX: usize = 256;

/// Arbiter of a cell, for its clients.
#[derive(Clone, Debug)]
pub(super) struct WindowArbiter {
    /// Cells of the host.
    cells: Arc<BTreeSet<u16>>,
    arbiter: Arc<Mutex<Arbiter<wire::SpanningVm>>>,
}

impl WindowArbiter {
    /// Takes the report of a cell, and returns the schedule.
    ///
    /// # Errors
    /// If it is no report of a cell of this host.
    fn take(&self, now: Nanos, report: wire::CellReport) -> Result<wire::WindowSchedule, String> {
        let is_bounded = report.vms.len().max(report.limits.len()) <= VMS_MAX
            && report.vms.iter().all(|vm| vm.vcpus.len() <= VCPUS_MAX);
        if !is_bounded || !self.cells.contains(&report.cell) {
            return Err(format!(
                "the report of cell {} is none of a cell of this host",
                report.cell
            ));
        }
        let limits = report.limits;
        let most_permille = |vm: &wire::SpanningVm| {
            let limit = limits.iter().find(|limit| limit.vm == vm.name);
            limit.map_or(UNLIMITED, |limit| limit.most_permille)
        };
        let of = |vm: wire::SpanningVm| SpanningVm {
            weight: vm.weight,
            cells: vm.vcpus.iter().map(|vcpu| vcpu.cell).collect(),
            most_permille: most_permille(&vm),
            vm,
        };
        let cell = report.cell;
        let report = Report {
            local_weight: report.local_weight,
            vms: report.vms.into_iter().map(of).collect(),
        };
        Ok(to_wire(lock(&self.arbiter).take(now, cell, report)))
    }

    /// The response to a client.
    pub(super) fn respond(&self, report: wire::CellReport) -> CellResponse {
        match self.take(monotonic(), report) {
            Ok(schedule) => CellResponse::Windows(schedule),
            Err(why) => CellResponse::Refused { why },
        }
    }
}

fn to_wire(schedule: &Schedule<wire::SpanningVm>) -> wire::WindowSchedule {
    let of = |window: &Window<wire::SpanningVm>| wire::VmWindow {
        vm: window.vm.clone(),
        start_ns: window.start,
        length_ns: window.length,
    };
    wire::WindowSchedule {
        from_ns: schedule.from,
        until_ns: schedule.until,
        windows: schedule.windows.iter().map(of).collect(),
    }
}

fn from_wire(schedule: wire::WindowSchedule) -> Schedule<wire::SpanningVm> {
    let of = |window: wire::VmWindow| Window {
        vm: window.vm,
        start: window.start_ns,
        length: window.length_ns,
    };
    Schedule {
        from: schedule.from_ns,
        until: schedule.until_ns,
        windows: schedule.windows.into_iter().map(of).collect(),
    }
}

/// The arbiter of a cell of this host.
///
/// # Errors
/// If the cells can't be read.
pub(super) fn arbiter(files: &Files) -> io::Result<WindowArbiter> {
    let cells = files.plan()?.iter().map(|cell| cell.number).collect();
    Ok(WindowArbiter {
        cells: Arc::new(cells),
        arbiter: Arc::default(),
    })
}

/// Starts the thread of a cell with drivers.
///
/// # Errors
/// If the host has no threads left, or the cells can't be read.
pub(super) fn start(
    cell: u16,
    files: &Files,
    adoptions: &Adoptions,
    scheduler: Scheduler,
    arbiter: WindowArbiter,
) -> io::Result<()> {
    let reporter = Reporter {
        cell,
        plan: files.plan()?,
        adoptions: adoptions.clone(),
        scheduler,
        arbiter,
        follower: Follower::default(),
        avoided: BTreeMap::new(),
        silent: BTreeMap::new(),
        measures: Measures::default(),
        driven: BTreeMap::new(),
    };
    std::thread::Builder::new()
        .name("span-windows".into())
        .spawn(move || reporter.run())?;
    info!("VMs that span cells have windows in them");
    Ok(())
}

/// VM with its home in this cell that spans cells, as it runs now.
struct OwnVm {
    handle: VmHandle,
    threads: SpanThreads,
    spanning: wire::SpanningVm,
    /// CPUs that it uses at most, thousandths.
    limit_permille: Option<u32>,
}

struct Reporter {
    cell: u16,
    plan: Vec<CellPlan>,
    adoptions: Adoptions,
    scheduler: Scheduler,
    arbiter: WindowArbiter,
    follower: Follower<wire::SpanningVm>,
    /// Cells that did not answer, until a time.
    avoided: BTreeMap<u16, Instant>,
    /// VMs whose shards did not report, by name, until a time.
    silent: BTreeMap<String, Instant>,
    measures: Measures,
    /// VMs that the gate has, by name.
    driven: BTreeMap<String, VmHandle>,
}

impl Reporter {
    fn run(mut self) {
        loop {
            let is_at_rest = self.round();
            std::thread::sleep(match is_at_rest {
                true => REST_INTERVAL,
                false => Duration::from_nanos(REPORT_INTERVAL),
            });
        }
    }

    /// Reports, and applies the reply. Returns whether no VM has a window now or soon.
    fn round(&mut self) -> bool {
        let own = self.own_vms();
        let report = self.report(&own);
        let has_work = !report.vms.is_empty();
        if let Some(schedule) = self.schedule(&report)
            && let Err(error) = self.follower.take(monotonic(), schedule)
        {
            debug!(?error, "the schedule of another cell is not followed");
        }
        let windowed = self.follower.vms(monotonic());
        self.apply(&windowed, own);
        !has_work && windowed.is_empty()
    }

    /// VMs with their home here that span cells and may have windows.
    fn own_vms(&mut self) -> Vec<OwnVm> {
        let now = Instant::now();
        self.silent.retain(|_, until| now < *until);
        let handles = self.adoptions.served();
        let vms = handles.into_iter().filter(VmHandle::spans_this_host);
        vms.filter_map(|handle| self.own_vm(handle)).collect()
    }

    fn own_vm(&mut self, handle: VmHandle) -> Option<OwnVm> {
        let known = handle.recorder().read(|record| {
            let weight = record.spec.cpu_weight.map_or(WEIGHT_DEFAULT, u32::from);
            // A pin, and `gang = false`, leave the VM to Linux.
            let may = record.pins.is_empty() && record.spec.gang;
            may.then(|| (record.name.clone(), weight, record.spec.cpu_limit.map(permille)))
        });
        let (name, weight, limit_permille) = known.flatten()?;
        if self.silent.contains_key(&name) {
            return None;
        }
        let begun = Instant::now();
        match handle.span_threads() {
            Ok(threads) => {
                let spanning = spanning_vm(name, weight, &threads, &self.plan)?;
                Some(OwnVm {
                    handle,
                    threads,
                    spanning,
                    limit_permille,
                })
            }
            Err(error) => {
                debug!(%error, name, "the VM has no windows");
                if begun.elapsed() >= SILENCE_MIN {
                    self.silent.insert(name, Instant::now() + SILENCE_AVOIDANCE);
                }
                None
            }
        }
    }

    fn report(&mut self, own: &[OwnVm]) -> wire::CellReport {
        self.measures.take(own, Instant::now());
        let busy = own
            .iter()
            .filter(|vm| self.measures.busy.contains(&vm.spanning.name));
        let mut vms: Vec<wire::SpanningVm> = busy.map(|vm| vm.spanning.clone()).collect();
        vms.sort();
        vms.truncate(VMS_MAX);
        let limits = own.iter().filter(|vm| vms.contains(&vm.spanning));
        let limits = limits.filter_map(|vm| self.limit(vm)).collect();
        wire::CellReport {
            cell: self.cell,
            local_weight: self.scheduler.local_weight(),
            vms,
            limits,
        }
    }

    /// Part of the time for which a VM may run, if it has a limit that binds it now.
    fn limit(&self, vm: &OwnVm) -> Option<wire::VmLimit> {
        let wanted = self.measures.wanted_permille.get(&vm.spanning.name)?;
        let mut parts: BTreeMap<u16, Vec<u32>> = BTreeMap::new();
        for (vcpu, wanted) in vm.spanning.vcpus.iter().zip(wanted) {
            parts.entry(vcpu.cell).or_default().push(*wanted);
        }
        let parts: Vec<Vec<u32>> = parts.into_values().collect();
        let most_permille = limited_permille(vm.limit_permille?, &parts);
        let vm = vm.spanning.name.clone();
        (most_permille < UNLIMITED).then_some(wire::VmLimit { vm, most_permille })
    }

    /// The schedule of the first cell that answers; none if the only one is this cell, and it refuses.
    fn schedule(&mut self, report: &wire::CellReport) -> Option<Schedule<wire::SpanningVm>> {
        let now = Instant::now();
        self.avoided.retain(|_, until| now < *until);
        let mut cells: Vec<u16> = self.plan.iter().map(|cell| cell.number).collect();
        cells.sort_unstable();
        for cell in cells.into_iter().filter(|cell| *cell <= self.cell) {
            if cell == self.cell {
                return self.arbiter.take(monotonic(), report.clone()).ok().map(from_wire);
            }
            if self.avoided.contains_key(&cell) {
                continue;
            }
            let answer = exchange(cell, &CellRequest::Windows(report.clone()));
            let why = match answer {
                Ok(CellResponse::Windows(schedule)) => return Some(from_wire(schedule)),
                Ok(other) => other_answer(&other),
                Err(error) => error,
            };
            debug!(error = %why, cell, "the cell is no arbiter of windows");
            self.avoided.insert(cell, Instant::now() + AVOIDANCE);
        }
        None
    }

    /// Gives the windows to the drivers of this cell and to the gate.
    fn apply(&mut self, windowed: &BTreeSet<wire::SpanningVm>, own: Vec<OwnVm>) {
        let part = |vm: &wire::SpanningVm| {
            let here = vm.vcpus.iter().filter(|vcpu| vcpu.cell == self.cell);
            let part = Part {
                vcpus: here.copied().collect(),
                windows: self.follower.windows_of(vm),
            };
            (!part.vcpus.is_empty()).then(|| (vm.name.clone(), part))
        };
        let parts = windowed.iter().filter_map(part).collect();
        let gated: BTreeMap<String, GatedVm> = own
            .into_iter()
            .filter(|vm| windowed.contains(&vm.spanning))
            .map(|vm| {
                let windows = self.follower.windows_of(&vm.spanning);
                (vm.spanning.name.clone(), gated_vm(vm, windows))
            })
            .collect();
        let driven = gated.iter().map(|(name, vm)| (name.clone(), vm.handle.clone()));
        let former = std::mem::replace(&mut self.driven, driven.collect());
        self.scheduler.span_gate().set(gated);
        self.scheduler.set_parts(parts);
        // The gate had each of their threads on one CPU.
        for (_, handle) in former.iter().filter(|(name, _)| !self.driven.contains_key(*name)) {
            handle.restore_affinity();
        }
    }
}

/// CPUs of a limit, thousandths.
fn permille(cpus: f64) -> u32 {
    (cpus * 1_000.0).clamp(1.0, f64::from(u32::MAX)) as u32
}

fn gated_vm(vm: OwnVm, windows: policy::cpu::windows::VmWindows) -> GatedVm {
    let vcpus = vm.threads.threads.iter().zip(&vm.spanning.vcpus);
    let vcpus = vcpus.map(|(thread, vcpu)| GatedVcpu {
        shard: thread.shard,
        shard_pid: thread.shard_pid,
        cell: thread.cell,
        cpu: vcpu.cpu,
    });
    GatedVm {
        starts: vm.threads.starts,
        vcpus: vcpus.collect(),
        windows,
        handle: vm.handle,
    }
}

/// A VM with each of its vCPUs on a CPU of its own; none if a cell has fewer CPUs than vCPUs of it. Windows
/// of VMs that share a cell do not overlap, so that all of them may use the same CPUs.
fn spanning_vm(
    name: String,
    weight: u32,
    threads: &SpanThreads,
    plan: &[CellPlan],
) -> Option<wire::SpanningVm> {
    let mut free: BTreeMap<u16, std::slice::Iter<'_, usize>> =
        plan.iter().map(|cell| (cell.number, cell.cpus.iter())).collect();
    let vcpus = (0..).zip(&threads.threads).map(|(vcpu, thread)| {
        Some(wire::SpanningVcpu {
            vcpu,
            cell: thread.cell,
            cpu: *free.get_mut(&thread.cell)?.next()?,
            shard_pid: thread.shard_pid,
            thread_id: thread.thread_id,
        })
    });
    let vcpus = vcpus.collect::<Option<Vec<_>>>()?;
    Some(wire::SpanningVm { name, weight, vcpus })
}

/// Which of the VMs have work, by the times of their threads.
#[derive(Debug, Default)]
struct Measures {
    measured: Option<Instant>,
    /// Time that each thread, by its id, has run or waited for a CPU, milliseconds.
    wanted_ms: BTreeMap<i32, u64>,
    busy: BTreeSet<String>,
    /// Part of the last interval, thousandths, for which each VM's threads ran or waited, by their vCPUs.
    wanted_permille: BTreeMap<String, Vec<u32>>,
}

impl Measures {
    /// Measures the VMs anew, once in [`MEASURE_INTERVAL`].
    fn take(&mut self, vms: &[OwnVm], now: Instant) {
        let of = |vm: &OwnVm| {
            let threads = vm.threads.threads.iter();
            let times = threads.map(|thread| (thread.thread_id, thread.wanted_ms));
            (vm.spanning.name.clone(), times.collect())
        };
        self.note(&vms.iter().map(of).collect::<Vec<_>>(), now);
    }

    fn note(&mut self, vms: &[(String, Vec<(i32, u64)>)], now: Instant) {
        let passed = self.measured.map(|at| now.saturating_duration_since(at));
        if passed.is_some_and(|passed| passed < MEASURE_INTERVAL) {
            return;
        }
        let wanted = |(id, wanted_ms): &(i32, u64)| {
            let before = self.wanted_ms.get(id).zip(passed);
            before.map_or(0, |(before, passed)| {
                let wanted = u128::from(wanted_ms.saturating_sub(*before));
                let permille = wanted * 1_000 / passed.as_millis().max(1);
                u32::try_from(permille).unwrap_or(u32::MAX)
            })
        };
        let of = |(name, threads): &(String, Vec<(i32, u64)>)| {
            (name.clone(), threads.iter().map(wanted).collect::<Vec<_>>())
        };
        self.wanted_permille = vms.iter().map(of).collect();
        let is_busy = |wanted: &Vec<u32>| wanted.iter().any(|wanted| *wanted >= BUSY_PERMILLE);
        let busy = self.wanted_permille.iter().filter(|(_, wanted)| is_busy(wanted));
        self.busy = busy.map(|(name, _)| name.clone()).collect();
        self.wanted_ms = vms.iter().flat_map(|(_, threads)| threads).copied().collect();
        self.measured = Some(now);
    }
}

#[cfg(test)]
mod tests;
