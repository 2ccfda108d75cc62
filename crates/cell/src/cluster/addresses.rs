//! The addresses that a cluster's file names: its hosts' and its etcd's. Guests of user-mode cards do not
//! reach them.

use std::collections::HashSet;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Mutex;

use config::cluster::Site;
use locks::IgnorePoison;
use registry::cluster::files::Files;

/// Addresses and host names in a cluster's file.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Named {
    /// Addresses as they are.
    pub addresses: HashSet<IpAddr>,
    /// Names of hosts, in URLs of an etcd.
    pub names: Vec<String>,
}

impl Named {
    /// Collects the addresses and names in `site`.
    pub fn of(site: &Site) -> Self {
        let mut named = Self {
            addresses: site.hosts.iter().map(|host| host.address.ip()).collect(),
            names: Vec::new(),
        };
        for host in site.etcd.iter().filter_map(|url| host_of(url)) {
            match host.parse() {
                Ok(address) => drop(named.addresses.insert(address)),
                Err(_) => named.names.push(host.to_owned()),
            }
        }
        named
    }

    /// All addresses, those of the names included. A name that the resolver does not know has none.
    fn resolve(self) -> HashSet<IpAddr> {
        let mut addresses = self.addresses;
        for name in self.names {
            let found = (name.as_str(), 0).to_socket_addrs();
            addresses.extend(found.into_iter().flatten().map(|address| address.ip()));
        }
        addresses
    }
}

/// The host in a URL, without brackets and port.
fn host_of(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    match place.strip_prefix('[') {
        Some(address) => address.split_once(']').map(|(address, _)| address),
        None => place.split(':').next(),
    }
}

/// Lists the addresses of the cluster that this host is in at the time of the call; none without a cluster.
pub fn listing(files: Files) -> impl Fn() -> HashSet<IpAddr> + Send + Sync {
    let known = Mutex::new((None, HashSet::new()));
    move || {
        let mut known = known.lock().ignore_poison();
        // A file that is being written leaves the addresses as they were. Names are looked up only when the
        // file has changed.
        if let Ok(site) = files.site()
            && site != known.0
        {
            let named = site.as_ref().map(Named::of).unwrap_or_default();
            *known = (site, named.resolve());
        }
        known.1.clone()
    }
}

#[cfg(test)]
mod tests {
    use config::cluster::ClusterSpec;

    use super::*;

    const HOSTS: &str = "[[hosts]]\nname = \"a\"\naddress = \"198.51.100.1:7000\"\n\
                         [[hosts]]\nname = \"b\"\naddress = \"[2001:db8::2]:7000\"\n\
                         [[cells]]\nhost = \"a\"\n[[cells]]\nhost = \"b\"\n";

    fn site(more: &str) -> Site {
        let spec = ClusterSpec::parse("test", &format!("{HOSTS}{more}")).unwrap();
        let folder = std::path::Path::new("/keys");
        spec.site("a", folder).unwrap().unwrap()
    }

    fn set<const N: usize>(addresses: [&str; N]) -> HashSet<IpAddr> {
        addresses
            .into_iter()
            .map(|address| address.parse().unwrap())
            .collect()
    }

    #[test]
    fn a_cluster_names_its_hosts_and_its_etcd() {
        let own = Named::of(&site(""));
        assert_eq!(own.addresses, set(["198.51.100.1", "2001:db8::2"]));
        assert!(own.names.is_empty());
        let mut elsewhere = site("");
        elsewhere.etcd = [
            "https://203.0.113.9:2379",
            "https://[2001:db8::9]:2379/v3",
            "https://user@etcd.example:2379",
        ]
        .map(String::from)
        .into();
        let named = Named::of(&elsewhere);
        let expected = set(["198.51.100.1", "2001:db8::2", "203.0.113.9", "2001:db8::9"]);
        assert_eq!(named.addresses, expected);
        assert_eq!(named.names, ["etcd.example"]);
    }

    #[test]
    fn a_listing_follows_the_clusters_file() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::at(directory.path());
        let list = listing(files.clone());
        assert!(list().is_empty());
        std::fs::create_dir_all(directory.path().join("cells")).unwrap();
        files.create(&[], Some(&site(""))).unwrap();
        assert_eq!(list(), set(["198.51.100.1", "2001:db8::2"]));
        // Half a file is not taken for the end of the cluster.
        std::fs::write(directory.path().join("cells/site.json"), "{").unwrap();
        assert_eq!(list().len(), 2);
        files.remove().unwrap();
        assert!(list().is_empty());
    }
}
