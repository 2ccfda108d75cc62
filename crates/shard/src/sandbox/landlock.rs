//! Restricts access to files, TCP, abstract sockets and signals by Landlock, as far as the kernel supports
//! it.
//!
//! Landlock needs neither rights nor namespaces, so it also works where those are refused. Open files remain
//! usable.

use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, Scope,
};

/// The newest version of Landlock whose restrictions are requested.
const NEWEST: ABI = ABI::V6;

/// The restrictions that each version of Landlock added, and the first kernel with it.
const LEVELS: [(ABI, &str, &str); 6] = [
    (ABI::V1, "opening, making and removing files", "5.13"),
    (ABI::V2, "moving files between directories", "5.19"),
    (ABI::V3, "truncating files by name", "6.2"),
    (ABI::V4, "TCP", "6.7"),
    (ABI::V5, "requests to devices opened later", "6.10"),
    (ABI::V6, "abstract sockets and signals of other processes", "6.12"),
];

/// The directory below which a process may open files.
#[derive(Clone, Copy, Debug)]
pub struct Beneath<'a> {
    /// The open directory.
    pub folder: BorrowedFd<'a>,
    /// Whether the process may only read.
    pub read_only: bool,
}

/// Restricts the calling thread and all threads that it starts. Returns the restrictions that this kernel
/// lacks, one per line.
pub fn restrict(beneath: Option<Beneath<'_>>) -> Result<Vec<String>, RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    if let Some(Beneath { folder, read_only }) = beneath {
        let access = match read_only {
            true => AccessFs::ReadFile | AccessFs::ReadDir,
            false => {
                AccessFs::from_all(NEWEST)
                    & !(AccessFs::Execute | AccessFs::IoctlDev | AccessFs::MakeBlock | AccessFs::MakeChar)
            }
        };
        rules = rules.add_rule(PathBeneath::new(folder, access))?;
    }
    let status = rules.restrict_self()?;
    Ok(lacking(&status.landlock))
}

/// Restricts the calling thread's access to files and to signals, but not to TCP.
pub fn restrict_files() -> Result<(), RulesetError> {
    let ruleset = Ruleset::default().handle_access(AccessFs::from_all(NEWEST))?;
    ruleset
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .restrict_self()?;
    Ok(())
}

/// Returns the restrictions that a kernel of this status lacks.
fn lacking(status: &LandlockStatus) -> Vec<String> {
    match status {
        LandlockStatus::NotEnabled => vec!["Landlock: not enabled; boot with lsm=landlock,...".to_owned()],
        LandlockStatus::NotImplemented => vec!["Landlock: not in this kernel; Linux 5.13 has it".to_owned()],
        LandlockStatus::Available { effective_abi, .. } => LEVELS
            .iter()
            .filter(|(level, ..)| effective_abi < level)
            .map(|(_, what, since)| format!("Landlock does not restrict {what}; Linux {since} does"))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_that_the_kernel_lacks_is_reported() {
        let of = |effective_abi| {
            lacking(&LandlockStatus::Available {
                effective_abi,
                kernel_abi: None,
            })
        };
        assert_eq!(of(ABI::V6), [""; 0]);
        assert_eq!(
            of(ABI::V5),
            ["Landlock does not restrict abstract sockets and signals of other processes; Linux 6.12 does"]
        );
        assert_eq!(of(ABI::V2).len(), 4);
        assert_eq!(lacking(&LandlockStatus::NotImplemented).len(), 1);
        assert_eq!(lacking(&LandlockStatus::NotEnabled).len(), 1);
    }
}
