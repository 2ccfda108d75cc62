//! `mirrorball-api`: the REST API as a program of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use config::ConfigError;
use config::settings::{MemberPolicy, Settings, Starter};
use console::api::Context;
use console::caller::MemberRights;

#[derive(Debug, Parser)]
#[command(
    name = "mirrorball-api",
    version,
    about = "Serves VMs and cells as a REST API over a unix socket"
)]
struct Cli {
    /// Where; api.sock in the runtime directory when absent
    #[arg(long)]
    socket: Option<PathBuf>,
    /// A group whose members may look, and start what `[members]` in the host's file admits
    #[arg(long)]
    group: Option<String>,
    /// Let members do all that this user may: with root's API, each of them is root
    #[arg(long, requires = "group")]
    group_may_all: bool,
    /// The `mirrorball` that starts VMs; the one beside this program when absent
    #[arg(long)]
    program: Option<PathBuf>,
    /// Print the OpenAPI document and end
    #[arg(long)]
    document: bool,
}

fn main() -> ExitCode {
    agent::panic::ends_the_process();
    match obey(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mirrorball-api: {error}");
            ExitCode::FAILURE
        }
    }
}

fn obey(cli: Cli) -> std::io::Result<()> {
    if cli.document {
        println!("{}", serde_json::to_string_pretty(&console::api::document())?);
        return Ok(());
    }
    let program = match cli.program {
        Some(program) => program,
        None => std::env::current_exe()?.with_file_name("mirrorball"),
    };
    process_log::Settings::of_environment()?.begin()?;
    if !program.is_file() {
        let why = format!("there is no {}; name it with --program", program.display());
        return Err(std::io::Error::other(why));
    }
    let socket = match cli.socket {
        Some(socket) => socket,
        None => registry::runtime::directory()?.join("api.sock"),
    };
    let settings = Settings::load(nix::unistd::geteuid().is_root()).map_err(one_line)?;
    let share_between = settings.share_between(Starter::Api);
    let context = Context::new(
        program,
        share_between,
        rights(settings.members, cli.group_may_all)?,
    );
    console::serve::serve(&socket, cli.group.as_deref(), context)
}

/// Rights of the group's members.
fn rights(policy: Option<MemberPolicy>, may_all: bool) -> std::io::Result<MemberRights> {
    match (policy, may_all) {
        (Some(_), true) => Err(std::io::Error::other(
            "--group-may-all, and the host's file limits members; drop the flag, or the table `[members]`",
        )),
        (Some(policy), false) => Ok(MemberRights::Limited(policy)),
        (None, true) => Ok(MemberRights::All),
        (None, false) => Ok(MemberRights::Look),
    }
}

/// Formats an error of the host's file for a program without a terminal: cause, place and help.
fn one_line(error: ConfigError) -> std::io::Error {
    let place = error
        .place()
        .map(|place| format!("{place}: "))
        .unwrap_or_default();
    let help = error.help.as_deref().unwrap_or_default();
    std::io::Error::other(format!("{place}{error}; {help}"))
}
