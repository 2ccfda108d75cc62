//! `mirrorball cluster vcpus`: the vCPUs of the VMs in the cells of this host.

use std::ops::ControlFlow;
use std::process::ExitCode;

use config::cpulist;
use miette::{IntoDiagnostic, Result};
use registry::cluster::files::Files;
use registry::cluster::interface::Vcpu;

use super::cells::cells_here;
use crate::failed;

/// Prints the vCPUs in the host's cells.
pub(super) fn vcpus(json: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    if let ControlFlow::Break(code) = cells_here(&files)? {
        return Ok(code);
    }
    let known = operations::cells::vcpus().map_err(failed)?;
    for (vm, why) in &known.missing {
        eprintln!("{vm}: its vCPUs are not known: {why}");
    }
    let all = known.vcpus;
    if json {
        println!("{}", serde_json::to_string_pretty(&all).into_diagnostic()?);
    } else {
        println!(
            "{:<16} {:>4} {:>4} {:>8} {:>8} {:<12} {:>4} {:>10}",
            "VM", "VCPU", "CELL", "SHARD", "THREAD", "CPUS", "LAST", "RAN"
        );
        all.iter().for_each(|vcpu| println!("{}", line(vcpu)));
    }
    Ok(ExitCode::SUCCESS)
}

fn line(vcpu: &Vcpu) -> String {
    format!(
        "{:<16} {:>4} {:>4} {:>8} {:>8} {:<12} {:>4} {:>10}",
        vcpu.vm,
        vcpu.vcpu,
        vcpu.cell,
        vcpu.shard_pid,
        vcpu.thread_id,
        cpulist::write(&vcpu.cpus),
        vcpu.last_cpu,
        format!("{:.1} s", vcpu.ran_ms as f64 / 1000.0)
    )
}
