//! Pins: vCPUs that run only on some of their VM's CPUs.
//!
//! A pin is the affinity of the vCPU's thread, set from outside its shard: by the monitor of a part, if the
//! shard is on another host. A VM that spans cells has a thread for each vCPU in each shard, and the thread
//! in the vCPU's cell runs it. So a pin of such a VM belongs to a cell: it ends when the vCPU moves to
//! another one, which has other CPUs, and it holds after a reboot if the vCPU starts in that cell. The record
//! has the reason why a pin ended.

use std::io;
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use config::cpulist;
use locks::IgnorePoison;
use policy::span::Part;
use registry::update::Pin;
use registry::vms::Record;
use serde_json::Value;

use super::VmHandle;
use crate::affinity;
use crate::link::not_running;
use crate::remote::part::RemotePart;
use crate::shard_process::ShardProcess;

/// Number and interval of attempts to find the threads of vCPUs that have just started: each names itself.
const NAME_TRIES: u32 = 50;
const NAME_PAUSE: Duration = Duration::from_millis(10);

/// Interval of attempts to begin an update.
const UPDATE_PAUSE: Duration = Duration::from_millis(1);

/// The cell of a vCPU, of those that its VM spans, and the number of its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VcpuLocation {
    pub(super) cell: u16,
    pub(super) shard: usize,
}

/// The host of a shard.
#[derive(Clone, Debug)]
pub(crate) enum ShardHost {
    /// This host, where the shard's process has this id.
    Here(i32),
    /// Another host, by the connection to its part's monitor.
    There(Arc<RemotePart>),
}

impl ShardHost {
    /// A shard on this host; none if it has ended.
    pub(crate) fn of_process(process: &ShardProcess) -> Option<Self> {
        (!process.has_ended()).then_some(Self::Here(process.pid))
    }

    /// Restricts a vCPU's thread to these CPUs of `cell`, or to all of it when `cpus` is empty.
    fn pin(&self, vcpu: u8, cpus: &[usize], cell: u16) -> io::Result<()> {
        match self {
            Self::Here(shard) => affinity::pin(*shard, vcpu, cpus, Some(cell)),
            Self::There(part) => part.pin(vcpu, cpus),
        }
    }
}

impl VmHandle {
    /// The cells and shards of the vCPUs of a VM that spans cells, by vCPU.
    ///
    /// # Errors
    /// If the VM does not run, or does not report where its vCPUs are.
    pub(super) fn locations(&self) -> io::Result<Vec<VcpuLocation>> {
        let cells = {
            let state = self.state();
            if state.shards_of_cells().is_empty() {
                return Err(io::Error::other(
                    "not all of its shards run; try again in a moment",
                ));
            }
            state.cells.clone()
        };
        let locations = locations_in(&self.counters()?, &cells);
        locations
            .ok_or_else(|| io::Error::other("it does not report where its vCPUs are; try again in a moment"))
    }

    /// Ends pins of vCPUs that have left their cell by a move whose answer came too late. Needs
    /// [`VmHandle::begin_update`], since before `locations` was read.
    pub(super) fn end_late_pins(&self, locations: &[VcpuLocation]) {
        for (vcpu, location) in (0_u8..).zip(locations) {
            self.end_pin_elsewhere(vcpu, location.cell);
        }
    }

    /// Pins a vCPU, or ends its pin, and records that.
    ///
    /// # Errors
    /// If the VM has no such vCPU, or the vCPU may not use such a CPU.
    pub(super) fn pin(&self, pin: &Pin) -> io::Result<()> {
        let spans = !self.state().cells.is_empty();
        let cell = if spans {
            let locations = self.locations()?;
            self.end_late_pins(&locations);
            let location = locations
                .get(usize::from(pin.vcpu))
                .ok_or_else(|| io::Error::other(format!("the VM has no vCPU {}", pin.vcpu)))?;
            let shards = self.state().shards_of_cells();
            let (cell, shard) = shards
                .get(location.shard)
                .ok_or_else(|| io::Error::other("not all of its shards run; try again in a moment"))?;
            shard.pin(pin.vcpu, &pin.cpus, *cell)?;
            Some(*cell)
        } else {
            self.check_is_home(pin.vcpu)?;
            self.pin_in_one_cell(pin)?;
            None
        };
        self.recorder().change(|record| note(record, pin, cell));
        Ok(())
    }

