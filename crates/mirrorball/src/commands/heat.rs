//! `mirrorball heat`: page-fault stalls of a VM with coherent memory, and its most transferred pages.

mod symbols;
mod table;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use config::SpanMemory;
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::files::Files;
use registry::control::{Answer, Request, ask};
use registry::vms;
use symbols::Symbols;

use super::execution_site::{Found, find};
use crate::remote;

/// Time limit for a VM to report its counters.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Maximum length of a symbol file; those of Debian's kernels have 10 MB.
const SYMBOLS_MAX_BYTES: u64 = 64 << 20;

/// Arguments of `heat`.
#[derive(Debug, Args)]
pub struct HeatArgs {
    /// Name of the VM
    vm: String,
    /// Symbols for the pages: the guest kernel's System.map, or the guest's /proc/kallsyms as read by root
    #[arg(long, value_name = "FILE")]
    symbols: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Prints the page-fault stalls of the VM's shards, and the VM's hottest pages.
pub fn heat(args: &HeatArgs) -> Result<ExitCode> {
    let folder = match find(&args.vm)? {
        Found::Here(folder) => folder,
        Found::Elsewhere(code) => return Ok(code),
    };
    let vm = &args.vm;
    let record = vms::read(&folder).into_diagnostic()?;
    if record.spec.span.as_ref().map(config::SpanSpec::memory) != Some(SpanMemory::Coherent) {
        return Err(miette!(
            help = "start it with `--span 0,1 --span-memory coherent`",
            "{vm} has no coherent memory"
        ));
    }
    let symbols = args.symbols.as_deref().map(read_symbols).transpose()?;
    let why = match ask(&folder, &Request::Status, Some(ANSWER_LIMIT)) {
        Ok(Answer::Status { status }) => {
            let site = Files::open().and_then(|files| files.site()).ok().flatten();
            let host_of = |cell| Some(site.as_ref()?.host_of(cell)?.name.clone());
            if let Some(heat) = table::read(&record, &status, symbols.as_ref(), host_of) {
                match args.json {
                    true => println!("{}", serde_json::to_string_pretty(&heat).into_diagnostic()?),
                    false => print!("{}", heat.text()),
                }
                return Ok(ExitCode::SUCCESS);
            }
            "its shards have counted nothing yet".to_owned()
        }
        Ok(Answer::Refused { why }) => why,
        Ok(_) => "it is ending".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(miette!(
        help = format!("try again when `mirrorball ps` shows it running"),
        "{vm} does not report its memory's waits: {why}"
    ))
}

fn read_symbols(path: &Path) -> Result<Symbols> {
    let shown = path.display();
    let mut text = Vec::new();
    remote::open(path)
        .and_then(|file| file.take(SYMBOLS_MAX_BYTES + 1).read_to_end(&mut text))
        .map_err(|error| {
            miette!(
                help = "it must be a file of the host where the VM was started",
                "{shown} can't be read: {error}"
            )
        })?;
    if text.len() as u64 > SYMBOLS_MAX_BYTES {
        return Err(miette!(
            help = "give the guest kernel's System.map, or its /proc/kallsyms",
            "{shown} has more than 64 MiB, as no kernel's symbols have"
        ));
    }
    Symbols::parse(&text)
        .map_err(|fault| miette!(help = fault.help, "{shown} line {}: {}", fault.line, fault.what))
}
