//! Requests of a monitor for a VM's frozen state, and a shard's replies, over a socket that carries files.

use serde::{Deserialize, Serialize};

use super::{Fd, ResumeLaunch};

/// Request of a monitor to a shard, over a socket that carries files.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum HandoverRequest {
    /// Freeze the VM's state as it is now. The VM runs on afterwards.
    Freeze {
        /// By disk: an empty file for a copy of the disk's temporary overlay; none for a disk without one.
        overlays: Vec<Option<Fd>>,
    },
    /// Report which pages of memory the VM has touched so far.
    Touched,
}

/// Reply to a [`HandoverRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum HandoverReply {
    /// The pages that the VM has touched.
    Touched {
        /// Runs of guest pages in order: number of the first page, number of pages.
        runs: Vec<(u64, u64)>,
    },
    /// The VM's state is frozen; the overlays' files are filled.
    Frozen {
        /// The state that other VMs can resume.
        resume: ResumeLaunch,
        /// Time that the VM was paused, microseconds.
        paused_us: u64,
    },
    /// The request was refused. The VM runs on unchanged.
    Refused {
        /// Reason and help.
        why: String,
    },
}
