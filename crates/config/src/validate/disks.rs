//! Checks of the disks of a VM: formats, modes, devices and combinations.

use crate::fault::{Fault, fault};
use crate::size::Size;
use crate::vm::{DiskDevice, DiskFormatSpec, DiskMode, DiskSpec, OnFullSpec};

/// Least limit of a disk's bytes per second. A request of 1 MiB then takes 16 s.
const BANDWIDTH_MIN: u64 = 64 << 10;

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
    check_limits(disk.bandwidth, disk.operations, &["disks", index])
}

/// Checks the limits of a disk, or of the root disk, whose keys are at `at`.
pub(super) fn check_limits(
    bandwidth: Option<Size>,
    operations: Option<u32>,
    at: &[&str],
) -> Result<(), Fault> {
    if bandwidth.is_some_and(|bandwidth| bandwidth.0 < BANDWIDTH_MIN) {
        return Err(fault(
            &[at, &["bandwidth"]].concat(),
            "too few bytes per second",
            "write a size of 64K or more, or drop `bandwidth`",
        ));
    }
    if operations == Some(0) {
        return Err(fault(
            &[at, &["operations"]].concat(),
            "no requests at all",
            "write a number of requests per second from 1, or drop `operations`",
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
    if disk.bandwidth.is_some() || disk.operations.is_some() {
        let key = match disk.bandwidth {
            Some(_) => "bandwidth",
            None => "operations",
        };
        return Err(fault(
            &at(key),
            "accesses to a pmem disk are no requests that could be counted",
            format!("drop `{key}`, or use `as = \"block\"`"),
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
