//! Changes to what a running VM uses of its host.

use std::fs;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use config::VmSpec;
use registry::update::{Pin, Update};

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
        let now = self
            .recorder()
            .read(|record| (record.name.clone(), record.spec.clone()));
        let (name, now) = now.ok_or_else(|| io::Error::other("the VM is not running just now"))?;
        let next = update.applied_to(&now);
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
        let pids = shards
            .into_iter()
            .chain(helpers.into_iter().map(u32::cast_signed));
        // The number of a process that has ended may be another program's.
        let added = pids
            .filter(|pid| is_child(*pid))
            .try_for_each(|pid| group.add(pid));
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

/// Whether a process is a child of this one.
fn is_child(pid: i32) -> bool {
    let parent = fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| {
            // The name may have spaces and parentheses: state and parent follow its last one.
            stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse::<u32>().ok()
        });
    parent == Some(std::process::id())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_processes_that_this_one_has_started_are_its_children() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(is_child(pid));
        assert!(!is_child(std::process::id().cast_signed()));
        assert!(!is_child(1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_child(pid), "it is gone");
    }
}
