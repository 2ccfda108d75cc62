//! Limits of paged VMs while the host is short of memory: VMs are slowed down in order of their weights, and
//! each keeps what it was promised.
//!
//! ```text
//! available memory        low water          high water
//! ------------------------|------------------|---------------------------->
//!   limits fall by weight |   limits stay    |   limits rise by weight
//! ```
//!
//! Below the low water, limits fall to a common level: the same number of pages for each unit of weight, but
//! never below a VM's promise. So the VM that is furthest above its share is trimmed first. Above the high
//! water they rise again, the lowest first. Stalls of the host's tasks for memory (PSI) make a trim larger,
//! and never cause one: a program that waits at a limit of its own causes stalls on a host with free memory.
//!
//! Several processes watch one host: cells, and the monitors of single VMs. Each removes only its part of the
//! shortage: the part of the host's shared memory, which holds all guests, that its own VMs have.
//!
//! The resident pages of a VM are measured from outside, but a shard that a guest controls may keep pages
//! that it should write. So a VM counts with at most its last ordered limit, and memory that is late to leave
//! stops counting as leaving after [`GRACE_ROUNDS`]: such a VM neither takes trims from others nor keeps them
//! low.

use std::collections::BTreeMap;

use super::resident_set::LIMIT_MIN_PAGES;

/// Time between two decisions, milliseconds: a large host allocates a low water in less than this only by
/// several threads; ours.
pub const ROUND_MS: u64 = 500;
/// Rounds for which memory above a lowered limit counts as leaving, without a page less; ours.
pub const GRACE_ROUNDS: u32 = 4;
/// Least progress of a VM whose memory counts as leaving, pages in a round: 1 MiB; ours.
const PROGRESS_PAGES: u64 = 256;
/// Least change of all limits of a round, pages: 4 MiB; ours. Parts of a small excess would never end.
const STEP_MIN_PAGES: u64 = 1024;
/// Part of the spare memory that a round gives back, so that VMs can use it before the next one; ours.
const RAISE_DIVISOR: u64 = 8;
/// Part of the last 10 s in which some task was stalled for memory, hundredths of a percent, from which on a
/// trim aims at the high water; ours.
pub const STALLED_CENTIPERCENT: u32 = 1000;
/// Part of the host's memory that is its low water; ours.
const LOW_WATER_DIVISOR: u64 = 20;
/// Bounds of the low water, pages: 32 MiB and 1 GiB; ours.
const LOW_WATER_MIN_PAGES: u64 = 8192;
const LOW_WATER_MAX_PAGES: u64 = 262_144;
/// Greatest weight of a VM; the level is in pages for this weight.
pub const WEIGHT_MAX: u32 = 10_000;

/// The host's memory, or that of the control group which limits it further.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPages {
    /// Pages that programs can have without paging by the host.
    pub available: u64,
    /// Pages of shared memory in use: those of all guests on the host, and of files in memory.
    pub shared: u64,
    /// Part of the last 10 s in which some task was stalled for memory, hundredths of a percent; 0 where the
    /// kernel does not count it.
    pub stalled_centipercent: u32,
}

/// Available memory at which limits fall and rise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaterMarks {
    low: u64,
    high: u64,
}

impl WaterMarks {
    /// Returns the marks for a low water, pages. The high water is half as much above it.
    pub fn new(low: u64) -> Self {
        Self {
            low,
            high: low.saturating_add(low / 2),
        }
    }

    /// Returns the marks of a host with so many pages. Pools of huge pages are not counted among them: no VM
    /// can have them as ordinary memory.
    pub fn of_host(pages: u64) -> Self {
        Self::new((pages / LOW_WATER_DIVISOR).clamp(LOW_WATER_MIN_PAGES, LOW_WATER_MAX_PAGES))
    }

    /// Returns the low water, pages.
    pub fn low(self) -> u64 {
        self.low
    }
}

/// A VM whose memory is paged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedVm {
    /// Pages that its user gives it at most.
    pub limit: u64,
    /// Pages that it keeps, whatever the pressure.
    pub promise: u64,
    /// Its part of memory that VMs compete for, 1 to [`WEIGHT_MAX`].
    pub weight: u32,
    /// Pages that it has in memory.
    pub resident: u64,
}

/// State of one VM between two rounds.
#[derive(Clone, Copy, Debug)]
struct Ordered {
    limit: u64,
    /// Resident pages at the last round.
    resident: u64,
    /// Rounds in a row in which it was above its limit, and made no progress.
    late_rounds: u32,
}

/// A VM within a round.
#[derive(Clone, Copy, Debug)]
struct Competitor {
    /// Bounds of its limit.
    least: u64,
    most: u64,
    weight: u64,
    /// The limit of the last round.
    limit: u64,
    used: u64,
    leaving: u64,
}

impl Competitor {
    /// The limit at a level, within `least` and `most`.
    fn at(&self, level: u64, least: u64, most: u64) -> u64 {
        let share = u128::from(level) * u128::from(self.weight) / u128::from(WEIGHT_MAX);
        u64::try_from(share).unwrap_or(u64::MAX).clamp(least, most)
    }

