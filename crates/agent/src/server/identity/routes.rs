//! IPv4 routes of a network interface, in the format of `/proc/net/route`.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

use crate::protocol::Ipv4Settings;

/// Routes of the network namespace of this thread.
const ROUTES: &str = "/proc/thread-self/net/route";
/// Greatest number of routes that are restored.
const ROUTES_MAX: usize = 256;

/// A route through an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    pub destination: Ipv4Addr,
    pub mask: Ipv4Addr,
    /// Next router; none if the destination is on the link.
    pub gateway: Option<Ipv4Addr>,
    pub metric: u32,
}

impl Route {
    /// Returns the route for an interface with these settings; none if the kernel makes it with the address.
    /// A router outside the network's range is one of the network before: the gateway takes its place.
    pub fn moved(&self, settings: &Ipv4Settings) -> Option<Self> {
        let mask = mask(settings.prefix_bits);
        let is_inside = |address: Ipv4Addr| {
            u32::from(address) & u32::from(mask) == u32::from(settings.address) & u32::from(mask)
        };
        let gateway = self.gateway?;
        Some(Self {
            gateway: Some(if is_inside(gateway) {
                gateway
            } else {
                settings.gateway
            }),
            ..*self
        })
    }
}

/// Returns the mask of a prefix of at most 32 bits.
pub fn mask(prefix_bits: u8) -> Ipv4Addr {
    u32::MAX
        .checked_shl(32 - u32::from(prefix_bits.min(32)))
        .unwrap_or(0)
        .into()
}

/// Lists the routes of an interface, at most [`ROUTES_MAX`].
pub fn of_interface(name: &str) -> io::Result<Vec<Route>> {
    Ok(parse(&fs::read_to_string(ROUTES)?, name))
}

/// Parses the routes of an interface that are up and lead anywhere.
fn parse(text: &str, interface: &str) -> Vec<Route> {
    let lines = text.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        (fields.next()? == interface).then_some(())?;
        let mut address = || {
            let number = u32::from_str_radix(fields.next()?, 16).ok()?;
            // The kernel prints the bytes of the address as a number of this machine.
            Some(Ipv4Addr::from(number.to_ne_bytes()))
        };
        let (destination, gateway) = (address()?, address()?);
        let flags = u32::from_str_radix(fields.next()?, 16).ok()?;
        let metric = fields.nth(2)?.parse().ok()?;
        let mask = u32::from_str_radix(fields.next()?, 16).ok()?;
        let has = |flag: libc::c_ushort| flags & u32::from(flag) != 0;
        (has(libc::RTF_UP) && !has(libc::RTF_REJECT)).then(|| Route {
            destination,
            mask: mask.to_ne_bytes().into(),
            gateway: has(libc::RTF_GATEWAY).then_some(gateway),
            metric,
        })
    });
    lines.take(ROUTES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100D50A\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0000D50A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000A8C0\t00000000\t0201\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\tno number
eth0
";

    fn settings(address: [u8; 4], gateway: [u8; 4]) -> Ipv4Settings {
        Ipv4Settings {
            address: address.into(),
            prefix_bits: 16,
            gateway: gateway.into(),
        }
    }

    #[test]
    fn routes_of_an_interface_are_read_and_others_are_not() {
        let routes = parse(TEXT, "eth0");
        let of_default = Route {
            destination: Ipv4Addr::UNSPECIFIED,
            mask: Ipv4Addr::UNSPECIFIED,
            gateway: Some([10, 213, 0, 1].into()),
            metric: 100,
        };
        let of_link = Route {
            destination: [10, 213, 0, 0].into(),
            mask: [255, 255, 0, 0].into(),
            gateway: None,
            metric: 0,
        };
        assert_eq!(routes, [of_default, of_link]);
        assert_eq!(parse("", "eth0"), []);
    }

    #[test]
    fn router_of_another_network_becomes_the_gateway_and_the_links_own_route_is_left_out() {
        let routes = parse(TEXT, "eth0");
        let moved = |settings: Ipv4Settings| {
            routes
                .iter()
                .filter_map(|route| route.moved(&settings))
                .collect::<Vec<_>>()
        };
        assert_eq!(moved(settings([10, 213, 7, 7], [10, 213, 0, 1])), [routes[0]]);
        let elsewhere = moved(settings([10, 20, 7, 7], [10, 20, 0, 1]));
        assert_eq!(elsewhere.len(), 1);
        assert_eq!(elsewhere[0].gateway, Some([10, 20, 0, 1].into()));
        assert_eq!(elsewhere[0].metric, 100);
    }

    #[test]
    fn mask_has_as_many_bits_as_the_prefix_and_32_at_most() {
        assert_eq!(mask(0), Ipv4Addr::UNSPECIFIED);
        assert_eq!(mask(20), Ipv4Addr::new(255, 255, 240, 0));
        assert_eq!([mask(32), mask(255)], [Ipv4Addr::BROADCAST; 2]);
    }
}
