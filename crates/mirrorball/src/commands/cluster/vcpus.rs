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
            "{:<16} {:>4} {:>4} {:>8} {:>8} {:<12} {:>4} {:>10} {:>10} {:>10} {:>10}",
            "VM", "VCPU", "CELL", "SHARD", "THREAD", "CPUS", "LAST", "RAN", "WAITED", "HALTS", "HALTED"
        );
        all.iter().for_each(|vcpu| println!("{}", line(vcpu)));
    }
    Ok(ExitCode::SUCCESS)
}

fn line(vcpu: &Vcpu) -> String {
    let kvm = vcpu.kvm.as_ref();
    let halts = kvm.and_then(|kvm| kvm.halts);
    format!(
        "{:<16} {:>4} {:>4} {:>8} {:>8} {:<12} {:>4} {:>10} {:>10} {:>10} {:>10}",
        vcpu.vm,
        vcpu.vcpu,
        vcpu.cell,
        vcpu.shard_pid,
        vcpu.thread_id,
        cpulist::write(&vcpu.cpus),
        vcpu.last_cpu,
        seconds(Some(vcpu.ran_ms)),
        seconds(vcpu.waited_ms),
        halts.map_or_else(|| "-".to_owned(), |halts| halts.to_string()),
        seconds(kvm.and_then(|kvm| kvm.halted_ms))
    )
}

fn seconds(ms: Option<u64>) -> String {
    ms.map_or_else(|| "-".to_owned(), |ms| format!("{:.1} s", ms as f64 / 1000.0))
}

#[cfg(test)]
mod tests {
    use registry::cluster::interface::VcpuStatistics;

    use super::*;

    #[test]
    fn unknown_times_of_a_vcpu_are_a_dash() {
        let mut vcpu = Vcpu {
            vm: "web".to_owned(),
            vcpu: 1,
            cell: 0,
            shard_pid: 100,
            thread_id: 103,
            cpus: vec![0, 1],
            last_cpu: 1,
            ran_ms: 1_500,
            waited_ms: None,
            kvm: None,
        };
        let end = |vcpu: &Vcpu| {
            let line = line(vcpu);
            line.split_once("0-1")
                .unwrap()
                .1
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(end(&vcpu), "1 1.5 s - - -");
        vcpu.waited_ms = Some(20);
        vcpu.kvm = Some(VcpuStatistics {
            halts: Some(42),
            halted_ms: Some(2_000),
            ..VcpuStatistics::default()
        });
        assert_eq!(end(&vcpu), "1 1.5 s 0.0 s 42 2.0 s");
    }
}
