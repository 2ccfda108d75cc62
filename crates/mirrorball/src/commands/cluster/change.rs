//! Changes of a running cluster: its hosts, and its list of revoked certificates. One host sends the change
//! to the others, each of which applies it to its cells; no cell's process ends.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cell::cluster::commands::OWNER_VARIABLE;
use cell::cluster::hosts::{Hosts, PROGRAM};
use cell::cluster::membership::{self, Members};
use config::cluster::{ClusterSpec, HostPlan, Site};
use miette::{IntoDiagnostic, Result, miette};
use registry::cluster::files::{CellFiles, Files};
use registry::cluster::interface::CellRequest;
use serde::{Deserialize, Serialize};
use urpc::tls::{KeyFiles, replace_revocation_list};

use super::super::hosts::command_request;
use super::cells::repeat_until_done;
use super::plan::folder;

/// Time limit for a cell to apply a change: its process may just be starting.
const TAKE_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for another host to apply a change.
const PUSH_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a reply of etcd.
const ETCD_LIMIT: Duration = Duration::from_secs(5);
/// Interval between two attempts to reach a cell.
const INTERVAL: Duration = Duration::from_millis(50);
/// Maximum bytes of a change.
const CHANGE_BYTES_MAX: u64 = 4 << 20;
/// Permission bits of a new cluster file.
const FILE_MODE: u32 = 0o644;

/// A change of the cluster.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Change {
    /// Text of the cluster file.
    pub file: Option<String>,
    /// List of revoked certificates, as PEM.
    pub revoked: Option<String>,
}

/// Applies a change that another host sends over standard input.
pub(super) fn take_from_input() -> Result<ExitCode> {
    let mut text = Vec::new();
    std::io::stdin()
        .take(CHANGE_BYTES_MAX)
        .read_to_end(&mut text)
        .into_diagnostic()?;
    take(&serde_json::from_slice(&text).into_diagnostic()?)?;
    Ok(ExitCode::SUCCESS)
}

/// Applies a change to the cells of this host.
fn take(change: &Change) -> Result<()> {
    let files = Files::open().into_diagnostic()?;
    let site = files
        .site()
        .into_diagnostic()?
        .ok_or_else(super::cells::one_host)?;
    if let Some(list) = &change.revoked {
        replace_revocation_list(&site.keys, &site.here, list).map_err(|error| miette!("{error}"))?;
    }
    let Some(text) = &change.file else { return Ok(()) };
    let name = site.file.as_ref().map_or_else(
        || "the new cluster file".to_owned(),
        |file| file.display().to_string(),
    );
    let spec = ClusterSpec::parse(&name, text)?;
    let next = next_site(&site, &spec)?;
    if let Some(file) = &site.file {
        write_file(file, text)?;
    }
    files.set_site(&next).into_diagnostic()?;
    for cell in files.plan().into_diagnostic()? {
        take_hosts(&files.cell(cell.number)).map_err(|error| {
            miette!(
                help = "see `mirrorball cluster status` on that host",
                "cell {} does not go on with the new hosts: {error}",
                cell.number
            )
        })?;
    }
    Ok(())
}

/// Returns the hosts of `spec` for a host whose cells run with `site`.
fn next_site(site: &Site, spec: &ClusterSpec) -> Result<Site> {
    let next = spec
        .site(&site.here, Path::new("/"))?
        .ok_or_else(super::cells::one_host)?;
    let next = Site {
        keys: site.keys.clone(),
        file: site.file.clone(),
        ..next
    };
    site.may_become(&next).map_err(|why| {
        miette!(
            help = "only hosts come and go while a cluster runs; all else changes by `mirrorball cluster \
                    down` and `up` on all hosts",
            "host {} does not take the cluster file: {why}",
            site.here
        )
    })?;
    Ok(next)
}

/// Switches a cell to the hosts in its files. A stopped cell reads them when it starts.
fn take_hosts(cell: &CellFiles) -> std::io::Result<()> {
    repeat_until_done(cell, &CellRequest::TakeHosts, TAKE_LIMIT, INTERVAL, |cell| {
        !cell.runs()
    })
}

/// Replaces a cluster file atomically. Its permissions stay.
pub(super) fn write_file(file: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    if std::fs::read_to_string(file).is_ok_and(|there| there == text) {
        return Ok(());
    }
    let mode = std::fs::metadata(file).map_or(FILE_MODE, |about| about.permissions().mode() & 0o777);
    hostfiles::replace_file(file, mode, text.as_bytes()).map_err(|error| {
        miette!(
            help = "see whether this user may write there, and whether the disk is full",
            "cluster file {}: {error}",
            file.display()
        )
    })
}

