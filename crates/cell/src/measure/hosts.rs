//! How far other hosts are: the time in which a TCP connection is made, one round trip between kernels. There is no message
//! between cells that only asks for an answer; one over TLS, with the two wake-ups at its end, takes about as long as that.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use config::cluster::Site;
use knowledge::Fact;
use knowledge::ways::TLS;

/// Connections to each host; the shortest counts, as what is longer waited for something else.
const TRIES: u32 = 3;
/// A host that is further is as good as not there.
const HOST_LIMIT: Duration = Duration::from_millis(200);
/// For all hosts.
const LIMIT: Duration = Duration::from_secs(1);

/// From this host, which the facts call `host`, to the others of its cluster. Those that do not answer are left out.
pub fn reach(site: &Site, host: &str) -> Vec<Fact> {
    let end = Instant::now() + LIMIT;
    let others = site.hosts.iter().filter(|other| other.name != site.here);
    let facts = others.filter_map(|other| {
        let address = other.address_of(*other.cells.first()?);
        let connect_ns = (0..TRIES)
            .map_while(|_| {
                connect_ns(
                    address,
                    HOST_LIMIT.min(end.saturating_duration_since(Instant::now())),
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

/// A host that refuses has answered, too.
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
