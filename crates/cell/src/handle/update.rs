//! Changes to what a running VM uses of its host.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use config::VmSpec;
use registry::update::{Pin, Update};
use registry::vms::Record;

use super::Handle;
use crate::affinity;
use crate::control_group::{ControlGroup, ControlGroupError};

/// How often, and how long apart, the threads of vCPUs are looked for that have just started: each names itself.
const NAME_TRIES: u32 = 50;
const NAME_PAUSE: Duration = Duration::from_millis(10);

impl Handle {
    /// Changes what the VM uses of its host. An error leaves the changes before it as they are: limits come first, then
    /// one pin after another.
    ///
    /// # Errors
    /// If a VM file may not say that, the host does not let this user limit anything, the VM has no such vCPU, or its
    /// vCPUs are in several cells.
    pub fn update(&self, update: &Update) -> io::Result<()> {
        let _updating = self.0.updating.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.recorder().read(Record::clone);
        let record = now.ok_or_else(|| io::Error::other("the VM is not running just now"))?;
        let next = update.applied_to(&record.spec);
        let next = next.map_err(|fault| io::Error::other(format!("{}; {}", fault.message, fault.mend)))?;
        let (spans, has_remote_parts) = {
            let state = self.state();
            (!state.cells.is_empty(), state.has_remote_parts)
        };
        if spans && !update.pins.is_empty() {
            return Err(io::Error::other(
                "vCPUs of a VM that spans cells keep to the CPUs of their cell; `mirrorball move` takes one to another",
            ));
        }
        if has_remote_parts && update.changes_limits() {
            return Err(io::Error::other(
                "the limits of a VM on several hosts can't be changed while it runs; start it with others",
            ));
        }
        if update.changes_limits() {
            self.limit(&record, &next).map_err(io::Error::other)?;
            self.recorder().change(|record| record.spec = next);
        }
        for pin in &update.pins {
            self.pin(pin)?;
            self.recorder().change(|record| {
                if pin.cpus.is_empty() {
                    record.pins.remove(&pin.vcpu);
                } else {
                    record.pins.insert(pin.vcpu, pin.cpus.clone());
                }
            });
        }
        Ok(())
    }

    /// Pins the vCPUs again whose threads are new.
    pub(crate) fn pin_again(&self) {
        let pins = self.recorder().read(|record| record.pins.clone());
        for (vcpu, cpus) in pins.unwrap_or_default() {
            let pin = Pin { vcpu, cpus };
            for _ in 0..NAME_TRIES {
                if self.pin(&pin).is_ok() {
                    break;
                }
                // The host may have lost a CPU since: then the vCPU runs on the others.
                std::thread::sleep(NAME_PAUSE);
            }
        }
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

    fn pin(&self, pin: &Pin) -> io::Result<()> {
        let shards = self.state().shards();
        if shards.is_empty() {
            return Err(io::Error::other("the VM is not running just now"));
        }
        shards
            .into_iter()
            .try_for_each(|shard| affinity::pin(shard, pin.vcpu, &pin.cpus))
    }
}
