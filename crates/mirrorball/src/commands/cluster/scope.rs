//! Control group of the cells: a delegated scope of systemd's, and the limits that the host lacks.
//!
//! A guard and its cell are in the control group of the command that started them. `cluster up` puts itself
//! into a scope of its own first, so that no end of a session or service ends the cells, and no other manager
//! changes groups below (`Delegate=yes`, `systemd.resource-control(5)`). A foreground process is its service
//! manager's, and stays where that has put it.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cell::control_group;
use miette::{Result, miette};

use crate::commands::execution_site::argv_os;
use crate::commands::service_manager::{STARTER, enter_scope, group_in, makes_scopes};

/// Mount point of the control groups.
const ROOT: &str = "/sys/fs/cgroup";
/// Properties of the scope.
const PROPERTIES: [&str; 2] = ["Delegate=yes", "TasksMax=infinity"];
/// Environment variable of a process that is in the scope already.
pub(super) const VARIABLE: &str = "MIRRORBALL_SCOPE";
/// Attributes by which systemd marks a delegated group; the first needs root.
const MARKS: [&str; 2] = ["trusted.delegate", "user.delegate"];

/// Executes this command in a scope of its own, if it is in no delegated group and a service manager makes
/// one. Else returns.
///
/// # Errors
/// If the service manager has just made such a scope, and makes none for this command.
pub(super) fn enter(is_foreground: bool) -> Result<()> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let is_in_scope = std::env::var_os(VARIABLE).is_some() || is_delegated(&groups, is_marked);
    if !is_in_scope && !is_foreground && makes_scopes(&PROPERTIES) {
        let error = enter_scope(&PROPERTIES, Some(VARIABLE), argv_os());
        return Err(miette!(
            help = "bring the cluster up by a unit with `Delegate=yes` (packaging/systemd)",
            "{STARTER}: {error}"
        ));
    }
    Ok(())
}

/// Prints a line about the limits of VMs that this host does not enforce, if there are any.
pub(super) fn report_absent_limits() {
    if let Some(line) = absent(&control_group::absent_limits()) {
        eprintln!("mirrorball: {line}");
    }
}

/// Whether the innermost unit of a process has a delegated group, by the process's file `cgroup`.
fn is_delegated(groups: &str, is_marked: impl Fn(&Path) -> bool) -> bool {
    let Some(path) = group_in(groups) else {
        return false;
    };
    let is_unit = |path: &&Path| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.ends_with(".service") || name.ends_with(".scope")
    };
    let unit = Path::new(path).ancestors().find(is_unit);
    unit.is_some_and(is_marked)
}

/// Whether systemd has marked a unit's group as delegated.
fn is_marked(path: &Path) -> bool {
    let group: PathBuf = Path::new(ROOT).join(path.strip_prefix("/").unwrap_or(path));
    MARKS
        .iter()
        .any(|mark| attribute(&group, mark).is_some_and(|value| value == *b"1"))
}

/// The first byte of an attribute of a file.
fn attribute(path: &Path, name: &str) -> Option<[u8; 1]> {
    let (path, name) = (
        CString::new(path.as_os_str().as_bytes()).ok()?,
        CString::new(name).ok()?,
    );
    let mut value = [0; 1];
    // SAFETY: both strings end with a zero, and the kernel writes at most one byte.
    let length = unsafe {
        libc::getxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    (length == 1).then_some(value)
}

/// A line about limits that are absent; none if there are none.
fn absent(limits: &[&str]) -> Option<String> {
    let [first @ .., last] = limits else { return None };
    let listed = match first {
        [] => (*last).to_owned(),
        first => format!("{} and {last}", first.join(", ")),
    };
    Some(format!(
        "{listed} of VMs are refused on this host; help: they need root, cgroup v2 and its controllers"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_innermost_unit_counts_as_delegated() {
        let delegated =
            |groups: &str, marked: &'static str| is_delegated(groups, move |path| path == Path::new(marked));
        let manager = "/user.slice/user-1000.slice/user@1000.service";
        let scope = format!("0::{manager}/app.slice/run-7.scope\n");
        assert!(!delegated(
            &scope,
            "/user.slice/user-1000.slice/user@1000.service"
        ));
        assert!(delegated(
            &scope,
            "/user.slice/user-1000.slice/user@1000.service/app.slice/run-7.scope"
        ));
        let below = "0::/system.slice/mirrorball-cluster.service/cells\n";
        assert!(delegated(below, "/system.slice/mirrorball-cluster.service"));
        assert!(!delegated("0::/\n", "/"));
        assert!(!delegated("", "/"));
    }

    #[test]
    fn absent_limits_are_one_line() {
        assert_eq!(absent(&[]), None);
        let line = absent(&["io_limit"]).unwrap();
        assert!(line.starts_with("io_limit of VMs are refused"), "{line}");
        let line = absent(&["cpu_weight", "cpu_limit", "io_limit"]).unwrap();
        assert!(
            line.starts_with("cpu_weight, cpu_limit and io_limit of VMs"),
            "{line}"
        );
    }

    #[test]
    fn file_without_the_attribute_is_not_marked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(attribute(file.path(), "user.delegate"), None);
        assert_eq!(attribute(Path::new("/no such file"), "user.delegate"), None);
    }
}