    /// Pins vCPUs again after a boot: their threads are new.
    pub(crate) fn pin_again(&self) {
        self.restrict_to_borrowed_cpus();
        let pins = self.recorder().read(at_boot);
        for (pin, cells) in pins.unwrap_or_default() {
            match cells {
                None => retry(|| self.pin_in_one_cell(&pin)),
                Some((pinned_in, starts_in)) if pinned_in == starts_in => {
                    let shards = self.state().shards_of_cells();
                    let shard = shards.into_iter().find(|(cell, _)| *cell == starts_in);
                    if let Some((cell, shard)) = shard {
                        retry(|| shard.pin(pin.vcpu, &pin.cpus, cell));
                    }
                }
                Some((pinned_in, starts_in)) => {
                    let why = format!(
                        "CPUs {} of cell {pinned_in}; the VM rebooted, and vCPU {} started in cell \
                         {starts_in}",
                        cpulist::write(&pin.cpus),
                        pin.vcpu
                    );
                    self.recorder()
                        .change(|record| _ = drop_pin(record, pin.vcpu, why));
                }
            }
        }
    }

    /// Ends the pin of a vCPU that has moved to this cell from the one that the pin belongs to. Returns the
    /// CPUs of the pin.
    pub(super) fn end_pin_elsewhere(&self, vcpu: u8, cell: u16) -> Option<Vec<usize>> {
        let pinned_in = self
            .recorder()
            .read(|record| record.pin_cells.get(&vcpu).copied());
        let pinned_in = pinned_in.flatten().filter(|pinned_in| *pinned_in != cell)?;
        let shards = self.state().shards_of_cells();
        if let Some((cell, shard)) = shards.into_iter().find(|(cell, _)| *cell == pinned_in) {
            // The thread is idle until the vCPU comes back, which runs unpinned then. A shard that has ended
            // has no threads.
            let _ = shard.pin(vcpu, &[], cell);
        }
        let mut dropped = None;
        self.recorder().change(|record| {
            let cpus = record.pins.get(&vcpu).map(|cpus| cpulist::write(cpus));
            let cpus = cpus.unwrap_or_default();
            let why = format!("CPUs {cpus} of cell {pinned_in}; vCPU {vcpu} moved to cell {cell}");
            dropped = drop_pin(record, vcpu, why);
        });
        dropped
    }

    /// Excludes pins and moves of this VM from one another, while the result lives.
    pub(super) fn begin_update(&self) -> MutexGuard<'_, ()> {
        self.0.updating.lock().ignore_poison()
    }

    /// As [`VmHandle::begin_update`]; none while another update or move is under way.
    pub(super) fn try_begin_update(&self) -> Option<MutexGuard<'_, ()>> {
        match self.0.updating.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// As [`VmHandle::begin_update`]; none if another update or move is still under way after `limit`.
    pub(super) fn begin_update_within(&self, limit: Duration) -> Option<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + limit;
        loop {
            let updating = self.try_begin_update();
            if updating.is_some() || Instant::now() >= deadline {
                return updating;
            }
            std::thread::sleep(UPDATE_PAUSE);
        }
    }

    /// Lets the threads of the vCPUs of a VM use the CPUs of their pins again, or all that the VM may use: a
    /// driver of a cell had each on one CPU. A VM over several hosts has no drivers.
    pub(crate) fn restore_affinity(&self) {
        let _updating = self.begin_update();
        self.restore_affinity_of_all();
    }

    /// The same. Needs [`VmHandle::begin_update`].
    pub(super) fn restore_affinity_of_all(&self) {
        if !self.state().cells.is_empty() {
            return self.restore_affinity_in_cells();
        }
        let known = self.recorder().read(|record| {
            (
                record.spec.cpus,
                record.pins.clone(),
                record.borrowed_cpus.clone(),
            )
        });
        let (vcpus, mut pins, borrowed) = known.unwrap_or_default();
        let is_here = |vcpu: &u8| borrowed.iter().all(|borrowed| borrowed.vcpu != *vcpu);
        for vcpu in (0..vcpus).filter(is_here) {
            let cpus = pins.remove(&vcpu).unwrap_or_default();
            // A shard that has ended has no threads. A CPU that is gone leaves the thread as it is.
            let _ = self.pin_in_one_cell(&Pin { vcpu, cpus });
        }
    }

    /// The same for a VM that spans cells of this host: each shard has a thread for each vCPU.
    fn restore_affinity_in_cells(&self) {
        let known = self.recorder().read(|record| {
            let pins = (record.pins.clone(), record.pin_cells.clone());
            (record.spec.cpus, pins)
        });
        let (vcpus, (pins, pin_cells)) = known.unwrap_or_default();
        for (cell, shard) in self.state().shards_of_cells() {
            let ShardHost::Here(pid) = shard else { continue };
            for vcpu in 0..vcpus {
                let is_here = pin_cells.get(&vcpu) == Some(&cell);
                let pin = pins.get(&vcpu).filter(|_| is_here);
                // A shard that has ended has no threads.
                let _ = affinity::pin(pid, vcpu, pin.map_or(&[], |pin| &pin[..]), Some(cell));
            }
        }
    }

    pub(super) fn pin_in_one_cell(&self, pin: &Pin) -> io::Result<()> {
        let shards = self.state().shards();
        if shards.is_empty() {
            return Err(not_running());
        }
        shards
            .into_iter()
            .try_for_each(|shard| affinity::pin(shard, pin.vcpu, &pin.cpus, None))
    }
}