    /// The limit at a level to which limits fall.
    fn fallen(&self, level: u64) -> u64 {
        self.at(level, self.least, self.limit)
    }

    /// The limit at a level to which limits rise.
    fn risen(&self, level: u64) -> u64 {
        self.at(level, self.limit, self.most)
    }
}

/// The limits of a process's VMs, by their keys, from round to round.
#[derive(Debug)]
pub struct Pressure<K>(BTreeMap<K, Ordered>);

impl<K> Default for Pressure<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord + Clone> Pressure<K> {
    /// Decides the limit of each VM, pages. A VM that comes new has the limit of its user until the next
    /// shortage; one that is missing from `vms` is forgotten.
    pub fn round(
        &mut self,
        host: HostPages,
        marks: WaterMarks,
        vms: &BTreeMap<K, PagedVm>,
    ) -> BTreeMap<K, u64> {
        self.0.retain(|key, _| vms.contains_key(key));
        let mut competitors: Vec<Competitor> = vms.iter().map(|(key, vm)| self.measure(key, vm)).collect();
        if host.available < marks.low {
            fall(&mut competitors, host, marks);
        } else if host.available >= marks.high {
            rise(&mut competitors, host, marks);
        }
        let decided = vms.keys().zip(&competitors);
        for (key, competitor) in decided.clone() {
            if let Some(ordered) = self.0.get_mut(key) {
                ordered.limit = competitor.limit;
            }
        }
        decided.map(|(key, vm)| (key.clone(), vm.limit)).collect()
    }

    /// Takes the measured size of a VM.
    fn measure(&mut self, key: &K, vm: &PagedVm) -> Competitor {
        let least = vm.promise.max(u64::from(LIMIT_MIN_PAGES)).min(vm.limit);
        let ordered = self.0.entry(key.clone()).or_insert(Ordered {
            limit: vm.limit,
            resident: vm.resident,
            late_rounds: 0,
        });
        // The user may have changed the limit.
        ordered.limit = ordered.limit.clamp(least, vm.limit);
        let excess = vm.resident.saturating_sub(ordered.limit);
        let progress = ordered.resident.saturating_sub(vm.resident);
        ordered.late_rounds = match excess {
            0 => 0,
            _ if progress >= PROGRESS_PAGES => 0,
            _ => ordered.late_rounds.saturating_add(1),
        };
        ordered.resident = vm.resident;
        Competitor {
            least,
            most: vm.limit,
            weight: u64::from(vm.weight.clamp(1, WEIGHT_MAX)),
            limit: ordered.limit,
            used: vm.resident.min(ordered.limit),
            leaving: match ordered.late_rounds < GRACE_ROUNDS {
                true => excess,
                false => 0,
            },
        }
    }
}

/// Lowers limits by this process's part of the shortage, less what is leaving memory already.
fn fall(vms: &mut [Competitor], host: HostPages, marks: WaterMarks) {
    let goal = match host.stalled_centipercent >= STALLED_CENTIPERCENT {
        true => marks.high,
        false => marks.low + (marks.high - marks.low) / 2,
    };
    let leaving = sum(vms.iter().map(|vm| vm.leaving));
    let wanted = part(goal - host.available, vms, host).saturating_sub(leaving);
    if wanted == 0 {
        return;
    }
    let freed = |level: u64| sum(vms.iter().map(|vm| vm.used.saturating_sub(vm.fallen(level))));
    // The highest level that frees as much, or the lowest one where none does.
    let level = last_level(|level| freed(level) >= wanted);
    vms.iter_mut().for_each(|vm| vm.limit = vm.fallen(level));
}

/// Raises limits by a part of this process's part of the spare memory.
fn rise(vms: &mut [Competitor], host: HostPages, marks: WaterMarks) {
    let spare = part(host.available - marks.high, vms, host);
    let given = (spare / RAISE_DIVISOR).max(STEP_MIN_PAGES).min(spare);
    let taken = |level: u64| sum(vms.iter().map(|vm| vm.risen(level) - vm.limit));
    let level = last_level(|level| taken(level) <= given);
    vms.iter_mut().for_each(|vm| vm.limit = vm.risen(level));
}

/// This process's part of an amount: as much as its VMs have of all shared memory, but a least step.
fn part(pages: u64, vms: &[Competitor], host: HostPages) -> u64 {
    let own = sum(vms.iter().map(|vm| vm.used.saturating_add(vm.leaving)));
    let all = own.max(host.shared).max(1);
    let part = u128::from(pages) * u128::from(own) / u128::from(all);
    let part = u64::try_from(part).unwrap_or(u64::MAX);
    part.max(STEP_MIN_PAGES).min(pages)
}

/// The last level at which `holds`, which holds up to some level; 0 if it holds at none.
fn last_level(holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, u64::MAX);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match holds(middle) {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    low
}

fn sum(pages: impl Iterator<Item = u64>) -> u64 {
    pages.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests;
