//! `mirrorball ps` and `mirrorball inspect`: what runs.

use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cell::control::{Answer, Request, ask};
use cell::registry::{self, Record, Registry, State};
use miette::{IntoDiagnostic, Result};
use serde_json::json;

use super::hosts::on_other_hosts;
use super::place::{Found, find, in_lab};

/// How long a VM may take to say what it counted.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Lists running VMs.
pub fn ps(json: bool) -> Result<ExitCode> {
    let mut records = Registry::open()
        .and_then(|registry| registry.list())
        .into_diagnostic()?;
    for output in on_other_hosts(&["ps", "--json"])? {
        let more: Vec<Record> = serde_json::from_slice(&output).into_diagnostic()?;
        records.extend(more);
    }
    if records.is_empty()
        && let Some(code) = in_lab()?
    {
        return Ok(code);
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&records).into_diagnostic()?);
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{:<20} {:<9} {:>4} {:>8} {:>4} {:>8} {:>8}  IMAGE",
        "NAME", "STATE", "CPUS", "MEMORY", "CELL", "PID", "UP"
    );
    for record in records {
        println!("{}", line(&record));
    }
    Ok(ExitCode::SUCCESS)
}

fn line(record: &Record) -> String {
    let state = match record.state {
        State::Starting => "starting",
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

/// Prints all that is known of a VM, as JSON.
pub fn inspect(name: &str) -> Result<ExitCode> {
    let folder = match find(name)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let record = registry::read(&folder).into_diagnostic()?;
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
