//! Observer of a VM: its changes come to the scheduler, and orders and checks of its owner.

use std::collections::BTreeMap;
use std::sync::mpsc;

use super::vm_table::{VmSettings, check_pins};
use super::{Change, RELEASE_LIMIT, Scheduler, order};
use crate::handle::{VmChange, VmObserver};

/// Reports the changes of one VM to the scheduler, and takes orders for it.
pub(super) struct Observer {
    vm: u32,
    scheduler: Scheduler,
}

impl Observer {
    /// The observer of the VM of this address.
    pub(super) fn new(vm: u32, scheduler: Scheduler) -> Self {
        Self { vm, scheduler }
    }
}

impl VmObserver for Observer {
    fn changed(&self, change: VmChange) {
        let _ = self.scheduler.changes.send(Change::Of(self.vm, change));
    }

    fn check_pins(&self, vcpus: u8, pins: &BTreeMap<u8, Vec<usize>>) -> Result<(), String> {
        let settings = VmSettings {
            vcpus,
            pins: pins.clone(),
            ..VmSettings::default()
        };
        check_pins(&settings, &self.scheduler.shared.host_cpus)
    }

    fn order(&self, vcpu: u8, cpu: usize) -> Option<Result<(), String>> {
        order::order(vcpu, cpu, |tell| {
            let _ = self
                .scheduler
                .changes
                .send(Change::Order(self.vm, vcpu, cpu, tell));
        })
    }

    fn release(&self) -> bool {
        let (tell, told) = mpsc::channel();
        let _ = self.scheduler.changes.send(Change::Release(self.vm, tell));
        told.recv_timeout(2 * RELEASE_LIMIT).unwrap_or(false)
    }
}
