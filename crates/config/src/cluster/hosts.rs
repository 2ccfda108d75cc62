//! Hosts in a cluster file.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{CELLS_MAX, ClusterSpec};
use crate::error::ConfigError;
use crate::fault::{Fault, fault};
use crate::settings::members::is_plain;

/// Maximum bytes of a host's name, as of a DNS label.
const HOST_NAME_MAX: usize = 63;
/// Allowed silence of a cell.
const SILENCE_MS: std::ops::RangeInclusive<u64> = 50..=60_000;
/// Port of etcd's clients.
const ETCD_PORT: u16 = 2379;
/// Name of the files of etcd's own keys, in the folder of the hosts' keys.
pub const ETCD_KEYS: &str = "etcd";
/// Names that no host can have, because files of keys have them.
const TAKEN_NAMES: [&str; 2] = ["authority", ETCD_KEYS];

/// A host of several.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSpec {
    /// Its name: its host name, or the value of `--host`.
    pub name: String,
    /// Base address of its cells: the address, and the port of cell 0; cell N has the Nth port after it.
    pub address: SocketAddr,
    /// Memory shared with the other hosts that have this key: a file on this host, of a device that all of
    /// them can access (CXL, ivshmem).
    pub shared_memory: Option<PathBuf>,
    /// Directories of this host below which commands of other hosts may name files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remote_paths: Vec<PathBuf>,
}

/// Agreement of several hosts on the live cells.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MembershipSpec {
    /// Client URLs of an etcd whose certificate the cluster's authority has signed; when absent, the first
    /// host runs one for trials.
    #[serde(default)]
    pub etcd: Vec<String>,
    /// Folder of the hosts' keys, relative to the file's folder.
    #[serde(default = "default_keys")]
    pub keys: PathBuf,
    /// Silence in milliseconds after which a cell of another host counts as dead.
    #[serde(default = "default_silence")]
    pub silence_ms: u64,
    /// Transport between the shards of a VM that spans hosts.
    #[serde(default)]
    pub spans: SpanTransport,
    /// Treatment of a host's VMs when its cells have lost their membership.
    #[serde(default)]
    pub on_lost: OnLost,
}

/// Treatment of a host's VMs when its cells have lost their membership.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLost {
    /// The VMs continue to run. Their names stay taken until a person frees them.
    #[default]
    Keep,
    /// The VMs end, and their names are free afterwards.
    Stop,
}

/// Transport between the shards of a VM on different hosts. Their monitors' messages are always encrypted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpanTransport {
    /// TLS, as between cells.
    #[default]
    Tls,
    /// Plain TCP: for a network that only the cluster's hosts can reach.
    Plain,
}

impl Default for MembershipSpec {
    fn default() -> Self {
        Self {
            etcd: Vec::new(),
            keys: default_keys(),
            silence_ms: default_silence(),
            spans: SpanTransport::default(),
            on_lost: OnLost::default(),
        }
    }
}

fn default_keys() -> PathBuf {
    PathBuf::from("keys")
}

fn default_silence() -> u64 {
    200
}

/// A host's view of a cluster of several hosts.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Site {
    /// Name of this host.
    pub here: String,
    /// All hosts of the cluster, this one included.
    pub hosts: Vec<HostPlan>,
    /// Client URLs of the cluster's etcd.
    pub etcd: Vec<String>,
    /// Whether this host runs it.
    pub runs_etcd: bool,
    /// The folder of keys.
    pub keys: PathBuf,
    /// Silence in milliseconds after which a cell of another host counts as dead.
    pub silence_ms: u64,
    /// Transport between the shards of a VM that spans hosts.
    #[serde(default)]
    pub spans: SpanTransport,
    /// Treatment of this host's VMs when its cells have lost their membership.
    #[serde(default)]
    pub on_lost: OnLost,
    /// Cluster file from which this host started; none if an older version of this program started it.
    #[serde(default)]
    pub file: Option<PathBuf>,
}

