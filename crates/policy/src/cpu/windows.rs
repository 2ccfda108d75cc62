//! Windows of VMs that span cells: times in which the vCPUs of such a VM run in all its cells at once.
//!
//! Drivers of two cells share no words, so a gang over both can't agree as a gang of one cell does. Instead
//! time has frames of [`FRAME`] on the host's monotonic clock, which all its cells read. A VM that spans
//! cells has one window in each frame. In its window it goes before all gangs, on each of its CPUs; outside
//! of it, it does not run. One cell, the lowest that answers, is the arbiter: cells report their loads and
//! their VMs to it, and its reply is the [`Schedule`], which begins [`LEAD`] later. So all cells have it by
//! then, and change to it at the same time. A schedule ends by itself after [`LEASE`].

use std::collections::{BTreeMap, BTreeSet};

use super::{MILLISECOND, Nanos};

/// Length of a frame. Ours: four slices, so that two VMs alternate no faster than gangs do, and a VM waits
/// for a bounded time.
pub const FRAME: Nanos = 120 * MILLISECOND;
/// Least length of a window while all fit. Ours: a hundred switches with their refill of caches.
pub const WINDOW_MIN: Nanos = 5 * MILLISECOND;
/// Part of a frame that windows take at most where other VMs compete. Ours: a tenth is left to them.
pub const OPEN_MAX: Nanos = FRAME / 10 * 9;
/// Least length of the window of a VM with a limit. Ours: tens of switches. A limit of less than a hundredth
/// of a CPU for each vCPU is exceeded.
pub const LIMITED_WINDOW_MIN: Nanos = MILLISECOND;
/// Part of the time, thousandths, that a busy vCPU runs or waits for a CPU. Ours: a gang of fifty on a CPU
/// has as much, and the timer of an idle guest less.
pub const BUSY_PERMILLE: u32 = 20;
/// VMs that have windows at most; further ones are left to Linux. Ours: all have [`WINDOW_MIN`] then.
pub const VMS_MAX: usize = 16;
/// Interval of a cell's reports while it has a schedule. Ours: two attempts within [`LEAD`].
pub const REPORT_INTERVAL: Nanos = 200 * MILLISECOND;
/// Time between two schedules of an arbiter. Ours.
pub const PERIOD: Nanos = 1_000 * MILLISECOND;
/// Time between the decision on a schedule and its beginning. Ours: all cells have reported by then.
pub const LEAD: Nanos = 500 * MILLISECOND;
/// Time from the beginning of a schedule to its end. Ours: an arbiter that dies has a successor by then.
pub const LEASE: Nanos = 3_000 * MILLISECOND;
/// Time for which a report counts. Ours: a cell that has missed seven is silent.
pub const REPORT_LEASE: Nanos = 1_500 * MILLISECOND;

/// State of a VM's window, as the drivers of one cell see it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WindowState {
    /// The VM has no windows: it is in one cell.
    #[default]
    Absent,
    /// Its vCPUs go before all gangs.
    Open,
    /// Its vCPUs do not run.
    Closed,
}

/// VM that spans cells and has work.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SpanningVm<K> {
    /// Name of the VM.
    pub vm: K,
    /// Its weight; 0 counts as 1.
    pub weight: u32,
    /// Cells in which it has vCPUs.
    pub cells: BTreeSet<u16>,
    /// Part of the time for which it may run, thousandths; [`UNLIMITED`] or more for all of it.
    pub most_permille: u32,
}

/// Part of the time, thousandths, of a VM without a limit.
pub const UNLIMITED: u32 = 1_000;

