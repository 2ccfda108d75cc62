//! `mirrorball cluster adopt`: has the cell of a VM serve it.

use std::process::ExitCode;

use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse};
use registry::vms::{self, Registry};

use crate::commands::execution_site::in_lab;

/// Has the VM's cell serve it.
pub(super) fn adopt(vm: &str) -> Result<ExitCode> {
    let registry = Registry::open().into_diagnostic()?;
    let folder = match registry.find(vm) {
        Ok(folder) => folder,
        Err(error) => match in_lab()? {
            Some(code) => return Ok(code),
            None => return Err(miette!("{error}")),
        },
    };
    let Some(cell) = vms::read(&folder).into_diagnostic()?.cell else {
        return Err(miette!(
            help = "only VMs of a cluster are served by cells",
            "VM {vm} is in no cell"
        ));
    };
    let name = vm.to_owned();
    let files = Files::open().into_diagnostic()?;
    let answer = Connection::open(&files.cell(cell))
        .and_then(|mut connection| connection.ask(&CellRequest::Adopt { name, again: true }))
        .map_err(|error| {
            miette!(
                help = "see `mirrorball cluster status`",
                "cell {cell} does not answer: {error}"
            )
        })?;
    match answer {
        CellResponse::Refused { why } => Err(miette!("{why}")),
        _ => Ok(ExitCode::SUCCESS),
    }
}
