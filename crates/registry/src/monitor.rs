//! The messages on the lease, which is the socket between a client and the monitor that it started.
//!
//! The client sends a [`Batch`] first and may send a [`LeaseOrder`] later; the monitor sends [`Event`]s. Each
//! message is a line of JSON. [`crate::lease`] is the client's end, `cell::monitor` the monitor's.

use std::path::PathBuf;

use config::VmSpec;
use config::settings::ShareBetween;
use serde::{Deserialize, Serialize};
use shard_api::launch::Ending;

/// The VMs that a client starts; the first line on the lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batch {
    /// The VMs, each with its name.
    pub vms: Vec<(String, VmSpec)>,
    /// The state that the VMs go on from, instead of booting. Their specs are then the source's, with their
    /// own names and addresses.
    #[serde(default)]
    pub source: Option<Source>,
    /// The rule that says which VMs share pages with these.
    pub share_between: ShareBetween,
    /// The user id of the API's member that starts the VMs.
    #[serde(default)]
    pub member: Option<u32>,
    /// Time limit of a boot, from its start until the guest's agent answers, in seconds.
    pub boot_limit_s: u64,
}

/// A frozen state that VMs go on from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The running VM with this directory, as it is when the monitor starts.
    Running(PathBuf),
    /// A snapshot. The specs that go with it name the files that it may open (`cell::snapshot::trust`).
    Snapshot {
        /// The snapshot's directory.
        directory: PathBuf,
        /// Users whose files the snapshot may consist of, beside root's.
        owners: Vec<u32>,
    },
}

impl Source {
    /// The directory of a snapshot; none for a running VM.
    pub fn directory(&self) -> Option<PathBuf> {
        match self {
            Self::Running(_) => None,
            Self::Snapshot { directory, .. } => Some(directory.clone()),
        }
    }
}

/// An order of the client after the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseOrder {
    /// The VMs are to outlive the client.
    Detach,
}

/// A report of the monitor to its client.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum Event {
    /// The VM's sockets exist.
    Started {
        /// The VM's name.
        name: String,
        /// The VM's directory.
        folder: PathBuf,
        /// The cell that the VM runs in, in a cluster.
        cell: Option<u16>,
    },
    /// The VM's vCPUs are about to run; again after each reboot.
    Running {
        /// The VM's name.
        name: String,
        /// Parts of the sandbox that could not be applied.
        sandbox_missing: Vec<String>,
        /// Whether files of the VM outlive it, so that it must be ended with care.
        keeps_writes: bool,
        /// How long the source stood still for this VM, in microseconds.
        paused_us: Option<u64>,
    },
    /// The set of disks whose writes wait for room on the host has changed.
    FullDisks {
        /// The VM's name.
        name: String,
        /// The names of the disks that wait now.
        disks: Vec<String>,
    },
    /// The VM stands still by order, or goes on.
    Paused {
        /// The VM's name.
        name: String,
        /// Whether it stands still.
        paused: bool,
    },
    /// The VM has ended, and starts again.
    StartsAgain {
        /// The VM's name.
        name: String,
        /// How it ended, in one line.
        why: String,
    },
    /// The VM did not start.
    Failed {
        /// The VM's name.
        name: String,
        /// The reason and the help, in one line.
        why: String,
    },
    /// The VM has ended.
    Ended {
        /// The VM's name.
        name: String,
        /// How it ended.
        ending: Ending,
        /// The last lines of the console.
        last_lines: Vec<String>,
        /// Seconds since the start.
        seconds: f64,
    },
}
