//! Internal processes of this program, started with arguments that no user types: cells, monitors,
//! measurements.
//!
//! Their arguments are checked before the command line is parsed: the description of all commands takes 400
//! KiB of a process.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use cell::cluster::commands;
use cell::programs::Programs;
use cell::{opener, subnet_card};
use miette::{IntoDiagnostic, Result};
use process_log::{LEVEL, Settings};

use crate::{remote, subnet_gateway};

/// Runs as such a process if the command line names one; returns when it is done.
pub fn take_over() -> Option<Result<()>> {
    let words: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.into_string().unwrap_or_default())
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if is_of_this_host(&words) && remote::is_for_another_host() {
        return Some(Err(remote::not_for_other_hosts()));
    }
    Some(match words[..] {
        ["cell", number, ref rest @ ..] if matches!(rest, [] | ["trial"]) => {
            let (number, is_on_trial) = (number.parse().ok()?, !rest.is_empty());
            logged(|| cell::cluster::serve::serve(number, is_on_trial, shard::PLATFORM))
        }
        ["cell-guard", number] => {
            let number = number.parse().ok()?;
            logged(|| cell::cluster::guard::guard(number))
        }
        ["cell-admission"] => logged(cell::cluster::admission::serve),
        ["measure"] => hostinfo::facts::measure(true).map(drop).into_diagnostic(),
        ["monitors"] => start_monitors(),
        [subnet_card::COMMAND, ref identity @ ..] => subnet_gateway::run(identity),
        [opener::COMMAND, ref owner @ ..] => {
            // SAFETY: the monitor has put its socket at standard input, which no other code of this process
            // reads.
            let monitor = unsafe { OwnedFd::from_raw_fd(libc::STDIN_FILENO) };
            opener::serve(owner, monitor.into()).into_diagnostic()
        }
        [commands::COMMAND, uid, ref words @ ..] => remote::run_as(uid, words),
        ["adopt"] => {
            // SAFETY: the keeper has put its socket at standard input, which no other code of this process
            // reads.
            let keeper = unsafe { OwnedFd::from_raw_fd(libc::STDIN_FILENO) };
            cell::monitor::adopt(keeper, shard::PLATFORM).into_diagnostic()
        }
        ["part"] => cell::remote::launch::launch(std::io::stdin(), std::io::stdout()).into_diagnostic(),
        ["part-monitor"] => logged_on_demand(part_monitor),
        _ => return None,
    })
}

/// Whether this is a process that only this host starts. A command of another host may start a part, and its
/// monitor may have a successor.
fn is_of_this_host(words: &[&str]) -> bool {
    let own = [
        "cell",
        "cell-guard",
        "cell-admission",
        "measure",
        "monitors",
        subnet_card::COMMAND,
        opener::COMMAND,
    ];
    words.first().is_some_and(|first| own.contains(first))
}

/// Runs a process that has a log.
fn logged(run: impl FnOnce() -> std::io::Result<()>) -> Result<()> {
    let begun = Settings::of_environment().and_then(Settings::begin);
    begun.and_then(|()| run()).into_diagnostic()
}

/// Runs a process that logs only if a level is set: its standard error belongs to another process then.
fn logged_on_demand(run: impl FnOnce() -> Result<()>) -> Result<()> {
    if std::env::var_os(LEVEL).is_some() {
        Settings::of_environment()
            .and_then(Settings::begin)
            .into_diagnostic()?;
    }
    run()
}

fn start_monitors() -> Result<()> {
    cell::monitor::start_over(input_socket()?, shard::PLATFORM).into_diagnostic()
}

fn part_monitor() -> Result<()> {
    let programs = Programs::beside_command();
    cell::remote::monitor::run(input_socket()?, shard::PLATFORM, programs).into_diagnostic()
}

/// Returns the socket that the parent of this process has put in place of standard input.
fn input_socket() -> Result<UnixStream> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    Ok(socket.into_diagnostic()?.into())
}
