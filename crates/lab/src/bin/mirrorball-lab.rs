//! `mirrorball lab` alone, for this crate's tests.

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    lab: lab::cli::LabArgs,
}

fn main() -> ExitCode {
    agent::panic::ends_the_process();
    lab::take_over();
    lab::cli::run(Command::parse().lab)
}
