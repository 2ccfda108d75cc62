//! systemd's scopes: a unit for processes that a command starts, which no session or service ends.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::unistd::geteuid;

/// Program that starts a process in a separate unit.
pub(super) const STARTER: &str = "systemd-run";

/// Executes this program with these arguments, in place of this process, in a scope of its own with these
/// properties (`systemd.scope(5)`). There the environment variable `mark`, if given, is set. Returns only if
/// that fails.
pub(super) fn enter_scope(
    properties: &[&str],
    mark: Option<&str>,
    arguments: impl IntoIterator<Item = OsString>,
) -> std::io::Error {
    // By its path: the starter executes it in place of itself, which `/proc/self/exe` is then.
    match std::env::current_exe() {
        Ok(program) => starter(properties, geteuid().is_root())
            .arg(program)
            .args(arguments)
            .envs(mark.map(|mark| (mark, "1")))
            .exec(),
        Err(error) => error,
    }
}

/// Whether the service manager makes such a scope: the system's for root, else the user's own.
pub(super) fn makes_scopes(properties: &[&str]) -> bool {
    let mut command = starter(properties, geteuid().is_root());
    let command = command.arg("/bin/true").stdin(Stdio::null());
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// The starter without the program.
fn starter(properties: &[&str], is_root: bool) -> Command {
    let mut command = Command::new(STARTER);
    command.args(words(properties, is_root));
    command
}

fn words(properties: &[&str], is_root: bool) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["--scope", "--quiet", "--collect"].map(OsString::from).into();
    if !is_root {
        words.push("--user".into());
    }
    for property in properties {
        words.push(format!("--property={property}").into());
    }
    words.push(OsStr::new("--").to_owned());
    words
}

/// Path of a process's control group below the mount point, by its file `cgroup` (`cgroups(7)`).
pub(super) fn group_in(groups: &str) -> Option<&str> {
    let paths = ["0::", "1:name=systemd:"].into_iter();
    paths
        .filter_map(|start| groups.lines().find_map(|line| line.strip_prefix(start)))
        .find(|path| *path != "/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_is_of_the_users_own_manager_unless_the_user_is_root() {
        let joined = |properties: &[&str], is_root| {
            let words = words(properties, is_root);
            words
                .iter()
                .map(|word| word.to_string_lossy())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(joined(&[], true), "--scope --quiet --collect --");
        assert_eq!(
            joined(&["Delegate=yes", "TasksMax=infinity"], false),
            "--scope --quiet --collect --user --property=Delegate=yes --property=TasksMax=infinity --"
        );
    }
}
