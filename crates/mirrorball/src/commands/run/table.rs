//! Summary of several VMs after all have ended.

use std::collections::BTreeMap;

use hostinfo::memory_use::VmMemory;
use shard::launch::Ending;

use super::super::mem::mib;
use super::follow::{Followed, status};

/// Prints each VM's result.
pub(super) fn print(vms: &BTreeMap<String, Followed>) {
    println!(
        "{:<16} {:>4} {:>9} {:>11} {:>7}  {:<10} {:>8} {:>8} {:>8}  LAST LINE",
        "VM", "CELL", "TOTAL", "COMMAND", "STATUS", "END", "MEMORY", "HOST", "SHARED"
    );
    for (name, vm) in vms {
        let (seconds, last) = vm
            .done
            .as_ref()
            .map_or((0.0, ""), |done| (done.seconds, done.last_line.as_str()));
        let end = match &vm.ended {
            Some(Ending::PowerOff | Ending::Reboot) => "power off",
            Some(Ending::Quit) if vm.done.is_some() => "done",
            Some(Ending::Quit) => "killed",
            Some(Ending::Panic) => "panic",
            Some(Ending::RebootLoop) => "rebooting",
            Some(_) => "failed",
            None => "-",
        };
        let cell = vm.cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string());
        let memory = vm.done.as_ref().and_then(|done| done.memory.as_deref());
        let column =
            |bytes: fn(&VmMemory) -> u64| memory.map_or_else(|| "-".to_owned(), |memory| mib(bytes(memory)));
        println!(
            "{name:<16} {cell:>4} {:>7.1} s {seconds:>9.1} s {:>7}  {end:<10} {:>8} {:>8} {:>8}  {last}",
            vm.seconds,
            status(vm),
            column(|memory| memory.memory_bytes),
            column(|memory| memory.host_bytes),
            column(VmMemory::shared_bytes),
        );
    }
    memory_sum(vms);
}

/// Prints the sum of the guests' memory and its host cost; each was measured at the end of its command.
fn memory_sum(vms: &BTreeMap<String, Followed>) {
    let all = vms.values().filter_map(|vm| vm.done.as_ref()?.memory.as_ref());
    let [had, host, shared] = all.fold([0; 3], |[had, host, shared], memory| {
        [
            had + memory.memory_bytes,
            host + memory.host_bytes,
            shared + memory.shared_bytes(),
        ]
    });
    if had > 0 {
        println!(
            "The guests had {} of memory, for which the host spent {}; {} of their pages were shared with \
             the page cache of the host, and so with one another.",
            mib(had),
            mib(host),
            mib(shared)
        );
    }
}