/// A host and its cells.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct HostPlan {
    /// Name in the cluster's file and in the host's keys.
    pub name: String,
    /// Address of cell 0.
    pub address: SocketAddr,
    /// Path of the memory that it shares with other hosts, if any.
    #[serde(default)]
    pub shared_memory: Option<PathBuf>,
    /// Directories of this host below which commands of other hosts may name files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remote_paths: Vec<PathBuf>,
    /// Numbers of the host's cells.
    pub cells: Vec<u16>,
}

/// Client URL of etcd.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct EtcdUrl<'a> {
    has_tls: bool,
    /// Address or name.
    host: &'a str,
}

impl<'a> EtcdUrl<'a> {
    fn parse(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let has_tls = match scheme {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let (host, port) = rest.strip_suffix('/').unwrap_or(rest).rsplit_once(':')?;
        port.parse::<u16>().ok().filter(|port| *port != 0)?;
        let host = match host.strip_prefix('[') {
            Some(address) => {
                let address = address.strip_suffix(']')?;
                address.parse::<Ipv6Addr>().ok()?;
                address
            }
            None => host,
        };
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':');
        (!host.is_empty() && host.chars().all(allowed)).then_some(Self { has_tls, host })
    }

    /// Whether the URL can reach only processes of this host.
    fn is_local(&self) -> bool {
        self.host == "localhost"
            || self
                .host
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback())
    }
}

impl Site {
    /// The host of a cell.
    pub fn host_of(&self, cell: u16) -> Option<&HostPlan> {
        self.hosts.iter().find(|host| host.cells.contains(&cell))
    }

    /// Whether a cell is on another host.
    pub fn is_elsewhere(&self, cell: u16) -> bool {
        self.host_of(cell).is_some_and(|host| host.name != self.here)
    }

    /// Returns pairs of cells of different hosts that share memory, the lower number first: the same on all
    /// hosts.
    pub fn sharing_pairs(&self) -> Vec<[u16; 2]> {
        let sharing: Vec<&HostPlan> = self
            .hosts
            .iter()
            .filter(|host| host.shared_memory.is_some())
            .collect();
        let mut pairs = Vec::new();
        for (index, host) in sharing.iter().enumerate() {
            let later = || sharing[index + 1..].iter().flat_map(|host| &host.cells);
            let of_cell = |cell: &u16| {
                later()
                    .map(|other| [*cell.min(other), *cell.max(other)])
                    .collect::<Vec<_>>()
            };
            pairs.extend(host.cells.iter().flat_map(of_cell));
        }
        pairs
    }

    /// Directories of this host below which commands of other hosts may name files.
    pub fn remote_paths(&self) -> &[PathBuf] {
        let own = self.hosts.iter().find(|host| host.name == self.here);
        own.map_or(&[], |host| &host.remote_paths)
    }

    /// Yields the cells of other hosts.
    pub fn elsewhere(&self) -> impl Iterator<Item = u16> + '_ {
        let others = self.hosts.iter().filter(|host| host.name != self.here);
        others.flat_map(|host| host.cells.iter().copied())
    }
}

impl HostPlan {
    /// Returns the address of a cell of this host.
    pub fn address_of(&self, cell: u16) -> SocketAddr {
        // Checked when the file was read.
        SocketAddr::new(self.address.ip(), self.address.port().saturating_add(cell))
    }
}

impl ClusterSpec {
    /// Returns the folder of the hosts' keys; none for a single host. `folder` is the file's.
    pub fn keys(&self, folder: &Path) -> Option<PathBuf> {
        let keys = self.membership.clone().unwrap_or_default().keys;
        (!self.hosts.is_empty()).then(|| folder.join(keys))
    }

