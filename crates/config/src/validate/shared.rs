//! The shared regions of a VM.

use crate::cluster::check_region_name;
use crate::fault::{Fault, fault};
use crate::vm::VmSpec;

/// Maximum number of shared regions of a VM.
const REGIONS_MAX: usize = 8;

/// Checks that each region has a name and is listed once, and that the VM is in one cell.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let regions = &spec.shared;
    if regions.is_empty() {
        return Ok(());
    }
    if spec.span.is_some() {
        return Err(fault(
            &["shared"],
            "a shared region, and a span: the parts of the VM would not all have it",
            "leave out `shared` or `span`",
        ));
    }
    if regions.len() > REGIONS_MAX {
        return Err(fault(
            &["shared"],
            format!("{} shared regions", regions.len()),
            format!("{REGIONS_MAX} at most"),
        ));
    }
    for (index, region) in regions.iter().enumerate() {
        let at = index.to_string();
        check_region_name(&region.name, &["shared", &at, "name"])?;
        if regions[..index].iter().any(|other| other.name == region.name) {
            return Err(fault(
                &["shared", &at, "name"],
                format!("region {} is listed twice", region.name),
                "list it once; a VM that may write also reads",
            ));
        }
    }
    Ok(())
}
