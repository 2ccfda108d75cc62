//! The limits of requests to a VM's disks.

use std::io;

use config::VmSpec;
use shard_api::launch::{Answer, Order};

use super::VmHandle;
use crate::open::disk_limits;

impl VmHandle {
    /// Limits the requests to the disks as `next` says, from now on and after reboots.
    ///
    /// # Errors
    /// If the VM does not run, it has no such disk, or its shard is of a release without limits.
    pub(super) fn limit_disks(&self, next: &VmSpec) -> io::Result<()> {
        match self.act(&Order::LimitDisks(disk_limits(next)))? {
            Answer::Done => {}
            answer => return Err(super::not_an_answer(&answer)),
        }
        self.recorder().change(|record| {
            let spec = &mut record.spec;
            (spec.root.bandwidth, spec.root.operations) = (next.root.bandwidth, next.root.operations);
            for (disk, next) in spec.disks.iter_mut().zip(&next.disks) {
                (disk.bandwidth, disk.operations) = (next.bandwidth, next.operations);
            }
        });
        Ok(())
    }
}
