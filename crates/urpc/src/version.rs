//! Protocol versions, and their negotiation between two programs.
//!
//! A release speaks its own version of each protocol and the previous one, so that the programs of a cluster
//! can be replaced one after another. Within these two versions a protocol only grows: a receiver ignores
//! unknown fields, gives missing fields a default, and refuses a request of an unknown kind. Any other change
//! takes a new version, and drops the one before the previous.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The versions of one protocol that a program speaks: all from the oldest to the newest.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Versions {
    /// The oldest version.
    pub oldest: u16,
    /// The newest version.
    pub newest: u16,
}

impl Versions {
    /// The first version of each protocol. A program that sends no version speaks it.
    pub const FIRST: Self = Self { oldest: 1, newest: 1 };

    /// Returns a program's version and the previous one.
    pub const fn up_to(newest: u16) -> Self {
        let oldest = if newest > 1 { newest - 1 } else { 1 };
        Self { oldest, newest }
    }

    /// Returns the greatest version that both speak.
    ///
    /// # Errors
    /// Fails with [`VersionMismatch`] if there is none. `protocol` names the protocol for people, such as
    /// "the cells' protocol", and `peer` the program that speaks `theirs`, such as "cell 1".
    pub fn agree(
        self,
        theirs: Self,
        protocol: &'static str,
        peer: impl fmt::Display,
    ) -> Result<u16, VersionMismatch> {
        let version = self.newest.min(theirs.newest);
        if version < self.oldest || version < theirs.oldest {
            return Err(VersionMismatch {
                peer: peer.to_string(),
                protocol,
                theirs,
                ours: self,
            });
        }
        Ok(version)
    }
}

impl Default for Versions {
    fn default() -> Self {
        Self::FIRST
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(out, "version {}", self.newest),
            false => write!(out, "versions {} to {}", self.oldest, self.newest),
        }
    }
}

/// Error: two programs have no version of a protocol in common. One line, with help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "{peer} speaks {theirs} of {protocol}, and this program {ours}; help: programs one release apart work \
     together, so upgrade the \
     older one by one release at a time"
)]
pub struct VersionMismatch {
    /// Name of the other program.
    pub peer: String,
    /// Name of the protocol.
    pub protocol: &'static str,
    /// The versions of the other program.
    pub theirs: Versions,
    /// The versions of this one.
    pub ours: Versions,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(ours: u16, theirs: u16) -> Result<u16, VersionMismatch> {
        Versions::up_to(ours).agree(Versions::up_to(theirs), "the cells' protocol", "cell 1")
    }

    #[test]
    fn programs_at_most_one_release_apart_agree_on_the_older_version() {
        for newest in 1..50 {
            assert_eq!(agreed(newest, newest), Ok(newest));
            assert_eq!(agreed(newest, newest + 1), Ok(newest));
            assert_eq!(agreed(newest + 1, newest), Ok(newest));
        }
    }

    #[test]
    fn incompatible_versions_are_refused_with_both_versions_and_help() {
        for (ours, theirs) in [(4, 2), (2, 4), (1, 3), (u16::MAX, 1)] {
            let error = agreed(ours, theirs).unwrap_err().to_string();
            let both = format!(
                "cell 1 speaks {} of the cells' protocol, and this program {}; help: ",
                Versions::up_to(theirs),
                Versions::up_to(ours)
            );
            assert!(error.starts_with(&both) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn hostile_version_range_never_selects_an_unsupported_version() {
        let ours = Versions::up_to(5);
        for oldest in 0..8 {
            for newest in 0..8 {
                if let Ok(version) = ours.agree(Versions { oldest, newest }, "", "") {
                    assert!((4..=5).contains(&version) && version >= oldest && version <= newest);
                }
            }
        }
    }
}
