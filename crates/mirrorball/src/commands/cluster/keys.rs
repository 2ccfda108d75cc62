//! Keys of a cluster: creates, shows and revokes them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cell::cluster::hosts::{Hosts, warning};
use cell::cluster::membership;
use config::cluster::{ClusterSpec, ETCD_KEYS, HostPlan};
use miette::{IntoDiagnostic, Result, miette};
use urpc::tls::{Identity, KeyFiles, Subject, TlsError, fingerprint};

use super::change::{Change, push, reach, write_file};
use super::plan::{folder, read};

/// Creates missing keys, or new ones for all hosts and etcd.
pub(super) fn keys(file: &Path, renew: bool) -> Result<ExitCode> {
    let (spec, keys) = spec_and_keys(file)?;
    let etcd = Subject {
        file: ETCD_KEYS.to_owned(),
        names: spec.etcd_names(),
    };
    let hosts = spec.hosts.iter().map(|host| Subject::from(&host.name[..]));
    let subjects: Vec<Subject> = hosts.chain((!etcd.names.is_empty()).then_some(etcd)).collect();
    let made = match renew {
        true => urpc::tls::renew(&keys, subjects.iter().cloned()),
        false => urpc::tls::make(&keys, subjects.iter().cloned()),
    };
    made.map_err(|error| miette!("{error}"))?;
    // Other hosts' own keys may have been moved to them.
    for subject in &subjects {
        match Identity::load(&keys, &subject.file) {
            Ok(identity) => warning(&subject.file, identity.end())
                .iter()
                .for_each(|warning| eprintln!("{warning}")),
            Err(error @ TlsError::Ended { .. }) => eprintln!("{error}"),
            Err(_) => {}
        }
    }
    print_fingerprints(&keys, subjects.iter().map(|subject| &subject.file[..]));
    println!("{}", keys.display());
    Ok(ExitCode::SUCCESS)
}

/// Reads a cluster file of several hosts, and returns the folder of their keys.
fn spec_and_keys(file: &Path) -> Result<(ClusterSpec, PathBuf)> {
    let (spec, name, _) = read(file)?;
    let keys = spec.keys(&folder(file)?).ok_or_else(|| {
        miette!(
            help = "only a cluster of several, each a [[hosts]] table, needs keys",
            "{name} names no hosts"
        )
    })?;
    Ok((spec, keys))
}

/// Prints the fingerprints of the authority's certificate and of those of `names`, as far as they are in the
/// folder of keys.
pub(super) fn print_fingerprints<'a>(keys: &Path, names: impl IntoIterator<Item = &'a str>) {
    for name in ["authority"].into_iter().chain(names) {
        let certificate = KeyFiles::of(keys, name).certificate;
        // Other hosts' certificates may have been moved to them.
        if certificate.exists() {
            match fingerprint(&certificate) {
                Ok(fingerprint) => println!("{name} SHA-256 {fingerprint}"),
                Err(error) => eprintln!("{error}"),
            }
        }
    }
}

/// Revokes a host's keys, removes the host from the cluster's file, and sends the change to all reachable
/// hosts.
pub(super) fn remove(file: &Path, host: &str) -> Result<ExitCode> {
    let (spec, keys) = spec_and_keys(file)?;
    if host == ETCD_KEYS {
        return Err(miette!(
            help = "move the folder of keys away, and make a new authority and keys with `mirrorball cluster \
                    keys`",
            "the key of etcd is not revoked: etcd is a client of itself by it"
        ));
    }
    // Its own key is about to be deleted here.
    let reached = reach(&spec, file, Some(host))?;
    let list = urpc::tls::revoke(&keys, host).map_err(|error| miette!("{error}"))?;
    let (text, why_not) = match spec.without_host(host) {
        Ok((text, _)) => (Some(text), None),
        Err(error) => (None, Some(error)),
    };
    let change = Change {
        file: text.clone(),
        revoked: Some(std::fs::read_to_string(&list).into_diagnostic()?),
    };
    let others: Vec<HostPlan> = reached
        .iter()
        .flat_map(|hosts| hosts.site().hosts.clone())
        .collect();
    let others: Vec<HostPlan> = others.into_iter().filter(|other| other.name != host).collect();
    // From here on the host's cells can't declare others dead when these close their links.
    if let Some(site) = reached.as_ref().map(Hosts::site)
        && let Some(removed) = site.hosts.iter().find(|removed| removed.name == host)
        && let Err(error) = membership::retire(&site, &removed.cells)
    {
        eprintln!("the entries of {host} in etcd end with their leases: {error}");
    }
    let failed = match &reached {
        Some(hosts) => push(hosts, &others, &change)?,
        None => Vec::new(),
    };
    if let Some(text) = &text {
        write_file(file, text)?;
    }
    println!("{}", list.display());
    if let Some(error) = why_not.filter(|_| spec.hosts.iter().any(|named| named.name == host)) {
        eprintln!("{host} is in {} still: {error}", file.display());
    }
    if reached.is_none() {
        eprintln!(
            "there is no key of another host here: give this file to each other host, into its folder of keys"
        );
    }
    for (name, why) in &failed {
        eprintln!("give this file to {name}, into its folder of keys: {why}");
    }
    Ok(ExitCode::SUCCESS)
}