/// Returns the hosts of a cluster file, by the key of one of them in the folder of keys: this host's if it is
/// there.
pub(super) fn reach(spec: &ClusterSpec, file: &Path, but: Option<&str>) -> Result<Option<Hosts>> {
    let folder = folder(file)?;
    let own = nix::unistd::gethostname().into_diagnostic()?;
    let own = own.to_string_lossy();
    let keys = spec.keys(&folder).ok_or_else(super::cells::one_host)?;
    let has_key = |name: &&str| KeyFiles::of(&keys, name).key.exists() && Some(*name) != but;
    let names = spec.hosts.iter().map(|host| &host.name[..]);
    let mut usable: Vec<&str> = names.filter(has_key).collect();
    usable.sort_by_key(|name| *name != own);
    let Some(here) = usable.first() else {
        return Ok(None);
    };
    let Some(site) = spec.site(here, &folder)? else {
        return Ok(None);
    };
    Hosts::open(site).map(Some).map_err(|error| miette!("{error}"))
}

/// Sends the change to these hosts. Returns the names of those that failed, with the reasons.
pub(super) fn push(hosts: &Hosts, to: &[HostPlan], change: &Change) -> Result<Vec<(String, String)>> {
    let input = serde_json::to_vec(change).into_diagnostic()?;
    let (send, receive) = mpsc::channel();
    let mut waiting: BTreeSet<String> = to.iter().map(|host| host.name.clone()).collect();
    let deadline = Instant::now() + PUSH_LIMIT;
    for host in to.iter().cloned() {
        let (hosts, input, send) = (hosts.clone(), input.clone(), send.clone());
        std::thread::Builder::new()
            .name(format!("to {}", host.name))
            .spawn(move || {
                let taken = push_to(&hosts, &host, &input);
                // After the deadline the receiver is gone.
                let _ = send.send((host.name, taken));
            })
            .into_diagnostic()?;
    }
    let mut failed = Vec::new();
    while !waiting.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((name, taken)) = receive.recv_timeout(left) else {
            break;
        };
        waiting.remove(&name);
        failed.extend(taken.err().map(|why| (name, why)));
    }
    let late = format!("it does not answer within {} s", PUSH_LIMIT.as_secs());
    failed.extend(waiting.into_iter().map(|name| (name, late.clone())));
    Ok(failed)
}

fn push_to(hosts: &Hosts, host: &HostPlan, input: &[u8]) -> Result<(), String> {
    let argv = [PROGRAM, "cluster", "take"].map(str::to_owned);
    let mut request = command_request(&argv, false);
    // The cells there take the cluster's file by their own user's rights, who may be another than this one.
    request.env.retain(|(name, _)| name != OWNER_VARIABLE);
    let mut last = "it has no cell".to_owned();
    for cell in &host.cells {
        let stream = match hosts.command(*cell) {
            Ok(stream) => stream,
            Err(error) => {
                last = error.to_string();
                continue;
            }
        };
        return match agent::client::output(stream, &request, input) {
            Ok((status, ..)) if status.code() == 0 => Ok(()),
            Ok((_, _, said)) => Err(first_line(&String::from_utf8_lossy(&said))),
            Err(error) => Err(error.to_string()),
        };
    }
    Err(last)
}

/// Returns the first line of an error that another host has printed.
fn first_line(said: &str) -> String {
    let line = said.lines().map(str::trim).find(|line| !line.is_empty());
    let line = line.map(|line| line.strip_prefix("mirrorball: ").unwrap_or(line));
    line.unwrap_or("it says nothing").to_owned()
}

/// Returns the cells that are members of the cluster now, with their incarnation numbers.
///
/// # Errors
/// If etcd does not reply within 5 s: the cluster's own etcd restarts when a host is removed.
pub(super) fn live_cells(site: &Site) -> Result<Members> {
    let deadline = Instant::now() + ETCD_LIMIT;
    loop {
        match membership::members(site) {
            Ok(members) => return Ok(members),
            Err(_) if Instant::now() < deadline => std::thread::sleep(INTERVAL),
            Err(error) => {
                return Err(miette!(
                    help = "try again when etcd answers",
                    "it is not known which cells live: {error}"
                ));
            }
        }
    }
}

/// Returns the hosts with a cell that is a member of the cluster now.
///
/// # Errors
/// As [`live_cells`].
pub(super) fn members(site: &Site) -> Result<Vec<HostPlan>> {
    let members = live_cells(site)?;
    let is_up = |host: &&HostPlan| host.cells.iter().any(|cell| members.contains_key(cell));
    Ok(site.hosts.iter().filter(is_up).cloned().collect())
}

/// Returns the file from which this host started.
pub(super) fn own_file(site: &Site) -> Result<PathBuf> {
    site.file.clone().ok_or_else(|| {
        miette!(
            help = "take the cells down with --leave, and up again by the file",
            "an older version of this program has brought the cells up, without the path of the cluster's \
             file"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_of_another_host_is_the_first_line_of_its_error() {
        let said = "mirrorball: cell 1 is another host's in it; only hosts come and go\n\n";
        assert_eq!(
            first_line(said),
            "cell 1 is another host's in it; only hosts come and go"
        );
        assert_eq!(first_line("\n"), "it says nothing");
    }
}
