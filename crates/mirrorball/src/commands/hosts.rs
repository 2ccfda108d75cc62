//! Forwards commands to another host of the cluster, with this host's terminal and streams.

use std::collections::BTreeSet;
use std::process::ExitCode;

use agent::client::ClientError;
use agent::protocol::ExecRequest;
use cell::cluster::commands::{FORWARDED_VARIABLE, OWNER_VARIABLE};
use cell::cluster::hosts::{Hosts, PROGRAM};
use miette::{IntoDiagnostic, Report, Result, miette};
use nix::unistd::geteuid;
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::vms::Record;

use super::execution_site::argv_os;
use crate::guest;

/// Runs this command on the other host of the cluster where a VM runs, if there is one.
pub fn vm_elsewhere(vm: &str) -> Result<Option<ExitCode>> {
    let Some(hosts) = hosts()? else { return Ok(None) };
    let status = client::status(&Files::open().into_diagnostic()?).into_diagnostic()?;
    let cells = status.into_iter().flat_map(|status| status.cells);
    let mut having = cells.filter(|cell| cell.vms.iter().any(|name| name == vm));
    match having.find(|cell| hosts.site().is_elsewhere(cell.plan.number)) {
        Some(cell) => forward(&hosts, cell.plan.number).map(Some),
        None => Ok(None),
    }
}

/// Runs this command on the host of a cell, if that is another host.
pub fn at_cell(cell: u16) -> Result<Option<ExitCode>> {
    match hosts()?.filter(|hosts| hosts.site().is_elsewhere(cell)) {
        Some(hosts) => forward(&hosts, cell).map(Some),
        None => Ok(None),
    }
}

/// Runs this command on each other host that has one of these cells. Returns the hosts, each with the exit
/// status there, or with the reason why the command did not run.
pub fn at_hosts_of(cells: &BTreeSet<u16>) -> Result<Vec<(String, Result<ExitCode>)>> {
    let Some(hosts) = hosts()? else {
        return Ok(Vec::new());
    };
    let site = hosts.site();
    let others = site.hosts.iter().filter(|host| host.name != site.here);
    let having = others.filter_map(|host| {
        let cell = host.cells.iter().find(|cell| cells.contains(cell))?;
        Some((host.name.clone(), forward(&hosts, *cell)))
    });
    Ok(having.collect())
}

/// Returns the cluster's hosts; none for a single host, or if another host forwarded the command.
fn hosts() -> Result<Option<Hosts>> {
    if std::env::var_os(FORWARDED_VARIABLE).is_some() {
        return Ok(None);
    }
    let site = Files::open().and_then(|files| files.site()).into_diagnostic()?;
    site.map(Hosts::open)
        .transpose()
        .map_err(|error| miette!("{error}"))
}

fn forward(hosts: &Hosts, cell: u16) -> Result<ExitCode> {
    let mut argv = vec![PROGRAM.to_owned()];
    for argument in argv_os() {
        let argument = argument.into_string();
        argv.push(argument.map_err(|argument| {
            miette!(
                help = "rename it, or give the command on the other host",
                "{} is not UTF-8",
                argument.display()
            )
        })?);
    }
    let stream = hosts.command(cell).into_diagnostic()?;
    let status = agent::client::exec(stream, &command_request(&argv, true));
    let status = status.map_err(|error| {
        let site = hosts.site();
        let host = site.host_of(cell).map(|host| &host.name[..]);
        relay_failure(error, host.unwrap_or("of the cell"), &argv)
    })?;
    Ok(ExitCode::from(status.code()))
}

/// The error of a command that another host runs. `argv` is the command with its program.
fn relay_failure(error: ClientError, host: &str, argv: &[String]) -> Report {
    if !matches!(error, ClientError::Io(_)) {
        return Err::<(), _>(error).into_diagnostic().unwrap_err();
    }
    let lost = format!("relay lost: the connection to host {host}, which runs the command, has ended");
    let is_exec = argv.get(1).is_some_and(|command| command == "exec");
    match is_exec {
        true => miette!(
            help = "a program of `exec --keep ID` runs on for a minute: `mirrorball exec VM --attach ID`",
            "{lost}"
        ),
        false => miette!("{lost}"),
    }
}

/// VMs on the other hosts of the cluster.
#[derive(Debug, Default)]
pub struct OtherHosts {
    /// VMs that run there.
    pub vms: Vec<Record>,
    /// Hosts that did not reply with a list of VMs.
    pub silent: Vec<String>,
}

/// Returns the VMs of the other hosts of the cluster, by `ps --json` there.
pub fn vms_of_other_hosts() -> Result<OtherHosts> {
    let Some(hosts) = hosts()? else {
        return Ok(OtherHosts::default());
    };
    let argv = [PROGRAM, "ps", "--json"].map(str::to_owned);
    let mut found = OtherHosts::default();
    let site = hosts.site();
    for host in site.hosts.iter().filter(|host| host.name != site.here) {
        let stream = host.cells.iter().find_map(|cell| hosts.command(*cell).ok());
        let output =
            stream.and_then(|stream| agent::client::output(stream, &command_request(&argv, false), &[]).ok());
        let vms = output.and_then(|(_, output, _)| serde_json::from_slice::<Vec<Record>>(&output).ok());
        match vms {
            Some(vms) => found.vms.extend(vms),
            None => found.silent.push(host.name.clone()),
        }
    }
    Ok(found)
}

/// Request to run this program, which must not forward to a third host; with this terminal if there is one.
pub(super) fn command_request(argv: &[String], terminal: bool) -> ExecRequest {
    let mut request = guest::request(argv, terminal);
    request.env.push((FORWARDED_VARIABLE.to_owned(), "1".to_owned()));
    // This host's key vouches for the user.
    request
        .env
        .push((OWNER_VARIABLE.to_owned(), geteuid().to_string()));
    let folder = std::env::current_dir().ok();
    request.cwd = folder.and_then(|folder| folder.into_os_string().into_string().ok());
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_relay_of_exec_names_the_host_and_the_way_back() {
        let argv = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let lost = || ClientError::Io(std::io::ErrorKind::UnexpectedEof.into());
        let exec = relay_failure(lost(), "beta", &argv(&["mirrorball", "exec", "web", "--", "sh"]));
        assert!(
            exec.to_string()
                .starts_with("relay lost: the connection to host beta")
        );
        assert!(
            exec.help()
                .is_some_and(|help| help.to_string().contains("--attach ID"))
        );
        let other = relay_failure(lost(), "beta", &argv(&["mirrorball", "stop", "web"]));
        assert!(other.to_string().starts_with("relay lost") && other.help().is_none());
        // A refusal is no loss.
        let refused = ClientError::Refused("only programs are run here".to_owned());
        let refused = relay_failure(refused, "beta", &argv(&["mirrorball", "exec"]));
        assert_eq!(refused.to_string(), "only programs are run here");
    }
}
