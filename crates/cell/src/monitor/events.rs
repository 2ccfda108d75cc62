//! The events of a VM that the process which serves it writes to the host's journal ([`registry::journal`]).

use registry::journal::{Change, note};
use shard_api::launch::Ending;

use crate::ending;

/// The VM has its name and its place.
pub(super) fn starting(vm: &str, cell: Option<u16>) {
    let vm = vm.to_owned();
    note(Change::VmStarting { vm, cell });
}

/// This process serves the VM from now on.
pub(super) fn adopted(vm: &str, cell: Option<u16>) {
    let (vm, pid) = (vm.to_owned(), std::process::id());
    note(Change::VmAdopted { vm, pid, cell });
}

/// The vCPUs run, for the `boots`th time.
pub(super) fn booted(vm: &str, boots: u32) {
    let vm = vm.to_owned();
    note(match boots {
        0 | 1 => Change::VmRunning { vm },
        _ => Change::VmRebooted { vm, boots },
    });
}

/// The VM was paused by order, or resumed.
pub(super) fn paused(vm: &str, is_paused: bool) {
    let vm = vm.to_owned();
    note(match is_paused {
        true => Change::VmPaused { vm },
        false => Change::VmResumed { vm },
    });
}

/// These disks now wait for room on the host.
pub(super) fn full_disks(vm: &str, disks: &[String]) {
    note(Change::VmFullDisks {
        vm: vm.to_owned(),
        disks: disks.to_vec(),
    });
}

/// The VM has ended so, and starts again.
pub(super) fn starts_again(vm: &str, why: &str) {
    let (vm, why) = (vm.to_owned(), why.to_owned());
    note(Change::VmStartsAgain { vm, why });
}

/// The VM did not start.
pub(super) fn failed(vm: &str, why: &str) {
    let (vm, why) = (vm.to_owned(), why.to_owned());
    note(Change::VmFailed { vm, why });
}

/// The VM has ended.
pub(super) fn ended(vm: &str, ending: &Ending) {
    note(Change::VmEnded {
        vm: vm.to_owned(),
        status: Some(ending::status(ending)),
        why: ending::reason(ending),
    });
}