    /// Returns the names in etcd's certificate; none for a single host, or if etcd is reached without TLS.
    pub fn etcd_names(&self) -> Vec<String> {
        let Some(first) = self.hosts.first() else {
            return Vec::new();
        };
        let given = self.membership.clone().unwrap_or_default().etcd;
        if given.is_empty() {
            return vec![first.address.ip().to_string()];
        }
        let with_tls = given.iter().filter_map(|url| EtcdUrl::parse(url));
        let mut names: Vec<String> = with_tls
            .filter(|url| url.has_tls)
            .map(|url| url.host.to_owned())
            .collect();
        names.dedup();
        names
    }

    /// Returns the view of the host `here`; none for a single host. `folder` is the file's.
    pub fn site(&self, here: &str, folder: &Path) -> Result<Option<Site>, ConfigError> {
        let Some(first) = self.hosts.first() else {
            return Ok(None);
        };
        if !self.hosts.iter().any(|host| host.name == here) {
            let known: Vec<&str> = self.hosts.iter().map(|host| &host.name[..]).collect();
            return Err(ConfigError::from_flags(&fault(
                &["host"],
                format!("the cluster has no host {here:?}"),
                format!("it has {}; name the one that this is", known.join(", ")),
            )));
        }
        let membership = self.membership.clone().unwrap_or_default();
        let own_etcd = format!("https://{}", SocketAddr::new(first.address.ip(), ETCD_PORT));
        let runs_etcd = membership.etcd.is_empty();
        let hosts = self.hosts.iter().map(|host| HostPlan {
            name: host.name.clone(),
            address: host.address,
            shared_memory: host.shared_memory.clone(),
            remote_paths: host.remote_paths.clone(),
            cells: (0..)
                .zip(&self.cells)
                .filter(|(_, cell)| !cell.left && cell.host.as_ref() == Some(&host.name))
                .map(|(number, _)| number)
                .collect(),
        });
        Ok(Some(Site {
            here: here.to_owned(),
            hosts: hosts.collect(),
            etcd: if runs_etcd {
                vec![own_etcd]
            } else {
                membership.etcd
            },
            runs_etcd: runs_etcd && here == first.name,
            keys: folder.join(membership.keys),
            silence_ms: membership.silence_ms,
            spans: membership.spans,
            on_lost: membership.on_lost,
            file: None,
        }))
    }

    /// Checks that each cell is on an existing host, each host has a cell, and all are within their bounds.
    pub(super) fn check_hosts(&self) -> Result<(), Fault> {
        if self.hosts.is_empty() && self.membership.is_some() {
            return Err(fault(
                &["membership"],
                "membership of one host",
                "name the hosts, each a [[hosts]] table, or leave it out",
            ));
        }
        for index in 0..self.hosts.len() {
            self.check_host(index)?;
        }
        self.check_cells()?;
        self.check_membership()
    }

    /// Checks a host: its name and address, the memory that it shares, and that it has a cell.
    fn check_host(&self, index: usize) -> Result<(), Fault> {
        let (at, host) = (index.to_string(), &self.hosts[index]);
        check_host_name(&at, &host.name)?;
        let others = &self.hosts[..index];
        if let Some(first) = others.iter().position(|other| other.name == host.name) {
            return Err(fault(
                &["hosts", &at, "name"],
                format!("host {first} has this name already"),
                "give each host its own name",
            ));
        }
        if let Some(first) = others
            .iter()
            .position(|other| other.address.ip() == host.address.ip())
        {
            return Err(fault(
                &["hosts", &at, "address"],
                format!("host {first} has this address already"),
                "give each host its own address",
            ));
        }
        if host.address.port() == 0 || usize::from(host.address.port()) + CELLS_MAX > usize::from(u16::MAX) {
            return Err(fault(
                &["hosts", &at, "address"],
                "no ports for its cells",
                "choose a port from 1 to 65400: cell N has the Nth after it",
            ));
        }
        self.check_shared_memory(&at, host)?;
        if let Some(index) = host.remote_paths.iter().position(|path| !is_plain(path)) {
            return Err(fault(
                &["hosts", &at, "remote_paths", &index.to_string()],
                format!(
                    "{:?} is not an absolute path without `..`",
                    host.remote_paths[index]
                ),
                "write the directory as \"/srv/vms\"",
            ));
        }
        if !self
            .cells
            .iter()
            .any(|cell| !cell.left && cell.host.as_ref() == Some(&host.name))
        {
            return Err(fault(
                &["hosts", &at],
                format!("host {} has no cell", host.name),
                "add a [[cells]] table that names it",
            ));
        }
        Ok(())
    }

