//! The sandbox of a shard: what is left to it once the guest runs.
//!
//! A guest that takes over its shard owns the files the monitor passed in, and nothing else. The layers,
//! outermost first: own user, mount, network, PID, IPC and UTS namespaces (made by the monitor when it clones
//! the process), an empty read-only root, a user of its own, Landlock, no capabilities, `no_new_privs`, and
//! for every thread a seccomp allow-list of its kind.
//!
//! [`close`] runs after the last file is open and before the first guest instruction. Beside its thread
//! there is at most one, which adds memory to the VM, does nothing else, and ends before a vCPU exists
//! (`machine::kvm_vm::MemoryMapping`). Every thread started later through the returned [`Threads`] seals
//! itself before it runs its work; vCPUs begin when the first thread is sealed ([`Threads::seal_first`]).
//! [`Closed::missing`] names the layers that the host does not allow; under [`SandboxPolicy::Require`] they
//! are an error instead.

mod capabilities;
mod dumps;
mod filter;
mod identity;
mod landlock;
mod root;
mod threads;

#[cfg(test)]
pub(crate) mod tests;

use std::io;

pub use filter::Syscall;
pub use threads::{ThreadKind, Threads};

use crate::launch::{Identity, SandboxLaunch, SandboxPolicy};

/// Why the sandbox could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The policy is `require`, and something could not be applied.
    #[error("the sandbox is incomplete ({0}); run with --sandbox=auto to go on without it")]
    Incomplete(String),
}

/// A closed sandbox.
#[derive(Debug)]
pub struct Closed {
    /// Starts the shard's threads.
    pub threads: Threads,
    /// What could not be applied, one line each.
    pub missing: Vec<String>,
    /// What this kernel or user lacks of the layers that `require` does not insist on, one line each.
    pub notes: Vec<String>,
}

/// Seals a process of one thread that has its last file open and keeps the host's namespaces: it becomes the
/// user that it is given, loses all capabilities and its core dumps, and may do what threads of this kind
/// may, for good.
///
/// It reports nothing of what the host does not allow: a shard of the same VM does, on the same host.
///
/// # Errors
/// If the policy is `require`, and something could not be applied.
pub fn seal_alone(
    kind: ThreadKind,
    policy: SandboxPolicy,
    identity: Option<Identity>,
) -> Result<(), SandboxError> {
    if policy == SandboxPolicy::Off {
        return Ok(());
    }
    let mut missing = Vec::new();
    let mut done = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            missing.push(format!("{what}: {error}"));
        }
    };
    // A process that is no longer root may not shrink the bounding set.
    done("capabilities", capabilities::drop_bounding());
    if let Some(identity) = identity {
        done("user id of its own", identity::become_one(identity));
    }
    // Not every kernel has it, as for shards.
    let _ = landlock::restrict();
    done("capabilities", capabilities::drop_all());
    done("no core dumps", dumps::forbid());
    let filtered = filter::supported().and_then(|()| filter::refuse_remapping());
    done("system call filter", filtered.and_then(|()| filter::apply(kind)));
    if policy == SandboxPolicy::Require && !missing.is_empty() {
        return Err(SandboxError::Incomplete(missing.join("; ")));
    }
    Ok(())
}

/// Closes the sandbox around this process.
pub fn close(launch: SandboxLaunch) -> Result<Closed, SandboxError> {
    let SandboxLaunch {
        policy,
        identity,
        mut missing,
        mut notes,
    } = launch;
    if policy == SandboxPolicy::Off {
        return Ok(Closed {
            threads: Threads::open(),
            missing: vec!["everything: --sandbox=off".to_owned()],
            notes: Vec::new(),
        });
    }
    let mut done = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            missing.push(format!("{what}: {error}"));
        }
    };
    done("empty root", root::enter_empty());
    // A process that is no longer root may not shrink the bounding set.
    done("capabilities", capabilities::drop_bounding());
    if let Some(identity) = identity {
        let changed = identity::become_one(identity);
        done(
            "user id of its own",
            changed.and_then(|()| identity::end_with_parent()),
        );
    }
    match landlock::restrict() {
        Ok(lacking) => notes.extend(lacking),
        Err(error) => notes.push(format!("Landlock: {error}")),
    }
    done("capabilities", capabilities::drop_all());
    done("no core dumps", dumps::forbid());
    let filtered = filter::supported().and_then(|()| filter::refuse_remapping());
    let threads = match &filtered {
        Ok(()) => Threads::sealed(),
        Err(_) => Threads::open(),
    };
    done("system call filter", filtered);
    if policy == SandboxPolicy::Require && !missing.is_empty() {
        return Err(SandboxError::Incomplete(missing.join("; ")));
    }
    Ok(Closed {
        threads,
        missing,
        notes,
    })
}
