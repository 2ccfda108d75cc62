//! Names and addresses of cards.

use std::net::Ipv4Addr;

use super::*;
use crate::write_mac;

fn attach(network: &mut Network, id: u64, card: Card) -> Result<Addresses, AttachError> {
    network.attach(CardId(id), card, Instant::now())
}

fn network(range: &str) -> Network {
    let settings = Settings {
        ipv4: range.parse().unwrap(),
        ..Settings::new("test")
    };
    Network::new(settings, Instant::now())
}

#[test]
fn address_follows_from_the_name_in_each_release() {
    let mut network = network("10.213.0.0/16");
    let addresses = attach(&mut network, 1, card("web", 1)).unwrap();
    attach(&mut network, 2, card("db", 2)).unwrap();
    assert_eq!(addresses, attach_alone("web"));
    // These are guests' addresses in the field: a change cuts connections of VMs that go on.
    assert_eq!(addresses.ipv4.to_string(), "10.213.134.30");
    assert_eq!(addresses.ipv6.to_string(), "fdaf:79fa:c9b0:0:5054:ff:fe00:1");
    assert_eq!(addresses.link_local.to_string(), "fe80::5054:ff:fe00:1");
}

fn attach_alone(name: &str) -> Addresses {
    attach(&mut network("10.213.0.0/16"), 1, card(name, 1)).unwrap()
}

#[test]
fn second_user_of_a_name_or_address_is_refused() {
    let mut network = network("10.213.0.0/16");
    let requested = Some(Ipv4Addr::new(10, 213, 0, 9));
    let web = Card {
        address: requested,
        ..card("web", 1)
    };
    attach(&mut network, 1, web.clone()).unwrap();
    let refused = [
        (1, card("other", 2), AttachError::NumberTaken("other".to_owned())),
        (2, card("WEB", 2), AttachError::NameTaken("WEB".to_owned())),
        (
            2,
            card("_gateway", 2),
            AttachError::NameTaken("_gateway".to_owned()),
        ),
        (2, card("", 2), AttachError::Name(String::new())),
        (2, card("a b", 2), AttachError::Name("a b".to_owned())),
        (
            2,
            card("other", 1),
            AttachError::MacTaken("52:54:00:00:00:01".to_owned()),
        ),
        (
            2,
            Card {
                mac: network.gateway().mac,
                ..card("other", 2)
            },
            AttachError::MacTaken(write_mac(network.gateway().mac)),
        ),
        (
            2,
            Card {
                mac: [0xff; 6],
                ..card("other", 2)
            },
            AttachError::Mac("ff:ff:ff:ff:ff:ff".to_owned()),
        ),
        (
            2,
            Card {
                address: requested,
                ..card("other", 2)
            },
            AttachError::AddressTaken(Ipv4Addr::new(10, 213, 0, 9)),
        ),
    ];
    for (id, card, error) in refused {
        assert_eq!(attach(&mut network, id, card), Err(error));
    }
    for outside in ["10.213.0.0", "10.213.0.1", "10.213.255.255", "10.214.0.9"] {
        let address = outside.parse().unwrap();
        let card = Card {
            address: Some(address),
            ..card("other", 2)
        };
        let range = network.settings().ipv4;
        assert_eq!(
            attach(&mut network, 2, card),
            Err(AttachError::AddressOutside { address, range })
        );
    }
    assert_eq!(network.cards().count(), 1);
    // A card that left frees all.
    assert!(network.detach(CardId(1)).is_some());
    assert!(network.detach(CardId(1)).is_none());
    attach(&mut network, 2, web).unwrap();
}

#[test]
fn network_gives_all_its_addresses_and_then_none() {
    let mut network = network("192.168.7.8/29");
    // Of eight addresses, three are not cards'.
    let mut seen = Vec::new();
    for number in 0..5 {
        let addresses = attach(&mut network, number, card(&format!("vm-{number}"), number as u8)).unwrap();
        assert!(network.settings().ipv4.fits_card(addresses.ipv4));
        assert!(!seen.contains(&addresses.ipv4));
        seen.push(addresses.ipv4);
    }
    let error = attach(&mut network, 9, card("late", 9)).unwrap_err();
    assert_eq!(error, AttachError::Full(5));
    network.detach(CardId(2)).unwrap();
    assert_eq!(attach(&mut network, 9, card("late", 9)).unwrap().ipv4, seen[2]);
}

#[test]
fn only_private_ranges_are_read() {
    for text in [
        "10.0.0.0/8",
        "10.213.0.0/16",
        "172.16.0.0/12",
        "192.168.122.0/24",
        "192.168.7.8/29",
    ] {
        assert_eq!(text.parse::<Ipv4Range>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "10.213.0.0",
        "10.213.0.0/",
        "10.213.0.0/+16",
        "10.213.0.0/30",
        "10.213.0.0/7",
        "10.213.0.1/16",
        "8.8.8.0/24",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/11",
        "192.168.0.0/15",
        "fd00::/64",
    ] {
        let error = text.parse::<Ipv4Range>().unwrap_err().to_string();
        assert!(error.contains("10.213.0.0/16"), "{error}");
    }
}
