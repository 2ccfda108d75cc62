//! The part of a launch that describes the sandbox of a shard's process.

use serde::{Deserialize, Serialize};

/// The sandbox of a shard's process, as far as the monitor made it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SandboxLaunch {
    /// How strictly to close the sandbox.
    pub policy: SandboxPolicy,
    /// User that the process has to become; none where the process has its user already, or may not change
    /// its user.
    pub identity: Option<Identity>,
    /// Namespaces that the monitor could not create for the process, one per line.
    pub missing: Vec<String>,
    /// Optional layers that the monitor could not apply, one per line.
    pub notes: Vec<String>,
}

/// A user and its group, by the host's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// User ID.
    pub uid: u32,
    /// Group ID.
    pub gid: u32,
}

/// How strictly to close the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxPolicy {
    /// Apply what the host allows; report what it does not.
    #[default]
    Auto,
    /// Apply everything or refuse to start.
    Require,
    /// Apply nothing.
    Off,
}