/// The cells and shards of the vCPUs in the status of a VM that spans `cells`, in the order of its shards;
/// none if one of them is not known.
pub(super) fn locations_in(status: &Value, cells: &[u16]) -> Option<Vec<VcpuLocation>> {
    let location = |cell: &Value| {
        let cell = u16::try_from(cell.as_u64()?).ok()?;
        let shard = cells.iter().position(|known| *known == cell)?;
        Some(VcpuLocation { cell, shard })
    };
    let located = status["span"]["vcpus"].as_array()?;
    located.iter().map(location).collect()
}

/// Retries until the thread has its name. The host may have lost a CPU since: then the vCPU runs on the
/// others. A host that does not answer receives one request.
pub(super) fn retry(pin: impl Fn() -> io::Result<()>) {
    for _ in 0..NAME_TRIES {
        match pin() {
            Err(error) if error.kind() != io::ErrorKind::TimedOut => std::thread::sleep(NAME_PAUSE),
            _ => return,
        }
    }
}

/// Records a pin, or its end where it names no CPUs. `cell` is the vCPU's if its VM spans cells.
fn note(record: &mut Record, pin: &Pin, cell: Option<u16>) {
    record.dropped_pins.remove(&pin.vcpu);
    record.pin_cells.remove(&pin.vcpu);
    if pin.cpus.is_empty() {
        record.pins.remove(&pin.vcpu);
        return;
    }
    record.pins.insert(pin.vcpu, pin.cpus.clone());
    if let Some(cell) = cell {
        record.pin_cells.insert(pin.vcpu, cell);
    }
}

/// Records that a vCPU is not pinned any more, and why. Returns the CPUs of its pin.
pub(super) fn drop_pin(record: &mut Record, vcpu: u8, why: String) -> Option<Vec<usize>> {
    let cpus = record.pins.remove(&vcpu)?;
    record.pin_cells.remove(&vcpu);
    record.dropped_pins.insert(vcpu, why);
    Some(cpus)
}

/// A pin; where its VM spans cells, also the pin's cell and the cell that the vCPU starts in.
type PinAtBoot = (Pin, Option<(u16, u16)>);

/// The pins when a VM has started.
fn at_boot(record: &Record) -> Vec<PinAtBoot> {
    let with_cells = |(&vcpu, cpus): (&u8, &Vec<usize>)| {
        let cpus = cpus.clone();
        let pinned_in = record.pin_cells.get(&vcpu).copied();
        let cells = pinned_in.zip(first_cell(&record.span, vcpu));
        (Pin { vcpu, cpus }, cells)
    };
    record.pins.iter().map(with_cells).collect()
}

