//! Where a command runs: on this machine, or in the lab where this machine's KVM can't run guests.

use std::process::ExitCode;

use cell::registry::{Registry, RegistryError};
use miette::{IntoDiagnostic, Result, miette};
use shard::probe::{Verdict, probe};
use std::path::PathBuf;

/// When to use the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LabChoice {
    /// Where this machine's KVM can't run guests
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Runs this same command in the lab if it must be run there.
pub fn enter_lab(choice: LabChoice) -> Result<Option<ExitCode>> {
    if lab::auto::inside() || choice == LabChoice::Never {
        return Ok(None);
    }
    let why = match (choice, probe()) {
        (LabChoice::Always, _) => "--lab=always".to_owned(),
        (_, Verdict::Usable) => return Ok(None),
        (_, verdict) => verdict.to_string(),
    };
    eprintln!("mirrorball: running in the lab: {why}");
    lab::auto::enter(&argv()).map(Some).into_diagnostic()
}

/// A running VM: its directory here, or the exit status of this same command in the lab where it runs.
pub enum Found {
    /// Here.
    Here(PathBuf),
    /// In the lab; the command has run there.
    Lab(ExitCode),
}

/// Finds a VM by name, here or in the running lab.
pub fn find(name: &str) -> Result<Found> {
    match Registry::open().into_diagnostic()?.find(name) {
        Ok(folder) => Ok(Found::Here(folder)),
        Err(error @ RegistryError::Unknown { .. }) => match in_lab()? {
            Some(code) => Ok(Found::Lab(code)),
            None => Err(miette!(help = "`mirrorball ps` lists them", "{error}")),
        },
        Err(error) => Err(miette!("{error}")),
    }
}

/// Runs this same command in the lab, if one is running.
pub fn in_lab() -> Result<Option<ExitCode>> {
    if lab::auto::inside() {
        return Ok(None);
    }
    lab::auto::enter_running(&argv()).into_diagnostic()
}

fn argv() -> Vec<std::ffi::OsString> {
    std::env::args_os().skip(1).collect()
}