    /// Checks that memory which a host shares has a path, and is another host's too.
    fn check_shared_memory(&self, at: &str, host: &HostSpec) -> Result<(), Fault> {
        if let Some(path) = &host.shared_memory {
            let others = self.hosts.iter().filter(|other| other.name != host.name);
            let (what, help) = if !path.is_absolute() {
                ("not a whole path", "write it from / on, as \"/dev/dax0.0\"")
            } else if others.clone().all(|other| other.shared_memory.is_none()) {
                (
                    "no other host shares it",
                    "give another host the same memory, or leave this out",
                )
            } else {
                ("", "")
            };
            if !what.is_empty() {
                return Err(fault(&["hosts", at, "shared_memory"], what, help));
            }
        }
        Ok(())
    }

    /// Checks that each cell has a host, if there are any.
    fn check_cells(&self) -> Result<(), Fault> {
        for (index, cell) in self.cells.iter().enumerate().filter(|(_, cell)| !cell.left) {
            let at = index.to_string();
            let known: Vec<&str> = self.hosts.iter().map(|host| &host.name[..]).collect();
            match &cell.host {
                None if self.hosts.is_empty() => {}
                None => {
                    return Err(fault(
                        &["cells", &at],
                        "a cell of no host",
                        format!("name its host, one of {}", known.join(", ")),
                    ));
                }
                Some(host) if known.contains(&&host[..]) => {}
                Some(host) => {
                    return Err(fault(
                        &["cells", &at, "host"],
                        format!("there is no host {host:?}"),
                        "each host is a [[hosts]] table with a name and an address",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks etcd's URLs, and the time after which a silent cell is dead.
    fn check_membership(&self) -> Result<(), Fault> {
        let membership = self.membership.iter();
        for url in membership.clone().flat_map(|membership| &membership.etcd) {
            let Some(parsed) = EtcdUrl::parse(url) else {
                return Err(fault(
                    &["membership", "etcd"],
                    format!("{url:?} is no URL of an etcd that can be asked"),
                    "write https://ADDRESS:PORT",
                ));
            };
            if !parsed.has_tls && !parsed.is_local() {
                return Err(fault(
                    &["membership", "etcd"],
                    format!("{url:?} has no TLS: any host of the network could end all cells"),
                    "write https://ADDRESS:PORT, and give that etcd the keys etcd.pem and etcd.key",
                ));
            }
        }
        if membership
            .clone()
            .any(|membership| !SILENCE_MS.contains(&membership.silence_ms))
        {
            return Err(fault(
                &["membership", "silence_ms"],
                "too short or too long",
                format!("{} to {}", SILENCE_MS.start(), SILENCE_MS.end()),
            ));
        }
        Ok(())
    }
}

/// Checks the name of a host, which its key files have too.
fn check_host_name(at: &str, name: &str) -> Result<(), Fault> {
    let is_named = name.len() <= HOST_NAME_MAX
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if !is_named {
        return Err(fault(
            &["hosts", at, "name"],
            format!("{:?} is no name of a host", name),
            format!("letters, digits and `-`, {HOST_NAME_MAX} at most"),
        ));
    }
    if TAKEN_NAMES.contains(&name) {
        return Err(fault(
            &["hosts", at, "name"],
            format!("the files of a host's keys can't be called {:?}", name),
            "choose another name; start the host with `cluster up FILE --host NAME`",
        ));
    }
    Ok(())
}
