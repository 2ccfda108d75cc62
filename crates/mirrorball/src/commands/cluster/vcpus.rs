//! `mirrorball cluster vcpus`: the vCPUs of the VMs in the cells of this host.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Duration;

use config::cpulist;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::client::Connection;
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::{Answer, Ask, Vcpu};

use super::cells_here;

/// Time limit for a cell's reply: each of its spanning VMs may take 5 s.
const LIMIT: Duration = Duration::from_secs(60);

/// Prints the vCPUs that the host's cells know of.
pub(super) fn vcpus(json: bool) -> Result<ExitCode> {
    let files = Files::open().into_diagnostic()?;
    let plan = match cells_here(&files)? {
        ControlFlow::Continue(plan) => plan,
        ControlFlow::Break(code) => return Ok(code),
    };
    let mut all = Vec::new();
    for cell in plan.iter().map(|cell| cell.number) {
        let own = files.cell(cell);
        if own.has_failed() {
            continue;
        }
        match ask(&own) {
            Ok((vcpus, missing)) => {
                all.extend(vcpus);
                for (vm, why) in missing {
                    eprintln!("{vm}: its vCPUs are not known: {why}");
                }
            }
            Err(error) => {
                return Err(miette!(
                    help = "try again when `mirrorball cluster status` shows that it runs",
                    "cell {cell} does not answer: {error}"
                ));
            }
        }
    }
    all.sort_by(|one, other| (&one.vm, one.vcpu).cmp(&(&other.vm, other.vcpu)));
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

type Vcpus = (Vec<Vcpu>, Vec<(String, String)>);

fn ask(cell: &CellFiles) -> std::io::Result<Vcpus> {
    let mut connection = Connection::open(cell)?;
    connection.limit_wait(LIMIT)?;
    match connection.ask(&Ask::Vcpus)? {
        Answer::Vcpus { vcpus, missing } => Ok((vcpus, missing)),
        Answer::Refused { why } => Err(std::io::Error::other(why)),
        other => Err(std::io::Error::other(format!(
            "an answer to another question: {other:?}"
        ))),
    }
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
