//! `mirrorball-api`: the REST API as a program of its own.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

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
    /// A group whose members may use it
    #[arg(long)]
    group: Option<String>,
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
    if !program.is_file() {
        let why = format!("there is no {}; name it with --program", program.display());
        return Err(std::io::Error::other(why));
    }
    let socket = match cli.socket {
        Some(socket) => socket,
        None => cell::runtime::directory()?.join("api.sock"),
    };
    console::serve::serve(&socket, cli.group.as_deref(), &program)
}
