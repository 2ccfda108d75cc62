//! Where a command runs: on this machine, or in the lab where this machine's KVM can't run guests.

use std::path::PathBuf;
use std::process::ExitCode;

use cell::registry::{Registry, RegistryError};
use miette::{IntoDiagnostic, Result, miette};
use shard::probe::{Verdict, probe};

use super::hosts;

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
    lab::auto::enter(&argv_os()).map(Some).into_diagnostic()
}

/// A running VM: its directory here, or the exit status of this same command in the lab where it runs.
pub enum Found {
    /// Here.
    Here(PathBuf),
    /// In the lab, or on another host of the cluster; the command has run there.
    Elsewhere(ExitCode),
}

/// Finds a VM by name, here or in the running lab.
pub fn find(name: &str) -> Result<Found> {
    match Registry::open().into_diagnostic()?.find(name) {
        Ok(folder) => Ok(Found::Here(folder)),
        Err(error @ RegistryError::Unknown { .. }) => {
            let elsewhere = match hosts::vm_elsewhere(name)? {
                Some(code) => Some(code),
                None => in_lab()?,
            };
            let unknown = || miette!(help = "`mirrorball ps` lists them", "{error}");
            elsewhere.map(Found::Elsewhere).ok_or_else(unknown)
        }
        Err(error) => Err(miette!("{error}")),
    }
}

/// Runs this same command in the lab, if one is running.
pub fn in_lab() -> Result<Option<ExitCode>> {
    if lab::auto::inside() {
        return Ok(None);
    }
    lab::auto::enter_running(&argv_os()).into_diagnostic()
}

/// This command's arguments.
pub(super) fn argv_os() -> Vec<std::ffi::OsString> {
    std::env::args_os().skip(1).collect()
}
