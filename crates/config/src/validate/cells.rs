//! The cells that a VM may depend on.

use crate::cluster::CELLS_MAX;
use crate::fault::{Fault, fault};
use crate::vm::VmSpec;

/// Checks that each cell is named once, that `cell` is one of them, and that the VM does not span cells.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let cells = &spec.cells;
    if cells.is_empty() {
        return Ok(());
    }
    if spec.span.is_some() {
        return Err(fault(
            &["cells"],
            "cells to depend on, and a span: each part has memory of its own cell only",
            "leave out `cells` or `span`",
        )
        .or_by_flag("leave out `--cells` or `--span`"));
    }
    if cells.len() > CELLS_MAX {
        return Err(fault(
            &["cells"],
            format!("{} cells", cells.len()),
            format!("name {CELLS_MAX} at most"),
        ));
    }
    for (index, cell) in cells.iter().enumerate() {
        if cells[..index].contains(cell) {
            return Err(fault(
                &["cells", &index.to_string()],
                format!("cell {cell} is named twice"),
                "name it once",
            ));
        }
    }
    if let Some(cell) = spec.cell.filter(|cell| !cells.contains(cell)) {
        return Err(fault(
            &["cells"],
            format!("the VM runs in cell {cell}, which is not one of these"),
            format!("add {cell}, or leave out `cell`"),
        )
        .or_by_flag(format!("add {cell}, or leave out `--cell`")));
    }
    Ok(())
}
