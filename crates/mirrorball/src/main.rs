//! The `mirrorball` command: argument parsing and printing.

mod commands;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use miette::Result;

#[derive(Debug, Parser)]
#[command(
    name = "mirrorball",
    version,
    about = "Virtual machines for machines of many cells"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run VMs
    Run(commands::run::RunArgs),
    /// Check VM files without starting anything
    Check {
        /// VM files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Tell whether this machine's KVM can run guests
    Probe,
    /// Build and list images
    #[command(subcommand)]
    Image(commands::image::ImageCommand),
    /// Hosts in software
    Lab(commands::lab::LabArgs),
    #[command(hide = true)]
    Shard,
}

fn main() -> ExitCode {
    lab::take_over();
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:?}");
            ExitCode::from(1)
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run(args) => commands::run::run(args),
        Command::Check { files } => {
            for file in commands::run::read_files(&files)? {
                println!("{}: good", file.source_name);
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Probe => {
            let verdict = shard::probe::probe();
            println!("{verdict}");
            Ok(if verdict == shard::probe::Verdict::Usable {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(1)
            })
        }
        Command::Image(command) => {
            commands::image::run(command).map_err(|error| miette::miette!("{error}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Lab(args) => Ok(commands::lab::run(args)),
        Command::Shard => {
            use std::os::fd::FromRawFd;
            // SAFETY: the monitor puts the control socket at this descriptor; nothing else here knows it.
            let control = unsafe { std::os::unix::net::UnixStream::from_raw_fd(cell::spawn::CONTROL_FD) };
            Ok(shard::process::run(control))
        }
    }
}
