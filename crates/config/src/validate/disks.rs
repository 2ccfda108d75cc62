//! Checks of the disks of a VM: formats, modes, devices and combinations.

use crate::fault::{Fault, fault};
use crate::vm::{DiskDevice, DiskFormatSpec, DiskMode, DiskSpec, OnFullSpec};

pub(super) fn check(disk: &DiskSpec, index: &str) -> Result<(), Fault> {
    if disk.path.as_os_str().is_empty() {
        return Err(fault(
            &["disks", index, "path"],
            "an empty path",
            "name the disk's file",
        ));
    }
    if disk.read_only && disk.persistent {
        return Err(fault(
            &["disks", index, "persistent"],
            "a read-only disk has no writes to keep",
            "drop `persistent` or `read_only`",
        ));
    }
    if disk.device == DiskDevice::Pmem {
        check_pmem(disk, index)?;
    }
    if disk.queues.is_some_and(|queues| queues == 0 || queues > 16) {
        return Err(fault(
            &["disks", index, "queues"],
            "not a number of queues",
            "write a number from 1 to 16",
        ));
    }
    Ok(())
}

/// A pmem disk is its file, mapped into the guest: there are no requests that an overlay could serve.
fn check_pmem(disk: &DiskSpec, index: &str) -> Result<(), Fault> {
    let at = |key| ["disks", index, key];
    if disk.format == Some(DiskFormatSpec::Qcow2) {
        return Err(fault(
            &at("format"),
            "a qcow2 disk can't be mapped as pmem",
            "use a raw file, or `as = \"block\"`",
        ));
    }
    if disk.persistent && disk.mode == DiskMode::Private {
        return Err(fault(
            &at("persistent"),
            "pmem keeps writes only when exclusive",
            "add `mode = \"exclusive\"`, or use `as = \"block\"`",
        ));
    }
    if disk.queues.is_some() {
        return Err(fault(
            &at("queues"),
            "a pmem disk has no request queues",
            "drop `queues`, or use `as = \"block\"`",
        ));
    }
    if disk.on_full == OnFullSpec::Pause {
        return Err(fault(
            &at("on_full"),
            "a write to memory can't wait for room",
            "drop `on_full`: a pmem disk gets all its room at the start; or use `as = \"block\"`",
        ));
    }
    Ok(())
}