/// Part of the time for which the vCPUs of a VM may run, thousandths, so that it keeps to its limit of CPUs.
///
/// Each cell's part of the VM has the limit's share by its vCPUs, which its busy vCPUs divide. `parts` has
/// the part of the time, thousandths, that each vCPU ran or waited for a CPU, by cell. A part that uses less
/// than its share limits nothing.
pub fn limited_permille(limit_permille: u32, parts: &[Vec<u32>]) -> u32 {
    let vcpus: usize = parts.iter().map(Vec::len).sum();
    let of_part = |part: &Vec<u32>| {
        let share = u64::from(limit_permille) * part.len() as u64 / vcpus.max(1) as u64;
        let wanted: u64 = part.iter().map(|wanted| u64::from(*wanted)).sum();
        let busy = part.iter().filter(|wanted| **wanted >= BUSY_PERMILLE).count();
        // A part that is kept to its share uses a little less than that.
        let is_at_limit = busy > 0 && wanted * 10 >= share * 9;
        is_at_limit.then(|| share / busy as u64)
    };
    let least = parts.iter().filter_map(of_part).min();
    least.map_or(UNLIMITED, |share| share.min(UNLIMITED.into()) as u32)
}

/// Report of one cell.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Report<K> {
    /// Sum of the weights of the busy vCPUs of VMs in this cell alone, for each of its CPUs.
    pub local_weight: u32,
    /// VMs with their home in this cell.
    pub vms: Vec<SpanningVm<K>>,
}

/// Window of a VM in each frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Window<K> {
    /// Name of the VM.
    pub vm: K,
    /// Beginning, from that of the frame.
    pub start: Nanos,
    /// Length, which ends within the frame.
    pub length: Nanos,
}

impl<K> Window<K> {
    fn end(&self) -> Nanos {
        self.start.saturating_add(self.length)
    }

    fn overlaps<L>(&self, other: &Window<L>) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// Windows for a time.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Schedule<K> {
    /// Time at which it begins.
    pub from: Nanos,
    /// Time at which it ends.
    pub until: Nanos,
    /// Windows of each frame. VMs without one are left to Linux.
    pub windows: Vec<Window<K>>,
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Self {
            from: 0,
            until: 0,
            windows: Vec::new(),
        }
    }
}

/// Divides a frame between VMs that span cells.
///
/// A VM has the least of its fair shares in its cells: its weight beside those of the VMs that compete there.
/// So no other VM of any cell gets less than its own share. Windows of VMs that share a cell do not overlap.
/// If they do not fit, as where three VMs compete in pairs, or where many have the least length, all become
/// shorter in proportion. A VM without a rival and without a limit has no window. `local` has the weight for
/// each CPU by cell.
pub fn divide<K: Clone + Ord>(local: &BTreeMap<u16, u32>, vms: &[SpanningVm<K>]) -> Vec<Window<K>> {
    let mut vms: Vec<&SpanningVm<K>> = vms.iter().filter(|vm| vm.cells.len() > 1).collect();
    vms.sort_by(|one, other| one.vm.cmp(&other.vm));
    vms.dedup_by(|one, other| one.vm == other.vm);
    vms.truncate(VMS_MAX);
    let local_of = |cell: &u16| u64::from(local.get(cell).copied().unwrap_or(0));
    // Time that VMs leave which are limited to less than their fair share is divided among the others.
    let fair = |vm: &SpanningVm<K>, limited: &[&SpanningVm<K>]| {
        let is_limited = |other: &SpanningVm<K>| limited.iter().any(|one| one.vm == other.vm);
        let in_cell = |cell: &u16| {
            let here = || vms.iter().filter(|other| other.cells.contains(cell));
            let taken: Nanos = here().filter(|one| is_limited(one)).map(|one| limit(one)).sum();
            let all = here()
                .filter(|one| !is_limited(one))
                .map(|one| weight(one))
                .sum::<u64>();
            let all = u128::from(all + local_of(cell)).max(1);
            let share = u128::from(FRAME.saturating_sub(taken)) * u128::from(weight(vm)) / all;
            u64::try_from(share).unwrap_or(FRAME)
        };
        vm.cells.iter().map(in_cell).min().unwrap_or(FRAME)
    };
    let is_below = |vm: &&&SpanningVm<K>| limit(vm) < fair(vm, &[]).max(WINDOW_MIN);
    let limited: Vec<&SpanningVm<K>> = vms.iter().filter(is_below).copied().collect();
    let mut windows: Vec<(&SpanningVm<K>, Window<K>)> = Vec::new();
    for vm in &vms {
        let is_limited = limited.iter().any(|one| one.vm == vm.vm);
        let length = match is_limited {
            true => limit(vm),
            false => fair(vm, &limited).max(WINDOW_MIN).min(limit(vm)),
        };
        if length >= FRAME {
            continue;
        }
        let rivals = || {
            windows
                .iter()
                .filter(|(other, _)| !other.cells.is_disjoint(&vm.cells))
        };
        let at = |start| Window {
            vm: vm.vm.clone(),
            start,
            length,
        };
        let starts = rivals().map(|(_, window)| window.end()).chain([0]);
        let free = starts.filter(|start| rivals().all(|(_, other)| !other.overlaps(&at(*start))));
        // The end of the last rival is always free.
        let start = free.min().unwrap_or(0);
        windows.push((vm, at(start)));
    }
    let has_local = windows
        .iter()
        .any(|(vm, _)| vm.cells.iter().any(|cell| local_of(cell) > 0));
    let room = if has_local { OPEN_MAX } else { FRAME };
    let needed = windows.iter().map(|(_, window)| window.end()).max().unwrap_or(0);
    let fit = |(_, window): (_, Window<K>)| {
        if needed <= room {
            return window;
        }
        // Both ends are scaled alike, so that windows that did not overlap do not.
        let scale = |at: Nanos| at * room / needed;
        let (start, end) = (scale(window.start), scale(window.end()));
        Window {
            start,
            length: end - start,
            ..window
        }
    };
    windows.into_iter().map(fit).collect()
}

