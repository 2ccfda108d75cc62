//! systemd unit that ends detached VMs, and a separate scope for them.
//!
//! A VM's keeper is a process of the caller's, in the caller's control group. In a service's group,
//! `systemctl stop` ends the VM; in a login session's, the logout does if the host ends the processes of
//! sessions.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use miette::{Report, miette};

use crate::commands::execution_site::argv_os;
use crate::commands::service_manager::{STARTER, enter_scope, group_in};

/// Flag that this module implements.
const FLAG: &str = "--scope";
/// Settings of the login manager: later files override earlier ones (`logind.conf(5)`).
const SETTINGS: [&str; 4] = [
    "/usr/lib/systemd/logind.conf",
    "/usr/lib/systemd/logind.conf.d",
    "/etc/systemd/logind.conf",
    "/etc/systemd/logind.conf.d",
];

/// Runs this command in a separate scope. Returns only if that fails.
pub(super) fn enter() -> Report {
    let error = enter_scope(&[], None, without_flag(argv_os()));
    miette!(
        help =
            "install systemd, or leave the flag out: without a service manager nothing ends with a session",
        "{FLAG}: {STARTER}: {error}"
    )
}

/// Returns the arguments without the flag. After `--` they are the guest's.
fn without_flag(arguments: Vec<OsString>) -> Vec<OsString> {
    let own = arguments
        .iter()
        .position(|word| word == "--")
        .unwrap_or(arguments.len());
    let kept = |(index, word): &(usize, OsString)| *index >= own || word != FLAG;
    arguments
        .into_iter()
        .enumerate()
        .filter(kept)
        .map(|(_, word)| word)
        .collect()
}

/// Returns the unit whose end ends this process and its children; none if there is none.
pub(super) fn ends_with() -> Option<String> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let unit = unit_in(&groups)?;
    // Root's processes are spared (`KillExcludeUsers`).
    let is_left = || nix::unistd::geteuid().is_root() || !ends_sessions();
    (!is_of_session(unit) || !is_left()).then(|| unit.to_owned())
}

/// Returns the innermost stoppable unit in a process's file `cgroup` (`cgroups(7)`).
fn unit_in(groups: &str) -> Option<&str> {
    let unit = group_in(groups)?.rsplit('/').find(|part| {
        [".service", ".scope", ".slice"]
            .iter()
            .any(|kind| part.ends_with(kind))
    })?;
    // A user's own manager ends with the user's last session only where sessions are ended; its scopes are
    // made for one program.
    let is_manager = unit.starts_with("user@") || unit == "init.scope";
    let is_stopped = unit.ends_with(".service") || is_of_session(unit);
    (is_stopped && !is_manager).then_some(unit)
}

fn is_of_session(unit: &str) -> bool {
    unit.starts_with("session-") && unit.ends_with(".scope")
}

/// Whether the host ends the processes of a finished session.
fn ends_sessions() -> bool {
    let files = SETTINGS.iter().flat_map(|path| files_of(Path::new(path)));
    let texts = files.filter_map(|path| fs::read_to_string(path).ok());
    let said = texts.filter_map(|text| kill_user_processes(&text));
    said.fold(false, |_, later| later)
}

/// Returns the file, or the settings files in the directory in their order.
fn files_of(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else {
        return vec![path.to_owned()];
    };
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "conf"));
    files.sort();
    files
}

/// Returns the setting for the processes of sessions in a settings file, if it has one.
fn kill_user_processes(text: &str) -> Option<bool> {
    let mut lines = text.lines().rev();
    let last = lines.find_map(|line| line.trim().strip_prefix("KillUserProcesses="))?;
    Some(["yes", "true", "on", "1"].contains(&last.trim().to_ascii_lowercase().as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn innermost_unit_that_can_be_stopped_is_found() {
        for (groups, unit) in [
            ("0::/\n", None),
            ("0::/system.slice/builder.service\n", Some("builder.service")),
            (
                "0::/system.slice/builder.service/inner\n",
                Some("builder.service"),
            ),
            (
                "0::/user.slice/user-1000.slice/session-3.scope\n",
                Some("session-3.scope"),
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-7.scope\n",
                None,
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/init.scope\n",
                None,
            ),
            ("0::/user.slice/user-1000.slice/user@1000.service\n", None),
            ("0::/system.slice/docker-12ab.scope\n", None),
            (
                "4:memory:/a.service\n1:name=systemd:/system.slice/b.service\n0::/\n",
                Some("b.service"),
            ),
            ("", None),
        ] {
            assert_eq!(unit_in(groups), unit, "{groups}");
        }
    }

    #[test]
    fn last_setting_of_sessions_counts_and_comments_do_not() {
        assert_eq!(kill_user_processes("[Login]\n#KillUserProcesses=yes\n"), None);
        assert_eq!(
            kill_user_processes("KillUserProcesses=yes\nKillUserProcesses=no\n"),
            Some(false)
        );
        assert_eq!(
            kill_user_processes("[Login]\nKillUserProcesses=Yes \n"),
            Some(true)
        );
    }

    #[test]
    fn flag_is_left_out_but_not_of_the_guests_command() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert_eq!(
            without_flag(words("run --scope -d --image x -- tool --scope")),
            words("run -d --image x -- tool --scope")
        );
        assert_eq!(without_flag(words("run -d --scope")), words("run -d"));
    }
}
