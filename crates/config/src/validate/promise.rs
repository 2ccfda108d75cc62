//! Checks of promised memory.

use crate::fault::{Fault, fault};
use crate::vm::{PagesSpec, VmSpec};

/// A promise is a part of the memory that the VM may have, and that the kernel can take back.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    check_weight(spec)?;
    let Some(promised) = spec.memory_min else {
        return Ok(());
    };
    if spec.span.is_some() {
        return Err(fault(
            &["memory_min"],
            "a spanning VM has all of its memory in each of its cells",
            "leave out `memory_min`, or `span`",
        )
        .or_by_flag("leave out `--memory-min`, or `--span`"));
    }
    if matches!(spec.pages, PagesSpec::Huge2M | PagesSpec::Huge1G) {
        return Err(fault(
            &["memory_min"],
            "pages of the host's pools stay in memory in any case",
            "leave out `memory_min`, or use `pages = \"4K\"` or `\"thp\"`",
        )
        .or_by_flag("leave out `--memory-min`, or use `--pages 4K` or `thp`"));
    }
    let (key, most) = match spec.resident {
        Some(resident) if resident < spec.memory => ("resident", resident),
        _ => ("memory", spec.memory),
    };
    if promised > most {
        return Err(fault(
            &["memory_min"],
            format!("a promise of {promised} is more than the VM's {key} of {most}"),
            format!("use {most} or less, or raise `{key}`"),
        ));
    }
    Ok(())
}

fn check_weight(spec: &VmSpec) -> Result<(), Fault> {
    let Some(weight) = spec.memory_weight else {
        return Ok(());
    };
    if !(1..=10_000).contains(&weight) {
        return Err(fault(
            &["memory_weight"],
            format!("a weight of {weight}"),
            "write a number from 1 to 10000",
        ));
    }
    if !spec.is_trimmable() {
        return Err(fault(
            &["memory_weight"],
            "a weight of a VM that keeps all of its memory",
            "add `resident` and `memory_min`, as \"128M\", or leave it out",
        )
        .or_by_flag("add --resident and --memory-min, as 128M, or leave it out"));
    }
    Ok(())
}
