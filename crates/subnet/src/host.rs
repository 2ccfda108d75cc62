//! The addresses of this host.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv6Addr};

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::SockaddrStorage;

/// Returns the addresses of all interfaces in this thread's network namespace, their broadcast addresses, and
/// the gateways of the IPv6 default routes, which passt may take for the loopback.
///
/// # Errors
/// Fails if the kernel does not list them.
pub fn addresses() -> io::Result<HashSet<IpAddr>> {
    let mut addresses = HashSet::new();
    for interface in getifaddrs()? {
        let both = [interface.address, interface.broadcast];
        addresses.extend(both.into_iter().flatten().filter_map(ip));
    }
    addresses.extend(ipv6_gateways());
    Ok(addresses)
}

/// Returns the gateways of this host's IPv6 default routes.
pub fn ipv6_gateways() -> Vec<IpAddr> {
    // A kernel without IPv6 has no such table.
    let routes = std::fs::read_to_string("/proc/thread-self/net/ipv6_route").unwrap_or_default();
    gateways(&routes).collect()
}

fn ip(address: SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| address.ip().into());
    v4.or_else(|| Some(address.as_sockaddr_in6()?.ip().into()))
}

/// Returns the next hops of default routes. A line has destination, prefix, source, prefix, next hop, and
/// more.
fn gateways(routes: &str) -> impl Iterator<Item = IpAddr> + '_ {
    routes.lines().filter_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let is_default = fields.get(1) == Some(&"00");
        let hop = u128::from_str_radix(fields.get(4)?, 16).ok()?;
        (is_default && hop != 0).then(|| Ipv6Addr::from(hop).into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_among_the_hosts_addresses() {
        let loopback: IpAddr = [127, 0, 0, 1].into();
        assert!(addresses().unwrap().contains(&loopback));
    }

    #[test]
    fn gateways_are_the_next_hops_of_default_routes() {
        let none = "0".repeat(32);
        let table = format!(
            "fd000000000000000000000000000000 40 {none} 00 {none} 00000100 00000001 00000000 00000001 eth0\n\
             {none} 00 {none} 00 fd000000000000000000000000000001 00000400 00000001 00000000 00000003 eth0\n\
             {none} 00 {none} 00 {none} ffffffff 00000001 00000000 00200200 lo\nnonsense\n"
        );
        let expected: IpAddr = "fd00::1".parse().unwrap();
        assert_eq!(gateways(&table).collect::<Vec<_>>(), [expected]);
    }
}