/// The cell in which a vCPU of a VM that spans cells starts.
fn first_cell(span: &[Part], vcpu: u8) -> Option<u16> {
    let part = span.iter().find(|part| part.vcpus.contains(&vcpu))?;
    Some(part.cell)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A VM of 4 vCPUs: 0 and 1 start in cell 3, 2 and 3 in cell 5.
    fn record() -> Record {
        let spec = config::parse("vm.toml", "image = \"x\"\ncpus = 4\n").unwrap();
        let mut record = Record::new("one".to_owned(), spec, 3);
        let part = |cell, vcpus| Part {
            cell,
            vcpus,
            memory_bytes: 128 << 20,
        };
        record.span = vec![part(3, 0..2), part(5, 2..4)];
        record
    }

    fn pin(vcpu: u8, cpus: &[usize]) -> Pin {
        Pin {
            vcpu,
            cpus: cpus.to_vec(),
        }
    }

    #[test]
    fn pin_holds_after_a_boot_only_in_the_cell_that_it_was_made_in() {
        let mut record = record();
        note(&mut record, &pin(1, &[7]), Some(3));
        note(&mut record, &pin(2, &[8, 9]), Some(3));
        assert_eq!(
            at_boot(&record),
            [(pin(1, &[7]), Some((3, 3))), (pin(2, &[8, 9]), Some((3, 5)))]
        );
        // A VM in one cell.
        record.span.clear();
        record.pin_cells.clear();
        assert_eq!(at_boot(&record), [(pin(1, &[7]), None), (pin(2, &[8, 9]), None)]);
    }

    #[test]
    fn dropped_pin_is_recorded_with_its_reason_until_the_vcpu_is_pinned_again_or_freed() {
        let mut record = record();
        note(&mut record, &pin(1, &[7]), Some(3));
        assert_eq!(drop_pin(&mut record, 1, "it moved".to_owned()), Some(vec![7]));
        assert!(record.pins.is_empty() && record.pin_cells.is_empty());
        assert_eq!(record.dropped_pins[&1], "it moved");
        assert_eq!(drop_pin(&mut record, 1, "again".to_owned()), None);
        assert_eq!(record.dropped_pins[&1], "it moved");
        note(&mut record, &pin(1, &[8]), Some(5));
        assert_eq!((&record.pins[&1][..], record.pin_cells[&1]), (&[8][..], 5));
        assert!(record.dropped_pins.is_empty());
        drop_pin(&mut record, 1, "it moved".to_owned());
        note(&mut record, &pin(1, &[]), Some(5));
        assert!(record.pins.is_empty() && record.dropped_pins.is_empty());
    }

    #[test]
    fn vcpus_are_in_the_shards_of_the_cells_that_the_status_has() {
        let status = |cells: Value| serde_json::json!({ "span": { "vcpus": cells } });
        let located = |cells| locations_in(&status(cells), &[3, 5]);
        let location = |cell, shard| VcpuLocation { cell, shard };
        assert_eq!(
            located(serde_json::json!([5, 3, 5])),
            Some(vec![location(5, 1), location(3, 0), location(5, 1)])
        );
        // A shard that a guest has taken over may report anything.
        for wrong in [
            serde_json::json!([3, 4]),
            serde_json::json!([3, null]),
            serde_json::json!([3, 65_541]),
            serde_json::json!("3"),
        ] {
            assert_eq!(located(wrong.clone()), None, "{wrong}");
        }
    }

    #[test]
    fn pin_is_tried_again_until_the_thread_has_its_name_but_once_on_a_silent_host() {
        let tries = std::cell::Cell::new(0);
        let fail = |kind: io::ErrorKind, fails: u32| {
            tries.set(0);
            retry(|| {
                tries.set(tries.get() + 1);
                match tries.get() <= fails {
                    true => Err(kind.into()),
                    false => Ok(()),
                }
            });
            tries.get()
        };
        assert_eq!(fail(io::ErrorKind::Other, 2), 3);
        assert_eq!(fail(io::ErrorKind::Other, u32::MAX), NAME_TRIES);
        assert_eq!(fail(io::ErrorKind::TimedOut, u32::MAX), 1);
    }

    #[test]
    fn pin_of_a_vcpu_that_stays_in_its_cell_does_not_end() {
        let handle = VmHandle::default();
        let directory = tempfile::tempdir().unwrap();
        let registry = registry::vms::Registry::at(directory.path()).unwrap();
        let mut record = record();
        note(&mut record, &pin(1, &[7]), Some(3));
        let entry = registry.claim("one").unwrap();
        let recording = handle.recorder().begin(entry, record).unwrap();
        assert_eq!(handle.end_pin_elsewhere(1, 3), None);
        assert_eq!(handle.end_pin_elsewhere(0, 5), None, "it has none");
        assert_eq!(handle.end_pin_elsewhere(1, 5), Some(vec![7]));
        let known = handle.recorder().read(Record::clone).unwrap();
        assert!(known.pins.is_empty());
        assert_eq!(known.dropped_pins[&1], "CPUs 7 of cell 3; vCPU 1 moved to cell 5");
        drop(recording);
    }
}
