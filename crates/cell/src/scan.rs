//! Rule for VMs whose memory the host's kernel scans for equal pages (`share = "scan"`).
//!
//! The kernel's scanner (KSM) belongs to root, and knows no share groups: it merges equal pages of all
//! processes that ask for it.

use config::VmSpec;
use config::settings::ShareBetween;
use config::vm::ShareSpec;
use hostinfo::scanner::{RUN_FILE, Scanner};

/// Reason why a VM's memory is not scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// The host's VMs share within groups.
    #[error(
        "share: \"scan\" merges pages with those of any VM, but this host's VMs share within a group; help: \
         set `share_between = \"all\"` in the host's file, or use another `share`"
    )]
    Groups,
    /// The kernel was built without a scanner.
    #[error("share: \"scan\" needs KSM, which this host's kernel does not have; help: use another `share`")]
    NoScanner,
    /// Root has not started the scanner.
    #[error(
        "share: \"scan\" needs KSM, which does not run; help: as root `echo 1 >{RUN_FILE}`, or use another \
         `share`"
    )]
    Stopped,
}

/// Checks that the memory of a VM with this spec may be scanned, if it is to be. `between` is the rule of the
/// host's file, `scanner` the state of the host's scanner.
///
/// # Errors
/// If the rule keeps groups apart, or nothing scans.
pub fn check(
    spec: &VmSpec,
    between: ShareBetween,
    scanner: impl FnOnce() -> Option<Scanner>,
) -> Result<(), ScanError> {
    if spec.share != Some(ShareSpec::Scan) {
        return Ok(());
    }
    if between != ShareBetween::All {
        return Err(ScanError::Groups);
    }
    match scanner() {
        None => Err(ScanError::NoScanner),
        Some(scanner) if !scanner.is_running => Err(ScanError::Stopped),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(share: &str, between: ShareBetween, is_running: Option<bool>) -> Result<(), ScanError> {
        let spec = config::parse("vm.toml", &format!("image = \"tiny\"\nshare = {share:?}")).unwrap();
        let scanner = is_running.map(|is_running| Scanner {
            is_running,
            ..Scanner::default()
        });
        check(&spec, between, || scanner)
    }

    #[test]
    fn memory_is_scanned_where_all_vms_share_and_the_scanner_runs() {
        use ShareBetween::{All, Group};
        assert_eq!(checked("scan", All, Some(true)), Ok(()));
        assert_eq!(checked("scan", Group, Some(true)), Err(ScanError::Groups));
        assert_eq!(checked("scan", All, None), Err(ScanError::NoScanner));
        assert_eq!(checked("scan", All, Some(false)), Err(ScanError::Stopped));
        for share in ["adaptive", "deferred", "at-read", "never"] {
            assert_eq!(checked(share, Group, None), Ok(()), "{share}");
        }
    }
}
