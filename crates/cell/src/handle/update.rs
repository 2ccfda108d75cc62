//! Changes to a running VM's use of its host.

use std::io;
use std::sync::Arc;

use config::VmSpec;
use registry::update::{MemoryReport, Update};
use registry::vms::Record;

use super::{VmChange, VmHandle};
use crate::control_group::{ControlGroup, ControlGroupError};
use crate::link::not_running;
use crate::remote::part::RemotePart;
use crate::remote::protocol::PartLimits;
use crate::secondary_shards::SecondaryShards;

impl VmHandle {
    /// Changes the VM's use of its host. An error leaves the changes before it as they are: the reservation,
    /// disks and limits come first, then the resident memory, then one pin after another, then the memory,
    /// whose nodes the result names.
    ///
    /// # Errors
    /// If a VM file may not say that, a host does not let this user limit anything, the VM has no such vCPU,
    /// another host does not answer, or its memory may not be bound to these nodes.
    pub fn update(&self, update: &Update) -> io::Result<Option<MemoryReport>> {
        let _updating = self.begin_update();
        let now = self.recorder().read(Record::clone);
        let record = now.ok_or_else(not_running)?;
        let next = update.applied_to(&record.spec);
        let next = next.map_err(|fault| io::Error::other(format!("{}; {}", fault.message, fault.help)))?;
        self.check_pins(&record, update)?;
        self.reserve_cpu(&record, &next)?;
        if !update.disks.is_empty() {
            self.limit_disks(&next)?;
        }
        if update.changes_limits() {
            self.limit_on_all_hosts(&record, &next)?;
            self.recorder().change(|record| {
                let nodes = std::mem::take(&mut record.spec.memory_nodes);
                let resident = record.spec.resident;
                record.spec = VmSpec {
                    memory_nodes: nodes,
                    resident,
                    ..next
                };
            });
        }
        let limited = update
            .resident
            .map_or(Ok(()), |resident| self.limit_resident(&record, resident));
        let changed = limited.and_then(|()| update.pins.iter().try_for_each(|pin| self.pin(pin)));
        self.report_change(VmChange::Updated);
        changed?;
        let place = |nodes: &Vec<u32>| self.place_memory(&record, nodes);
        update.memory_nodes.as_ref().map(place).transpose()
    }

    /// Has the drivers of its cell check the pins that the VM would have.
    pub(super) fn check_pins(&self, record: &Record, update: &Update) -> io::Result<()> {
        let (Some(observer), false) = (self.0.observer.get(), update.pins.is_empty()) else {
            return Ok(());
        };
        let mut pins = record.pins.clone();
        for pin in &update.pins {
            match pin.cpus.is_empty() {
                true => pins.remove(&pin.vcpu),
                false => pins.insert(pin.vcpu, pin.cpus.clone()),
            };
        }
        let checked = observer.check_pins(record.spec.cpus, &pins);
        checked.map_err(io::Error::other)
    }

    /// Limits the VM's processes on each host that it spans, this one last. Each host's group has the whole
    /// limits, as at the start. If a host refuses, those that have changed get the former limits again.
    fn limit_on_all_hosts(&self, record: &Record, next: &VmSpec) -> io::Result<()> {
        let parts = {
            let state = self.state();
            let parts = state.parts.as_ref().map(SecondaryShards::remote);
            if state.has_remote_parts && parts.is_none() {
                return Err(not_running());
            }
            parts.unwrap_or_default()
        };
        let parts: Vec<&RemotePart> = parts.iter().map(|part| &**part).collect();
        let limit = |part: &RemotePart, spec: &VmSpec| part.limit(PartLimits::from(spec));
        change_all(
            &parts,
            |part| limit(part, next),
            |part| limit(part, &record.spec),
            || self.limit(record, next).map_err(io::Error::other),
        )
    }

    fn limit(&self, record: &Record, spec: &VmSpec) -> Result<(), ControlGroupError> {
        let present = self.state().group.clone();
        let group = match present {
            Some(group) => group,
            None => {
                let owner = record.keeper_pid.and_then(|pid| u32::try_from(pid).ok());
                let owner = owner.unwrap_or_else(std::process::id);
                self.join_group(Arc::new(ControlGroup::make(&record.name, owner, false)?))?
            }
        };
        group.limit(spec)
    }

    /// Puts all processes of the VM into the group.
    fn join_group(&self, group: Arc<ControlGroup>) -> Result<Arc<ControlGroup>, ControlGroupError> {
        let processes = {
            let mut state = self.state();
            // A shard that starts from now on is added by the thread that starts it.
            state.group = Some(group.clone());
            state.processes()
        };
        let added = processes.into_iter().try_for_each(|pid| group.add(pid));
        if added.is_err() {
            // The next change begins anew.
            self.state().group = None;
        }
        added.map(|()| group)
    }
}

/// Changes all by `change`, one after another, then the rest by `last`. If one fails, those that have changed
/// are changed back, the failed one too: it may have been cut off between its change and its answer.
fn change_all<T: Copy>(
    all: &[T],
    change: impl Fn(T) -> io::Result<()>,
    back: impl Fn(T) -> io::Result<()>,
    last: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let mut begun = 0;
    let changed = all.iter().try_for_each(|one| {
        begun += 1;
        change(*one)
    });
    let changed = changed.and_then(|()| last());
    if changed.is_err() {
        // The error of the change is of more use than one of these.
        all[..begun].iter().for_each(|one| _ = back(*one));
    }
    changed
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn hosts_that_have_changed_are_changed_back_if_one_fails() {
        let run = |failing: Option<u8>, last: io::Result<()>| {
            let done = RefCell::new(Vec::new());
            let change = |one: u8| {
                done.borrow_mut().push(format!("+{one}"));
                match failing == Some(one) {
                    true => Err(io::Error::other(format!("host {one} refuses"))),
                    false => Ok(()),
                }
            };
            let back = |one: u8| {
                done.borrow_mut().push(format!("-{one}"));
                Err(io::Error::other("it is gone"))
            };
            let changed = change_all(&[1, 2, 3], change, back, || last);
            (changed.map_err(|error| error.to_string()), done.take().join(" "))
        };
        assert_eq!(run(None, Ok(())), (Ok(()), "+1 +2 +3".to_owned()));
        let refused = Err("host 2 refuses".to_owned());
        assert_eq!(run(Some(2), Ok(())), (refused, "+1 +2 -1 -2".to_owned()));
        let refused = Err("this host refuses".to_owned());
        let last = Err(io::Error::other("this host refuses"));
        assert_eq!(run(None, last), (refused, "+1 +2 +3 -1 -2 -3".to_owned()));
    }
}
