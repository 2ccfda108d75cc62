//! Facts of the host that the gateway of a subnet needs.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;

use registry::cluster::files::Files;
use registry::subnet::{HostFacts, RESOLV_CONF_BYTES_MAX};

use crate::cluster::addresses;

const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Reads the facts.
pub(super) struct Facts {
    cluster: Box<dyn Fn() -> HashSet<IpAddr> + Send + Sync>,
}

impl std::fmt::Debug for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Facts").finish_non_exhaustive()
    }
}

impl Facts {
    /// Returns a reader of the facts of this host and of this user's cluster.
    ///
    /// # Errors
    /// If this user has no runtime directory.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self {
            cluster: Box::new(addresses::listing(Files::open()?)),
        })
    }

    /// Reads the facts at this time.
    ///
    /// # Errors
    /// If the kernel does not list the addresses of the host.
    pub(super) fn read(&self) -> io::Result<HostFacts> {
        let mut resolv_conf = Vec::new();
        // A host without the file has no name servers.
        if let Ok(file) = File::open(RESOLV_CONF) {
            let _ = file
                .take(RESOLV_CONF_BYTES_MAX as u64)
                .read_to_end(&mut resolv_conf);
        }
        Ok(HostFacts {
            own: subnet::host::addresses()?.into_iter().collect(),
            cluster: (self.cluster)().into_iter().collect(),
            resolv_conf: String::from_utf8_lossy(&resolv_conf).into_owned(),
        })
    }
}