/// Longest window of a VM by its limit; the whole frame without one.
fn limit<K>(vm: &SpanningVm<K>) -> Nanos {
    let permille = vm.most_permille.min(UNLIMITED);
    (FRAME * u64::from(permille) / u64::from(UNLIMITED)).max(LIMITED_WINDOW_MIN)
}

fn weight<K>(vm: &SpanningVm<K>) -> u64 {
    u64::from(vm.weight.max(1))
}

/// The arbiter's part of a cell.
#[derive(Clone, Debug)]
pub struct Arbiter<K> {
    reports: BTreeMap<u16, (Nanos, Report<K>)>,
    schedule: Schedule<K>,
    decide_at: Nanos,
}

impl<K> Default for Arbiter<K> {
    fn default() -> Self {
        Self {
            reports: BTreeMap::new(),
            schedule: Schedule::default(),
            decide_at: 0,
        }
    }
}

impl<K: Clone + Ord> Arbiter<K> {
    /// Takes the report of a cell, and returns the schedule that is or will be in force. The caller bounds
    /// the numbers of cells and of VMs.
    pub fn take(&mut self, now: Nanos, cell: u16, report: Report<K>) -> &Schedule<K> {
        self.reports.insert(cell, (now, report));
        self.reports
            .retain(|_, (at, _)| now.saturating_sub(*at) < REPORT_LEASE);
        // Also after a jump back of the clock, which a suspended machine may make.
        if now >= self.decide_at || now.saturating_add(PERIOD) < self.decide_at {
            self.decide_at = now.saturating_add(PERIOD);
            let from = now.saturating_add(LEAD);
            self.schedule = Schedule {
                from,
                until: from.saturating_add(LEASE),
                windows: self.windows(),
            };
        }
        &self.schedule
    }

    fn windows(&self) -> Vec<Window<K>> {
        let reports = self.reports.iter();
        let local = reports.map(|(cell, (_, report))| (*cell, report.local_weight));
        let vms = self
            .reports
            .values()
            .flat_map(|(_, report)| report.vms.iter().cloned());
        divide(&local.collect(), &vms.collect::<Vec<_>>())
    }
}

/// Schedules that a cell has received: the one in force, and the one after it.
#[derive(Clone, Debug)]
pub struct Follower<K> {
    current: Schedule<K>,
    next: Option<Schedule<K>>,
}

