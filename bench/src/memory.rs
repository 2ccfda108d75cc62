//! Memory of a monitor beyond its guest's memory.

use std::fs;

use bench::guest_process::GuestProcess;

use crate::Outcome;
use crate::vmm::Vmm;

/// A mapping of this size or more, writable, is the guest's memory.
const GUEST_BYTES: u64 = 128 << 20;

/// PSS in MiB of the monitor and all its children, without the guest's memory.
///
/// Mirrorball's processes are the command, the monitor that it forked, the keeper and the shard.
pub fn overhead_mib(vmm: Vmm, guest: &GuestProcess) -> Outcome<f64> {
    let mut total = 0;
    for pid in family(guest.child.id())? {
        let kib = overhead_kib(pid)?;
        eprintln!(
            "bench: {} process {pid}: {kib} KiB beyond the guest's",
            vmm.name()
        );
        total += kib;
    }
    Ok(total as f64 / 1024.0)
}

/// The process and its descendants.
pub fn family(root: u32) -> Outcome<Vec<u32>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        let Some(parent) = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1)) else {
            continue;
        };
        parents.push((pid, parent.parse::<u32>()?));
    }
    let mut family = vec![root];
    let mut at = 0;
    while at < family.len() {
        let parent = family[at];
        family.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(pid, _)| *pid),
        );
        at += 1;
    }
    Ok(family)
}

fn overhead_kib(pid: u32) -> Outcome<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let mut total = 0;
    let mut guest = false;
    for line in text.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
            guest = end - start >= GUEST_BYTES;
        } else if line.starts_with("Pss:") && !guest {
            total += line.split_whitespace().nth(1).unwrap_or("0").parse::<u64>()?;
        }
    }
    Ok(total)
}
