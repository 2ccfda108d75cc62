//! Commands of this program that other hosts request: their owner, their environment, and the names of files
//! that they may use. Decisions only, without a process or a file.
//!
//! The calling host has proven by its certificate which host it is, and vouches for the user who gave the
//! command ([`OWNER_VARIABLE`]). A cell of root runs the command of another user by that user's rights
//! ([`COMMAND`]); any other cell has only the rights of its own user.

use std::path::Path;

use agent::protocol::ExecRequest;
use config::cluster::Site;
use hostfiles::passwd::User;
use registry::monitor::NameRules;

/// The name under which another host requests this program.
pub const PROGRAM: &str = "mirrorball";
/// First argument of a process that runs a command by another user's rights; the user's id and the command's
/// arguments follow.
pub const COMMAND: &str = "remote-command";
/// Environment variable of a command that another host forwarded to this one.
pub const FORWARDED_VARIABLE: &str = "MIRRORBALL_FORWARDED";
/// Environment variable of a request: id of the user who gave the command.
pub const OWNER_VARIABLE: &str = "MIRRORBALL_OWNER";
/// Environment variable of a command that runs for another host: the rules for names of files, as JSON. The
/// cell sets it; a caller can't.
pub const RULES_VARIABLE: &str = "MIRRORBALL_NAMES";
/// The only variable that a command has of its caller.
pub const TERMINAL_VARIABLE: &str = "TERM";

/// Reason why a command is not run for another host. One line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandRefused {
    /// A request for another program than this one.
    #[error("only {PROGRAM} is run for other hosts")]
    OtherProgram,
    /// A user id that is none.
    #[error("{0:?} is no user id; help: run the release of this host")]
    NoId(String),
    /// A user whom this host does not know.
    #[error("this host has no user with the id {0}; help: add the user here, or give the command as root")]
    UnknownUser(u32),
    /// Rules that can't be written.
    #[error("the rules for names of files can't be passed on: {0}")]
    Rules(String),
}

/// Rules for names of files in commands of other hosts.
pub fn name_rules(site: &Site) -> NameRules {
    NameRules {
        directories: site.remote_paths().to_vec(),
        setting: format!("`remote_paths` of host {} in its cluster file", site.here),
        owner: None,
    }
}

/// Checks a request, and makes it the command that this host runs: as the user `own`, or by the rights of the
/// user for whom the caller vouches. `user_of` finds a user of this host by id.
///
/// # Errors
/// [`CommandRefused`].
pub fn prepare(
    request: &mut ExecRequest,
    rules: &NameRules,
    own: u32,
    user_of: impl Fn(u32) -> Option<User>,
) -> Result<(), CommandRefused> {
    if request.argv.first().map(String::as_str) != Some(PROGRAM) {
        return Err(CommandRefused::OtherProgram);
    }
    let variable = |name: &str| {
        let mut variables = request.env.iter();
        variables.find_map(|(known, value)| (known == name).then(|| value.clone()))
    };
    let owner = match variable(OWNER_VARIABLE) {
        // The release before sends no user.
        None => own,
        Some(id) => id.parse().map_err(|_| CommandRefused::NoId(id))?,
    };
    let terminal = variable(TERMINAL_VARIABLE);
    "/proc/self/exe".clone_into(&mut request.argv[0]);
    if own == 0 && owner != 0 {
        let user = user_of(owner).ok_or(CommandRefused::UnknownUser(owner))?;
        let words = [COMMAND.to_owned(), user.uid.to_string()];
        request.argv.splice(1..1, words);
    }
    let rules = serde_json::to_string(rules).map_err(|error| CommandRefused::Rules(error.to_string()))?;
    // Others could name files, programs, or another image store.
    request.env = terminal
        .map(|terminal| (TERMINAL_VARIABLE.to_owned(), terminal))
        .into_iter()
        .chain([
            (FORWARDED_VARIABLE.to_owned(), "1".to_owned()),
            (RULES_VARIABLE.to_owned(), rules),
        ])
        .collect();
    request.cwd = request.cwd.take().filter(|folder| Path::new(folder).is_dir());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: u32 = 1001;

    fn request(argv: &[&str], env: &[(&str, &str)]) -> ExecRequest {
        ExecRequest {
            argv: argv.iter().map(|word| (*word).to_owned()).collect(),
            env: env
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            cwd: Some("/no such directory".to_owned()),
            tty: None,
        }
    }

    fn rules() -> NameRules {
        NameRules {
            directories: vec!["/srv/vms".into()],
            setting: "`remote_paths`".to_owned(),
            owner: None,
        }
    }

    fn prepared(own: u32, env: &[(&str, &str)]) -> Result<ExecRequest, CommandRefused> {
        let mut request = request(&[PROGRAM, "ps", "--json"], env);
        let user_of = |uid| {
            (uid == ALICE).then(|| User {
                name: "alice".to_owned(),
                uid,
                gid: 100,
                home: "/home/alice".to_owned(),
            })
        };
        prepare(&mut request, &rules(), own, user_of).map(|()| request)
    }

    #[test]
    fn command_of_another_user_runs_by_that_users_rights_where_the_cell_is_roots() {
        let argv = |own, owner: &str| {
            let env = [(OWNER_VARIABLE, owner)];
            prepared(own, &env).map(|request| request.argv.join(" "))
        };
        let plain = "/proc/self/exe ps --json";
        assert_eq!(
            argv(0, "1001").unwrap(),
            "/proc/self/exe remote-command 1001 ps --json"
        );
        assert_eq!(argv(0, "0").unwrap(), plain);
        assert_eq!(
            prepared(0, &[]).unwrap().argv.join(" "),
            plain,
            "the release before"
        );
        for owner in ["0", "1001", "7"] {
            assert_eq!(
                argv(1000, owner).unwrap(),
                plain,
                "a user's cell has its own rights alone"
            );
        }
        assert_eq!(argv(0, "1002").unwrap_err(), CommandRefused::UnknownUser(1002));
        assert_eq!(
            argv(0, "root").unwrap_err(),
            CommandRefused::NoId("root".to_owned())
        );
        assert!(argv(0, "-1").is_err() && argv(0, "").is_err());
    }

    #[test]
    fn caller_sets_no_variable_but_the_terminal() {
        let env = [
            ("TERM", "xterm"),
            ("LD_PRELOAD", "/tmp/x.so"),
            ("MIRRORBALL_DATA", "/tmp"),
            (RULES_VARIABLE, "{}"),
            (FORWARDED_VARIABLE, ""),
        ];
        let request = prepared(0, &env).unwrap();
        let names: Vec<&str> = request.env.iter().map(|(name, _)| &name[..]).collect();
        assert_eq!(names, [TERMINAL_VARIABLE, FORWARDED_VARIABLE, RULES_VARIABLE]);
        let passed: NameRules = serde_json::from_str(&request.env[2].1).unwrap();
        assert_eq!(passed, rules());
        assert_eq!(request.cwd, None);
    }

    #[test]
    fn only_this_program_is_run() {
        for argv in [&["sh", "-c", "true"][..], &[], &["/usr/bin/mirrorball"]] {
            let mut request = request(argv, &[]);
            let refused = prepare(&mut request, &rules(), 0, |_| None);
            assert_eq!(refused, Err(CommandRefused::OtherProgram));
        }
    }
}
