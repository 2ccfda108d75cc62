//! The latency to other hosts: the time in which a TCP connection is made, which is one round trip between
//! kernels.
//!
//! Cells have no message that only requests an answer. A message over TLS, with the two wake-ups at its end,
//! takes about as long as such a connection.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use config::cluster::Site;
use knowledge::Fact;
use knowledge::route_costs::TLS;

/// Connections to each host. The shortest counts, as longer ones waited for something else.
const TRIES: u32 = 3;
/// Time limit of one connection; a host beyond it counts as absent.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(200);
/// Time limit of all hosts together.
const LIMIT: Duration = Duration::from_secs(1);

/// The latencies from this host, whose name in facts is `host`, to the others of its cluster. Hosts that do
/// not answer are left out.
pub fn reach(site: &Site, host: &str) -> Vec<Fact> {
    let end = Instant::now() + LIMIT;
    let others = site.hosts.iter().filter(|other| other.name != site.here);
    let facts = others.filter_map(|other| {
        let address = other.address_of(*other.cells.first()?);
        let connect_ns = (0..TRIES)
            .map_while(|_| {
                connect_ns(
                    address,
                    CONNECT_TIMEOUT.min(end.saturating_duration_since(Instant::now())),
                )
            })
            .min()?;
        let names = [host.into(), other.name.as_str().into(), TLS.into()];
        let [from, to, transport] = names;
        Some(Fact::new(
            "host_latency_ns",
            [from, to, transport, connect_ns.into()],
        ))
    });
    facts.collect()
}

/// The time of one connection. A host that refuses it has answered, too.
fn connect_ns(address: SocketAddr, limit: Duration) -> Option<i64> {
    if limit.is_zero() {
        return None;
    }
    let start = Instant::now();
    match TcpStream::connect_timeout(&address, limit) {
        Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => None,
        _ => i64::try_from(start.elapsed().as_nanos()).ok(),
    }
}
