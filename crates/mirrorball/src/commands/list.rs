//! `mirrorball ps` and `mirrorball inspect`: running VMs.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use config::Selector;
use miette::{IntoDiagnostic, Result};
use registry::control::{Answer, Request, ask};
use registry::vms::{self, Record, Registry, State};
use serde_json::{Value, json};

use super::execution_site::{Found, find, in_lab};
use super::hosts::vms_of_other_hosts;
use super::select::selects;

/// Time limit for a VM to report its counters.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Lists running VMs with all these labels.
pub fn ps(json: bool, labels: &[Selector]) -> Result<ExitCode> {
    let mut records = Registry::open()
        .and_then(|registry| registry.list())
        .into_diagnostic()?;
    let others = vms_of_other_hosts()?;
    records.extend(others.vms);
    for host in &others.silent {
        eprintln!("mirrorball: host {host} does not answer");
    }
    // The VMs with a label are incomplete unless all hosts reply.
    let status = if labels.is_empty() || others.silent.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(crate::exit::FAILED)
    };
    if records.is_empty()
        && let Some(code) = in_lab()?
    {
        return Ok(code);
    }
    records.retain(|record| selects(labels, record));
    let in_lab = lab::auto::inside();
    if json {
        let all = as_json(&records, in_lab).into_diagnostic()?;
        println!("{}", serde_json::to_string_pretty(&all).into_diagnostic()?);
        return Ok(status);
    }
    if let Some(note) = note(in_lab) {
        eprintln!("{note}");
    }
    println!(
        "{:<20} {:<9} {:>4} {:>8} {:>4} {:>8} {:>8}  IMAGE",
        "NAME", "STATE", "CPUS", "MEMORY", "CELL", "PID", "UP"
    );
    for record in records {
        println!("{}", line(&record));
    }
    Ok(status)
}

/// Formats the records, each with whether its VM runs in a lab's host.
fn as_json(records: &[Record], in_lab: bool) -> serde_json::Result<Value> {
    let mut all = serde_json::to_value(records)?;
    for record in all.as_array_mut().into_iter().flatten() {
        record["lab"] = in_lab.into();
    }
    Ok(all)
}

/// Note for people that the list is that of a lab's host.
fn note(in_lab: bool) -> Option<&'static str> {
    in_lab.then_some("mirrorball: these VMs run in a lab's host, and CELL and PID are that host's")
}

fn line(record: &Record) -> String {
    let state = match record.state {
        State::Starting => "starting",
        State::Running if record.paused => "paused",
        State::Running if !record.full_disks.is_empty() => "disk full",
        State::Running => "running",
    };
    let pid = record
        .shard_pid
        .map_or_else(|| "-".to_owned(), |pid| pid.to_string());
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let up = now.saturating_sub(record.started_unix_s);
    let up = if up < 3600 {
        format!("{}m{:02}s", up / 60, up % 60)
    } else {
        format!("{}h{:02}m", up / 3600, up / 60 % 60)
    };
    let memory = format!("{}M", record.spec.memory.0 >> 20);
    let cell = match &record.span[..] {
        [] => record
            .cell
            .or(record.host_place.map(|place| place.cell))
            .map_or_else(|| "-".to_owned(), |cell| cell.to_string()),
        parts => {
            let cells: Vec<String> = parts.iter().map(|part| part.cell.to_string()).collect();
            cells.join(",")
        }
    };
    let image = record.spec.image.as_deref().unwrap_or("-");
    format!(
        "{:<20} {state:<9} {:>4} {memory:>8} {cell:>4} {pid:>8} {up:>8}  {image}",
        record.name, record.spec.cpus
    )
}

/// Prints a VM's full record as JSON.
pub fn inspect(name: &str) -> Result<ExitCode> {
    let folder = match find(name)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let record = vms::read(&folder).into_diagnostic()?;
    let status = match ask(&folder, &Request::Status, Some(ANSWER_LIMIT)) {
        Ok(Answer::Status { status }) => status,
        Ok(Answer::Refused { why }) => json!({ "unavailable": why }),
        Ok(_) => json!({ "unavailable": "the VM is ending" }),
        Err(error) => json!({ "unavailable": error.to_string() }),
    };
    let mut all = serde_json::to_value(&record).into_diagnostic()?;
    all["status"] = status;
    println!("{}", serde_json::to_string_pretty(&all).into_diagnostic()?);
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> Record {
        serde_json::from_value(json!({
            "name": name, "state": "running", "monitor_pid": 1, "shard_pid": 2, "started_unix_s": 0,
            "boots": 1, "cid": 3,
            "sandbox_missing": [], "spec": { "image": "tiny" },
        }))
        .unwrap()
    }

    #[test]
    fn the_list_of_a_labs_host_is_marked_for_people_and_programs() {
        let records = [record("a"), record("b")];
        for in_lab in [false, true] {
            let all = as_json(&records, in_lab).unwrap();
            let marks: Vec<&Value> = all
                .as_array()
                .unwrap()
                .iter()
                .map(|record| &record["lab"])
                .collect();
            assert_eq!(marks, [&json!(in_lab), &json!(in_lab)]);
            // Another host of a cluster reads it.
            let read: Vec<Record> = serde_json::from_value(all).unwrap();
            assert_eq!(read[1].name, "b");
        }
        assert_eq!(note(false), None);
        assert!(note(true).is_some_and(|note| note.contains("lab's host") && !note.contains('\n')));
    }
}
