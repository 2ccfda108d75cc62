//! Messages on the lease, which is the socket between a client and the monitor that it started.
//!
//! The client sends a [`Batch`] first and may send a [`LeaseOrder`] later; the monitor sends [`Event`]s. Each
//! message is a line of JSON. [`crate::lease`] is the client's end, `cell::monitor` the monitor's.

use std::path::PathBuf;

use config::VmSpec;
use config::settings::ShareBetween;
use hostfiles::names::Below;
use serde::{Deserialize, Serialize};
use shard_api::launch::Ending;

/// The VMs that a client starts; the first line on the lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batch {
    /// The VMs, each with its name.
    pub vms: Vec<(String, VmSpec)>,
    /// State that the VMs resume from, instead of booting. Their specs are then the source's, with their own
    /// names and addresses.
    #[serde(default)]
    pub source: Option<Source>,
    /// Rule that decides which VMs share pages with these.
    pub share_between: ShareBetween,
    /// User id of the API's member that starts the VMs.
    #[serde(default)]
    pub member: Option<u32>,
    /// Rules for the files that the specs name; none for names of this user on this host.
    #[serde(default)]
    pub names: Option<NameRules>,
    /// Time limit of a boot, from its start until the guest's agent answers, in seconds.
    pub boot_limit_s: u64,
}

/// Rules for the files that a request of another user or another host names.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct NameRules {
    /// Directories below which the files lie.
    pub directories: Vec<PathBuf>,
    /// The setting that lists them, for errors.
    pub setting: String,
    /// User by whose rights the files are opened; this process's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
}

/// Ids of a VM's owner.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Owner {
    /// The user's id.
    pub uid: u32,
    /// Id of the user's own group.
    pub gid: u32,
    /// Ids of the user's further groups.
    pub groups: Vec<u32>,
}

impl NameRules {
    /// Returns the directories, with the setting that lists them.
    pub fn below(&self) -> Below {
        Below {
            directories: self.directories.clone(),
            setting: self.setting.clone(),
        }
    }
}

/// A frozen state that VMs resume from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The running VM with this directory, in its state when the monitor starts.
    Running(PathBuf),
    /// A snapshot. The specs in the batch name the files that it may open (`cell::snapshot::trust`).
    Snapshot {
        /// The snapshot's directory.
        directory: PathBuf,
        /// Users who may own the snapshot's files, beside root.
        owners: Vec<u32>,
    },
}

impl Source {
    /// Directory of a snapshot; none for a running VM.
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
    /// Let the VMs outlive the client.
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
        /// Cell of the VM, in a cluster.
        cell: Option<u16>,
    },
    /// The VM's vCPUs are about to run; sent again after each reboot.
    Running {
        /// The VM's name.
        name: String,
        /// Layers of the sandbox that could not be applied.
        sandbox_missing: Vec<String>,
        /// Whether files of the VM outlive it, so that it must be shut down cleanly.
        keeps_writes: bool,
        /// Pause of the source for this VM, in microseconds.
        paused_us: Option<u64>,
    },
    /// The set of disks whose writes wait for space on the host has changed.
    FullDisks {
        /// The VM's name.
        name: String,
        /// Names of the disks that wait now.
        disks: Vec<String>,
    },
    /// The VM was paused or resumed.
    Paused {
        /// The VM's name.
        name: String,
        /// Whether it is paused.
        paused: bool,
    },
    /// The VM has ended, and restarts.
    StartsAgain {
        /// The VM's name.
        name: String,
        /// Reason for the end, in one line.
        why: String,
    },
    /// The VM did not start.
    Failed {
        /// The VM's name.
        name: String,
        /// Reason and help, in one line.
        why: String,
    },
    /// The VM has ended.
    Ended {
        /// The VM's name.
        name: String,
        /// Kind of the end.
        ending: Ending,
        /// The last lines of the console.
        last_lines: Vec<String>,
        /// Seconds since the start.
        seconds: f64,
    },
}
