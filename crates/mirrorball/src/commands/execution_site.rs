//! Decides where a command runs: on this machine, or in the lab where this machine's KVM can't run guests.

use std::path::PathBuf;
use std::process::ExitCode;

use config::VmSpec;
use config::vm::SandboxSpec;
use miette::{IntoDiagnostic, Result, miette};
use registry::vms::{Registry, RegistryError};
use shard::probe::{Verdict, probe};

use super::hosts;
use crate::remote;

/// Use of the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LabChoice {
    /// Where this machine's KVM can't run guests
    Auto,
    /// In the lab, whether this machine's KVM can run guests or not
    Always,
    /// On this machine, or not at all
    Never,
}

/// Isolation that a command requires for its VMs. The lab gives none: an emulated CPU is no security
/// boundary, and the lab's host has this machine's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequiredIsolation {
    /// A VM requires the sandbox.
    pub sandbox: bool,
    /// The VMs outlive the command.
    pub detached: bool,
}

impl RequiredIsolation {
    /// Returns the isolation that VMs of these specs require.
    pub fn of<'a>(specs: impl IntoIterator<Item = &'a VmSpec>, detached: bool) -> Self {
        let mut specs = specs.into_iter();
        Self {
            sandbox: specs.any(|spec| spec.sandbox == SandboxSpec::Require),
            detached,
        }
    }

    /// Reason why the lab may not replace this machine's KVM without a request, if there is one.
    fn forbids_lab(self, is_root: bool) -> Option<&'static str> {
        match self {
            Self { sandbox: true, .. } => Some("`sandbox = \"require\"`"),
            Self { detached: true, .. } => Some("VMs that are left running"),
            _ if is_root => Some("root's VMs"),
            _ => None,
        }
    }
}

/// Place of execution.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Decision {
    Here,
    /// In the lab, for this reason.
    Lab(String),
    /// Nowhere: the first requires isolation, and KVM is unusable for the second reason.
    Refuse(&'static str, String),
}

/// Decides where a command outside the lab runs. `probe` tests whether this machine's KVM can run guests.
fn decide(
    choice: LabChoice,
    demand: RequiredIsolation,
    is_root: bool,
    probe: impl FnOnce() -> Verdict,
) -> Decision {
    match choice {
        LabChoice::Never => Decision::Here,
        LabChoice::Always => Decision::Lab("--lab=always".to_owned()),
        LabChoice::Auto => match (probe(), demand.forbids_lab(is_root)) {
            (Verdict::Usable, _) => Decision::Here,
            (verdict, None) => Decision::Lab(verdict.to_string()),
            (verdict, Some(what)) => Decision::Refuse(what, verdict.to_string()),
        },
    }
}

/// Runs this command in the lab if it must run there, and returns its exit status then.
///
/// # Errors
/// If the VMs require the isolation of KVM, and the user has not requested the lab.
pub fn enter_lab(choice: LabChoice, demand: RequiredIsolation) -> Result<Option<ExitCode>> {
    if lab::auto::inside() {
        return Ok(None);
    }
    match decide(choice, demand, nix::unistd::geteuid().is_root(), probe) {
        Decision::Here => Ok(None),
        // A command with many words may lose its rules for names of files on the way into the lab.
        Decision::Lab(why) if remote::is_for_another_host() => Err(miette!(
            help = "give the command on that host",
            "commands of other hosts do not run in the lab: {why}"
        )),
        Decision::Lab(why) => {
            eprintln!("mirrorball: running in the lab: {why}");
            lab::auto::enter(&argv_os()).map(Some).into_diagnostic()
        }
        Decision::Refuse(what, why) => Err(miette!(
            help = "use a machine with KVM; for an experiment, --lab=always runs them in the lab, which \
                    isolates nothing",
            "{what} need isolation, and this machine can't give it: {why}"
        )),
    }
}

/// A running VM: its directory on this host, or the exit status of this command where the VM runs.
pub enum Found {
    /// Directory of the VM on this host.
    Here(PathBuf),
    /// Exit status of this command, which has run in the lab or on another host of the cluster.
    Elsewhere(ExitCode),
}

/// Finds a VM by name: here, on another host of the cluster, or in the running lab.
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

/// Runs this command in the lab, if one is running, and returns its exit status then. A command of another
/// host finds no lab.
pub fn in_lab() -> Result<Option<ExitCode>> {
    if lab::auto::inside() || remote::is_for_another_host() {
        return Ok(None);
    }
    lab::auto::enter_running(&argv_os()).into_diagnostic()
}

/// Returns this command's arguments.
pub(super) fn argv_os() -> Vec<std::ffi::OsString> {
    std::env::args_os().skip(1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing() -> Verdict {
        Verdict::Missing
    }

    fn spec(text: &str) -> VmSpec {
        config::parse("vm.toml", &format!("image = \"tiny\"\n{text}")).unwrap()
    }

    #[test]
    fn the_lab_replaces_no_isolation_that_was_required() {
        let require = RequiredIsolation::of([&spec(""), &spec("sandbox = \"require\"")], false);
        let detached = RequiredIsolation::of([&spec("")], true);
        let plain = RequiredIsolation::of([&spec("")], false);
        for (demand, is_root, what) in [
            (require, false, "require"),
            (detached, false, "left running"),
            (plain, true, "root"),
        ] {
            let decision = decide(LabChoice::Auto, demand, is_root, missing);
            assert!(
                matches!(&decision, Decision::Refuse(why, _) if why.contains(what)),
                "{demand:?}: {decision:?}"
            );
            let asked = decide(LabChoice::Always, demand, is_root, missing);
            assert!(matches!(asked, Decision::Lab(_)), "{asked:?}");
        }
        let decision = decide(LabChoice::Auto, plain, false, missing);
        assert!(matches!(decision, Decision::Lab(_)), "{decision:?}");
    }

    #[test]
    fn commands_run_here_where_kvm_is_usable_or_the_lab_is_not_wanted() {
        for is_root in [false, true] {
            let demand = RequiredIsolation {
                sandbox: true,
                detached: true,
            };
            assert_eq!(
                decide(LabChoice::Auto, demand, is_root, || Verdict::Usable),
                Decision::Here
            );
            let unasked = || -> Verdict { panic!("the probe takes its time") };
            assert_eq!(decide(LabChoice::Never, demand, is_root, unasked), Decision::Here);
        }
    }
}
