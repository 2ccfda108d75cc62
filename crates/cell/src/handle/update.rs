//! Changes to what a running VM uses of its host.

use std::io;
use std::sync::{Arc, PoisonError};

use config::VmSpec;
use registry::update::{Pin, Update};

use super::Handle;
use crate::affinity;
use crate::control_group::{ControlGroup, ControlGroupError};

impl Handle {
    /// Changes what the VM uses of its host. What is done before an error stays done, and the record says it.
    ///
    /// # Errors
    /// If a VM file may not say that, the host does not let this user limit anything, or the VM has no such vCPU.
    pub fn update(&self, update: &Update) -> io::Result<()> {
        let _updating = self.0.updating.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self
            .recorder()
            .read(|record| (record.name.clone(), record.spec.clone()));
        let (name, now) = now.ok_or_else(|| io::Error::other("the VM is not running just now"))?;
        let next = update.applied_to(&now);
        let next = next.map_err(|fault| io::Error::other(format!("{}; {}", fault.message, fault.mend)))?;
        if update.changes_limits() {
            self.limit(&name, &next).map_err(io::Error::other)?;
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
            // The host may have lost a CPU since: the vCPU runs on the others.
            let _ = self.pin(&Pin { vcpu, cpus });
        }
    }

    fn limit(&self, name: &str, spec: &VmSpec) -> Result<(), ControlGroupError> {
        let present = self.state().group.clone();
        let group = match present {
            Some(group) => group,
            None => self.join_group(Arc::new(ControlGroup::make(name, false)?))?,
        };
        group.limit(spec)
    }

    /// Puts all processes of the VM into the group.
    fn join_group(&self, group: Arc<ControlGroup>) -> Result<Arc<ControlGroup>, ControlGroupError> {
        let (shards, helpers) = {
            let mut state = self.state();
            // A shard that starts from now on is added by the thread that starts it.
            state.group = Some(group.clone());
            (state.shards(), state.helpers.clone())
        };
        for pid in shards
            .into_iter()
            .chain(helpers.into_iter().map(u32::cast_signed))
        {
            group.add(pid)?;
        }
        Ok(group)
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
