//! The sandbox of a shard: the rights that remain while the guest runs.
//!
//! A guest that takes over its shard has the files that the monitor passed, and no others. The layers,
//! outermost first: separate user, mount, network, PID, IPC and UTS namespaces (created by the monitor when
//! it clones the process), an empty read-only root, a separate user, Landlock, no capabilities,
//! `no_new_privs`, and a seccomp allow-list for each kind of thread.
//!
//! [`close`] runs after the last file is open and before the first instruction of the guest. Beside its
//! thread there is at most one, which maps memory into the VM and ends before a vCPU exists
//! (`machine::kvm_vm::MemoryMapping`). Every thread that is started later through [`Threads`] seals itself
//! before it runs its work. vCPUs begin once the first thread is sealed ([`Threads::seal_first`]).
//! [`Closed::missing`] lists the layers that the host does not allow; under [`SandboxPolicy::Require`] a
//! missing layer is an error instead.

mod capabilities;
mod dumps;
mod filter;
pub(crate) mod folder_root;
mod identity;
mod landlock;
mod root;
mod threads;

#[cfg(test)]
pub(crate) mod tests;

use std::io;

pub use filter::Syscall;
pub use landlock::Beneath;
pub use threads::{ThreadKind, Threads};

use crate::launch::{Identity, SandboxLaunch, SandboxPolicy};

/// Reason why the sandbox could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The policy is `require`, and a layer could not be applied.
    #[error("the sandbox is incomplete ({0}); run with --sandbox=auto to go on without it")]
    Incomplete(String),
}

/// A closed sandbox.
#[derive(Debug)]
pub struct Closed {
    /// Starts the shard's threads.
    pub threads: Threads,
    /// Layers that could not be applied, one per line.
    pub missing: Vec<String>,
    /// Optional layers that this kernel or user lacks, one per line.
    pub notes: Vec<String>,
}

/// A process of one thread to be sealed.
#[derive(Debug)]
pub struct Sealing<'a> {
    /// Kind of the thread.
    pub kind: ThreadKind,
    /// How strictly it is sealed.
    pub policy: SandboxPolicy,
    /// User and group to which it changes.
    pub identity: Option<Identity>,
    /// Directory below which it may open files.
    pub beneath: Option<Beneath<'a>>,
    /// Layers that the process itself could not apply, one per line.
    pub missing: Vec<String>,
}

/// Seals a process of one thread that has opened its last file, but for those beneath its directory. The
/// process changes to the given user and loses all capabilities and core dumps. From then on it has the
/// system calls of this kind of thread.
///
/// It does not report missing layers: a shard of the same VM does so, on the same host.
///
/// # Errors
/// Fails if the policy is `require` and a layer could not be applied.
pub fn seal_alone(sealing: Sealing<'_>) -> Result<(), SandboxError> {
    let Sealing {
        kind,
        policy,
        identity,
        beneath,
        mut missing,
    } = sealing;
    if policy == SandboxPolicy::Off {
        return Ok(());
    }
    let mut done = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            missing.push(format!("{what}: {error}"));
        }
    };
    // Only root may shrink the bounding set, so this precedes the change of user.
    done("capabilities", capabilities::drop_bounding());
    if let Some(identity) = identity {
        done("user id of its own", identity::become_one(identity));
    }
    // Optional, as for shards: some kernels lack it.
    let _ = match kind {
        ThreadKind::Gateway => landlock::restrict_files(),
        _ => landlock::restrict(beneath).map(drop),
    };
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
    // Only root may shrink the bounding set, so this precedes the change of user.
    done("capabilities", capabilities::drop_bounding());
    if let Some(identity) = identity {
        let changed = identity::become_one(identity);
        done(
            "user id of its own",
            changed.and_then(|()| identity::end_with_parent()),
        );
    }
    match landlock::restrict(None) {
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
