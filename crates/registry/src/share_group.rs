//! Names of share groups, and the rule that gives each VM its group.
//!
//! VMs of one group map pages of the same files, and VMs of two groups never do. A group is a text in a VM's
//! record and in those of its clones. The monitor names the groups of its batch; `cell::share_group`
//! takes the file locks that enforce them. No name from a user contains `:`, so the three kinds of names
//! never collide.

use std::fs::File;
use std::io::{self, Read};

use config::VmSpec;
use config::settings::ShareBetween;
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

/// Bytes of randomness in the name of a run's group, so that the name can't be guessed.
const RUN_BYTES: usize = 8;
const RUN: &str = "run:";

/// The name of a share group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareGroup(String);

/// Rule for the groups of a batch of VMs.
#[derive(Clone, Debug)]
pub struct Grouping {
    /// Which VMs of one user share.
    pub between: ShareBetween,
    /// The user that the VMs belong to.
    pub uid: Uid,
    /// Group of the VMs that share only within this batch.
    pub run: ShareGroup,
}

impl ShareGroup {
    /// Creates a group for the VMs of one command.
    ///
    /// # Errors
    /// If the host provides no randomness.
    pub fn of_run() -> io::Result<Self> {
        let mut random = [0; RUN_BYTES];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        Ok(Self(format!("{RUN}{:016x}", u64::from_ne_bytes(random))))
    }

    /// Returns the name, which a claim on a file hashes.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Whether this is the group of one command's VMs. Only its random name keeps other VMs out of it.
    pub fn is_of_run(&self) -> bool {
        self.0.starts_with(RUN)
    }
}

impl Grouping {
    /// Returns the group of a VM with this spec.
    pub fn of(&self, spec: &VmSpec) -> ShareGroup {
        match (&spec.share_group, self.between) {
            // A name in a spec has no `:`, so no spec can name a group of the other kinds.
            (Some(name), _) => ShareGroup(format!("group:{}:{name}", self.uid)),
            (None, ShareBetween::All) => ShareGroup(format!("user:{}", self.uid)),
            (None, ShareBetween::Group) => self.run.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> VmSpec {
        config::parse("vm.toml", text).unwrap()
    }

    fn grouping(between: ShareBetween) -> Grouping {
        Grouping {
            between,
            uid: Uid::from_raw(1000),
            run: ShareGroup::of_run().unwrap(),
        }
    }

    #[test]
    fn vms_of_two_commands_are_of_two_groups_unless_all_share_or_a_group_is_named() {
        let plain = spec("image = \"tiny\"");
        let named = spec("image = \"tiny\"\nshare_group = \"red\"");
        let (one, other) = (grouping(ShareBetween::Group), grouping(ShareBetween::Group));
        assert_eq!(one.of(&plain), one.of(&plain), "VMs of one command");
        assert_ne!(one.of(&plain), other.of(&plain), "VMs of two commands");
        assert_eq!(one.of(&named), other.of(&named));
        assert_ne!(one.of(&named), one.of(&plain));
        let (one, other) = (grouping(ShareBetween::All), grouping(ShareBetween::All));
        assert_eq!(one.of(&plain), other.of(&plain));
        assert_ne!(one.of(&named), one.of(&plain));
        let foreign = Grouping {
            uid: Uid::from_raw(1001),
            ..other
        };
        assert_ne!(one.of(&plain), foreign.of(&plain), "VMs of two users");
        assert_ne!(one.of(&named), foreign.of(&named));
    }

    #[test]
    fn no_name_of_a_group_is_that_of_a_run_or_of_a_user() {
        let run = ShareGroup::of_run().unwrap();
        assert!(run.is_of_run());
        assert_ne!(run, ShareGroup::of_run().unwrap());
        // No name in a spec has a `:`.
        for name in [run.0.as_str(), "user:0"] {
            let text = format!("image = \"tiny\"\nshare_group = {name:?}");
            assert!(config::parse("vm.toml", &text).is_err(), "{name}");
        }
        let named = spec("image = \"tiny\"\nshare_group = \"run\"");
        assert!(!grouping(ShareBetween::Group).of(&named).is_of_run());
    }
}
