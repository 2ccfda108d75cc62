//! `mirrorball mem`: host memory that running VMs use, and one VM's pages by their use.

mod pages;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use hostinfo::memory_use::{MemoryUse, VmMemory};
use hostinfo::scanner::Scanner;
use miette::{IntoDiagnostic, Result};
use operations::{memory, page_use};
use registry::vms::Registry;

use super::execution_site::{Found, find, in_lab};
use crate::failed;

const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// Moves the cursor to the first line, and clears to the end of the screen after the table.
const HOME: &str = "\x1b[H\x1b[J";

/// Prints the table once, or with `watch` every 2 s until interrupted.
pub fn mem(json: bool, watch: bool) -> Result<ExitCode> {
    let registry = Registry::open().into_diagnostic()?;
    if memory::running(&registry).into_diagnostic()?.is_empty()
        && let Some(code) = in_lab()?
    {
        return Ok(code);
    }
    let redraw = watch && !json && std::io::stdout().is_terminal();
    loop {
        let table = memory::measure(&registry).into_diagnostic()?;
        let text = match json {
            true if watch => serde_json::to_string(&table).into_diagnostic()? + "\n",
            true => serde_json::to_string_pretty(&table).into_diagnostic()? + "\n",
            false => format!("{}{}", if redraw { HOME } else { "" }, text(&table)),
        };
        let mut output = std::io::stdout().lock();
        output
            .write_all(text.as_bytes())
            .and_then(|()| output.flush())
            .into_diagnostic()?;
        if !watch {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(WATCH_INTERVAL);
    }
}

/// Prints the pages of these VMs, together, by their use in the guest and their origin on the host.
pub fn explain(vms: &[String], json: bool) -> Result<ExitCode> {
    let mut tables = Vec::new();
    for vm in vms {
        let folder = match find(vm)? {
            Found::Here(folder) => folder,
            Found::Elsewhere(code) => return Ok(code),
        };
        tables.push(page_use::explain(vm, &folder).map_err(failed)?);
    }
    let table = page_use::PageUse::sum(&tables);
    match json {
        true => println!("{}", serde_json::to_string_pretty(&table).into_diagnostic()?),
        false => print!("{}", pages::text(&table)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats the table for people.
fn text(table: &MemoryUse) -> String {
    let mut lines = vec![format!(
        "{:<20} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "VM",
        "MEMORY",
        "USED",
        "HOST",
        "SHARED",
        "=BASE",
        "+CLONES",
        "+PRIVATE",
        "+MERGED",
        "+COPIED",
        "+DISK",
        "+MONITOR",
        "SWAPPED"
    )];
    lines.extend(table.vms.iter().map(row));
    lines.push(row(&table.total));
    let host = &table.host;
    lines.push(String::new());
    for file in &table.files {
        let cached = file.resident_bytes.map_or_else(|| "unknown".to_owned(), mib);
        lines.push(format!(
            "{cached:>9} of {} in the page cache, {} of it mapped",
            file.path,
            mib(file.mapped_bytes)
        ));
    }
    lines.extend(table.scanner.map(scanned));
    let gateway = table.gateway.map(|gateway| gateway.host_bytes);
    lines.push(format!(
        "host: {} used of {} = VMs {} + their files, not mapped {} + KVM's page tables {} + {}others {}",
        mib(host.memory.used_bytes),
        mib(host.memory.total_bytes),
        mib(host.vms_bytes),
        mib(host.files_unmapped_bytes),
        mib(host.memory.kvm_page_tables_bytes),
        gateway.map_or_else(String::new, |bytes| format!(
            "the subnet's gateway {} + ",
            mib(bytes)
        )),
        mib(host.rest_bytes)
    ));
    if !table.unread.is_empty() {
        lines.push(format!(
            "not readable by this user, and missing above: {}; root can read them",
            table.unread.join(", ")
        ));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// Formats the host's scanner.
fn scanned(scanner: Scanner) -> String {
    let state = if scanner.is_running {
        "runs"
    } else {
        "does not run"
    };
    let cpu = scanner.cpu_ms.map_or_else(
        || "unknown".to_owned(),
        |ms| format!("{}.{} s", ms / 1000, ms % 1000 / 100),
    );
    format!(
        "the host's scanner (KSM) {state}: {} saved in all processes, by {} of merged pages; CPU time since \
         the host's start: {cpu}",
        mib(scanner.saved_bytes),
        mib(scanner.shared_bytes)
    )
}

fn row(vm: &VmMemory) -> String {
    format!(
        "{:<20} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8}",
        vm.name,
        mib(vm.memory_bytes),
        vm.guest_used_bytes.map_or_else(|| "-".to_owned(), mib),
        mib(vm.host_bytes),
        mib(vm.shared_bytes()),
        mib(vm.base_bytes),
        mib(vm.clone_bytes),
        mib(vm.private_bytes),
        mib(vm.merged_bytes),
        mib(vm.copied_bytes),
        mib(vm.disk_bytes),
        mib(vm.monitor_bytes),
        mib(vm.swapped_bytes)
    )
}

/// Formats MiB with one decimal.
pub fn mib(bytes: u64) -> String {
    format!("{:.1}M", bytes as f64 / f64::from(1 << 20))
}