impl<K> Default for Follower<K> {
    fn default() -> Self {
        Self {
            current: Schedule::default(),
            next: None,
        }
    }
}

/// Reason against a schedule.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ScheduleError {
    /// It has more than [`VMS_MAX`] windows, or one that is empty or leaves the frame.
    Malformed,
    /// It begins too late, or lasts too long.
    TooLong,
}

impl<K: Clone + Ord> Follower<K> {
    /// Takes a schedule of an arbiter; the same one may come again.
    ///
    /// # Errors
    /// If no arbiter of this program makes such a one. The former schedules stand.
    pub fn take(&mut self, now: Nanos, schedule: Schedule<K>) -> Result<(), ScheduleError> {
        let fits = |window: &Window<K>| window.length > 0 && window.end() <= FRAME;
        if schedule.windows.len() > VMS_MAX || !schedule.windows.iter().all(fits) {
            return Err(ScheduleError::Malformed);
        }
        let latest = now.saturating_add(LEAD);
        if schedule.from > latest || schedule.until > latest.saturating_add(LEASE) {
            return Err(ScheduleError::TooLong);
        }
        if let Some(next) = self.next.take_if(|next| next.from <= now) {
            self.current = next;
        }
        if schedule.from <= now {
            self.current = schedule;
            self.next = None;
        } else {
            self.next = Some(schedule);
        }
        Ok(())
    }

    /// Names of the VMs with windows now or soon.
    pub fn vms(&self, now: Nanos) -> BTreeSet<K> {
        let in_force = [Some(&self.current), self.next.as_ref()];
        let in_force = in_force.into_iter().flatten().filter(|one| now < one.until);
        let windows = in_force.flat_map(|schedule| &schedule.windows);
        windows.map(|window| window.vm.clone()).collect()
    }

    /// Windows of one VM.
    pub fn windows_of(&self, vm: &K) -> VmWindows {
        let of = |schedule: &Schedule<K>| {
            let window = schedule.windows.iter().find(|window| window.vm == *vm);
            Term {
                from: schedule.from,
                until: schedule.until,
                window: window.map(|window| (window.start, window.end())),
            }
        };
        VmWindows {
            current: of(&self.current),
            next: self.next.as_ref().map(of),
        }
    }
}

/// Windows of one VM by a schedule.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Term {
    from: Nanos,
    until: Nanos,
    /// Beginning and end, from the beginning of each frame.
    window: Option<(Nanos, Nanos)>,
}

/// Windows of one VM by the schedule in force and the next one. A function of time alone, so that all cells
/// that have the same schedules agree without a message.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct VmWindows {
    current: Term,
    next: Option<Term>,
}

impl VmWindows {
    /// State at a time. [`WindowState::Absent`] if the VM has no window by then, or the schedule has ended.
    pub fn state(&self, now: Nanos) -> WindowState {
        let term = self.next.filter(|next| next.from <= now).unwrap_or(self.current);
        let in_force = (term.from..term.until).contains(&now);
        match term.window.filter(|_| in_force) {
            None => WindowState::Absent,
            Some((start, end)) if (start..end).contains(&(now % FRAME)) => WindowState::Open,
            Some(_) => WindowState::Closed,
        }
    }

    /// The next time at which the state may change: at most a frame away, if it can change at all.
    pub fn next_change(&self, now: Nanos) -> Option<Nanos> {
        let frame = now - now % FRAME;
        let terms = [Some(self.current), self.next].into_iter().flatten();
        let of = |term: Term| {
            let (start, end) = term.window.unwrap_or((0, 0));
            let ends = [start, end].map(|at| frame.saturating_add(at));
            let after = ends.map(|at| at.saturating_add(FRAME));
            let inside = ends
                .into_iter()
                .chain(after)
                .filter(move |_| term.window.is_some());
            inside
                .filter(move |at| (term.from..term.until).contains(at))
                .chain([term.from, term.until])
        };
        terms.flat_map(of).filter(|at| *at > now).min()
    }
}

#[cfg(test)]
mod tests;
