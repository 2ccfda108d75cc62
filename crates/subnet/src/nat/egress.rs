//! Decides where a guest's packet to an address goes. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::Card;
use crate::filter::{Barred, is_barred_by_kind, is_listed};

/// Returns the host's address for the guest's destination `remote`; none if the guest may not reach it.
pub(super) fn target(card: &Card, remote: SocketAddr, barred: &Barred) -> Option<SocketAddr> {
    let address = remote.ip();
    if card.gateways.contains(address) {
        let loopback = match address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        return card.host.then(|| SocketAddr::new(loopback, remote.port()));
    }
    let is_barred = is_barred_by_kind(address) || (!card.host && is_listed(address, barred));
    (!is_barred).then_some(remote)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nat::Gateways;

    fn card(host: bool) -> Card {
        Card {
            address: [10, 77, 0, 5].into(),
            gateways: Gateways {
                ipv4: [10, 77, 0, 1].into(),
                ipv6: "fd77::1".parse().unwrap(),
            },
            host,
        }
    }

    fn barred() -> Barred {
        Barred {
            own: [[192, 0, 2, 1].into(), "2001:db8::1".parse().unwrap()].into(),
            cluster: [[192, 0, 2, 2].into()].into(),
        }
    }

    fn reaches(host: bool, address: &str) -> Option<IpAddr> {
        let remote = SocketAddr::new(address.parse().unwrap(), 80);
        target(&card(host), remote, &barred()).map(|target| target.ip())
    }

    #[test]
    fn host_and_cluster_are_reached_only_with_the_setting() {
        for address in ["192.0.2.1", "192.0.2.2", "2001:db8::1", "64:ff9b::c000:202"] {
            assert_eq!(reaches(false, address), None, "{address}");
            assert_eq!(
                reaches(true, address),
                Some(address.parse().unwrap()),
                "{address}"
            );
        }
        assert_eq!(reaches(false, "10.77.0.1"), None);
        assert_eq!(reaches(false, "fd77::1"), None);
        assert_eq!(reaches(true, "10.77.0.1"), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(reaches(true, "fd77::1"), Some(Ipv6Addr::LOCALHOST.into()));
        assert_eq!(reaches(false, "192.0.2.3"), Some([192, 0, 2, 3].into()));
    }

    #[test]
    fn loopback_and_link_are_not_reached_under_their_own_addresses() {
        let addresses = [
            "127.0.0.1",
            "0.0.0.0",
            "169.254.1.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:8.8.8.8",
            "fe80::1",
            "ff02::1",
            "64:ff9b::7f00:1",
        ];
        for address in addresses {
            assert_eq!(reaches(false, address), None, "{address}");
            assert_eq!(reaches(true, address), None, "{address}");
        }
    }

    proptest! {
        #[test]
        fn host_is_never_reached_without_the_setting(address: u32, own: bool) {
            let address = IpAddr::V4(address.into());
            let mut barred = barred();
            let list = if own { &mut barred.own } else { &mut barred.cluster };
            list.insert(address);
            prop_assert_eq!(target(&card(false), SocketAddr::new(address, 80), &barred), None);
            if let Some(target) = target(&card(true), SocketAddr::new(address, 80), &barred) {
                prop_assert!(target.ip() == address || address == IpAddr::from([10, 77, 0, 1]));
            }
        }
    }
}
