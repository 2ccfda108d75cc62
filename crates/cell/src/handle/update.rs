//! Changes to a running VM's use of its host.

use std::io;
use std::sync::Arc;

use config::VmSpec;
use registry::update::{MemoryReport, Update};
use registry::vms::Record;

use super::VmHandle;
use crate::control_group::{ControlGroup, ControlGroupError};

impl VmHandle {
    /// Changes the VM's use of its host. An error leaves the changes before it as they are: limits come
    /// first, then one pin after another, then the memory, whose nodes the result names.
    ///
    /// # Errors
    /// If a VM file may not say that, the host does not let this user limit anything, the VM has no such
    /// vCPU, its vCPUs are on several hosts, or its memory may not be bound to these nodes.
    pub fn update(&self, update: &Update) -> io::Result<Option<MemoryReport>> {
        let _updating = self.begin_update();
        let now = self.recorder().read(Record::clone);
        let record = now.ok_or_else(|| io::Error::other("the VM is not running just now"))?;
        let next = update.applied_to(&record.spec);
        let next = next.map_err(|fault| io::Error::other(format!("{}; {}", fault.message, fault.help)))?;
        let has_remote_parts = self.state().has_remote_parts;
        if has_remote_parts && !update.pins.is_empty() {
            return Err(io::Error::other(
                "vCPUs of a VM on several hosts keep to the CPUs of their cell: only the cells of this host \
                 can pin its threads; `mirrorball move` takes a vCPU to another cell",
            ));
        }
        if has_remote_parts && update.changes_limits() {
            return Err(io::Error::other(
                "the limits of a VM on several hosts can't be changed while it runs; start it with others",
            ));
        }
        if update.changes_limits() {
            self.limit(&record, &next).map_err(io::Error::other)?;
            self.recorder().change(|record| {
                let nodes = std::mem::take(&mut record.spec.memory_nodes);
                record.spec = VmSpec {
                    memory_nodes: nodes,
                    ..next
                };
            });
        }
        for pin in &update.pins {
            self.pin(pin)?;
        }
        let place = |nodes: &Vec<u32>| self.place_memory(&record, nodes);
        update.memory_nodes.as_ref().map(place).transpose()
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
