//! The namespaces that the host lets a shard have.

use std::io;

use keeper::spawn::Namespaces;
use shard_api::launch::SandboxPolicy;

use super::RunError;

/// Starts a process in all namespaces that the host has. Most hosts refuse none, and finding that out takes
/// as long as making them, so the host is probed only after a refusal.
///
/// # Errors
/// That of `start`, and [`RunError::Sandbox`] if some namespaces are missing and the sandbox is required.
pub(super) fn with_those_of_host<T>(
    policy: SandboxPolicy,
    start: impl Fn(&Namespaces) -> io::Result<T>,
) -> Result<T, RunError> {
    if policy == SandboxPolicy::Off {
        return Ok(start(&Namespaces::none())?);
    }
    let refused = match start(&Namespaces::all()) {
        Ok(started) => return Ok(started),
        Err(error) => error,
    };
    // A host that lacks a resource for a moment refuses no namespace.
    if matches!(
        refused.kind(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory
    ) {
        return Err(refused.into());
    }
    let found = Namespaces::probe();
    if policy == SandboxPolicy::Require && !found.missing.is_empty() {
        return Err(RunError::Sandbox(found.missing.join("; ")));
    }
    Ok(start(&found)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_tried_at_the_start_and_without_a_sandbox_none_is_made() {
        let of_start = |policy| with_those_of_host(policy, |namespaces| Ok(namespaces.flags())).unwrap();
        assert_eq!(of_start(SandboxPolicy::Off), 0);
        assert_eq!(of_start(SandboxPolicy::Require), Namespaces::all().flags());
    }

    #[test]
    fn refused_start_is_tried_again_with_what_the_host_permits() {
        let tried = std::cell::Cell::new(0);
        let started = with_those_of_host(SandboxPolicy::Auto, |namespaces| {
            tried.set(tried.get() + 1);
            match tried.get() {
                1 => Err(io::ErrorKind::PermissionDenied.into()),
                _ => Ok(namespaces.flags()),
            }
        });
        assert_eq!(started.unwrap(), Namespaces::probe().flags());
        for kind in [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut] {
            let tries = std::cell::Cell::new(0);
            let short = with_those_of_host(SandboxPolicy::Auto, |_| -> io::Result<()> {
                tries.set(tries.get() + 1);
                Err(kind.into())
            });
            assert!(short.is_err() && tries.get() == 1, "{kind:?}");
        }
        let error = with_those_of_host(SandboxPolicy::Auto, |_| -> io::Result<()> {
            Err(io::ErrorKind::PermissionDenied.into())
        });
        assert!(matches!(error, Err(RunError::Start(_))), "{error:?}");
    }
}
