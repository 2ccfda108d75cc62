//! Common parts of the sealed processes of this program: the frame filter of a card ([`crate::card`]) and the
//! server of a folder ([`crate::folder`]). Each runs on one thread, without a shard.

use std::io;
use std::process::ExitCode;

use child_process::Seal;
use nix::sys::resource::{Resource, setrlimit};

use crate::launch::SandboxPolicy;
use crate::sandbox::SandboxError;

/// Exit status of a process that was not started by a monitor.
pub(crate) const USAGE: u8 = 2;

/// Reason why a sealed process did not begin, or could not continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SealedProcessError {
    /// The kernel refused something.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// The sandbox is required and can't be set up.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Runs a process if the program was started with `flag` as its first argument, and returns its exit status;
/// otherwise returns none. `run` receives the other arguments.
pub(crate) fn take_over(
    flag: &str,
    run: impl FnOnce(&mut dyn Iterator<Item = String>) -> ExitCode,
) -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let is_meant = words.next()? == flag;
    is_meant.then(|| run(&mut words.map(|word| word.to_string_lossy().into_owned())))
}

/// Reports that the process was started in another way than by a monitor.
pub(crate) fn usage(flag: &str, why: &str) -> ExitCode {
    eprintln!("mirrorball-shard {flag}: {why}; help: start VMs with `mirrorball run`");
    ExitCode::from(USAGE)
}

/// Reports why the process ended. A monitor that has adopted the process does not receive its exit status.
pub(crate) fn failed(error: &SealedProcessError) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}

/// Limits the process's use of the host's resources.
pub(crate) fn limit(limits: &[(Resource, u64)]) -> io::Result<()> {
    for (resource, most) in limits {
        setrlimit(*resource, *most, *most)?;
    }
    Ok(())
}

/// Returns the policy of the sandbox for a seal.
pub(crate) fn policy(seal: Seal) -> SandboxPolicy {
    match seal {
        Seal::Auto => SandboxPolicy::Auto,
        Seal::Require => SandboxPolicy::Require,
        Seal::Off => SandboxPolicy::Off,
    }
}
