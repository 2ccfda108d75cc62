use proptest::prelude::*;

use super::*;
use crate::error::ConfigError;

const CELL: &str = "[[cells]]\ncpus = \"0\"\n";
const HOSTS: &str = "[[hosts]]\nname = \"alpha\"\naddress = \"10.20.0.1:7400\"\n[[hosts]]\nname = \
                     \"beta\"\naddress = \"192.0.2.2:7400\"\n[[cells]]\nhost = \"alpha\"\n[[cells]]\nhost = \
                     \"beta\"\n";

fn parse(text: &str) -> Result<ClusterSpec, ConfigError> {
    ClusterSpec::parse("cluster.toml", text)
}

fn networks(tables: &[&str]) -> Result<Vec<NetworkSpec>, ConfigError> {
    let tables: String = tables
        .iter()
        .map(|keys| format!("[[networks]]\n{keys}\n"))
        .collect();
    parse(&format!("{CELL}{tables}")).map(|spec| spec.networks)
}

#[test]
fn network_has_a_range_and_decides_which_vms_reach_the_outside() {
    let all = networks(&[
        "name = \"back\"\nrange = \"10.20.0.0/24\"\nisolated = true",
        "name = \"front\"\noutside = [\"web-*\", \"proxy\"]\npeers = false",
        "name = \"group-g\"",
    ])
    .unwrap();
    let [back, front, group] = &all[..] else {
        panic!("{all:?}");
    };
    assert_eq!(back.range.as_deref(), Some("10.20.0.0/24"));
    assert!(back.peers && !back.reaches_outside("web-1"));
    assert!(!front.peers);
    for (vm, reaches) in [("web-1", true), ("proxy", true), ("proxy2", false), ("db", false)] {
        assert_eq!(front.reaches_outside(vm), reaches, "{vm}");
    }
    assert!(group.peers && group.reaches_outside("db"));
}

#[test]
fn wrong_networks_are_refused_with_the_place_and_help() {
    let named = |keys: &str| format!("name = \"a\"\n{keys}");
    let first = "name = \"first\"\nrange = \"10.20.0.0/16\"";
    for (keys, why) in [
        (named("ranges = 1"), "ranges"),
        ("isolated = true".to_owned(), "name"),
        ("name = \"a b\"".to_owned(), "can't name a network"),
        ("name = \"run-7\"".to_owned(), "`run-`"),
        ("name = \"vm-7\"".to_owned(), "`vm-`"),
        ("name = \"first\"".to_owned(), "in the file already"),
        (named("range = \"10.20.0.0\""), "no range"),
        (named("range = \"10.20.0.1/24\""), "no range"),
        (named("range = \"10.20.0.0/30\""), "no range"),
        (named("range = \"10.20.0.0/+24\""), "no range"),
        (named("range = \"8.8.8.0/24\""), "no range"),
        (named("range = \"172.16.0.0/8\""), "no range"),
        (named("range = \"172.16.0.0/11\""), "no range"),
        (
            named("range = \"10.20.3.0/24\""),
            "addresses of the network first",
        ),
        (named("range = \"10.0.0.0/8\""), "addresses of the network first"),
        (named("host = \"alpha\""), "no host \"alpha\""),
        (named("isolated = true\noutside = [\"b\"]"), "isolated"),
        (named("outside = []"), "0 names"),
        (named("outside = [\"a/b\"]"), "a/b"),
    ] {
        let error = networks(&[first, &keys]).unwrap_err();
        assert!(error.message.contains(why), "{keys}: {}", error.message);
        assert!(error.span.is_some(), "{keys}");
    }
    let many: Vec<String> = (0..=NETWORKS_MAX)
        .map(|number| format!("name = \"n{number}\""))
        .collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(networks(&many).unwrap_err().message.contains("257 networks"));
}

#[test]
fn network_of_several_hosts_names_its_host_and_has_no_hosts_address() {
    let with = |keys: &str| parse(&format!("{HOSTS}[[networks]]\nname = \"a\"\n{keys}\n"));
    for (keys, why) in [
        ("", "of no host"),
        ("host = \"gamma\"", "no host \"gamma\""),
        (
            "host = \"beta\"\nrange = \"10.20.0.0/24\"",
            "the address of host alpha",
        ),
    ] {
        let error = with(keys).unwrap_err();
        assert!(error.message.contains(why), "{keys}: {}", error.message);
        assert!(error.span.is_some(), "{keys}");
    }
    let spec = with("host = \"beta\"\nrange = \"10.20.1.0/24\"").unwrap();
    assert_eq!(spec.networks[0].host.as_deref(), Some("beta"));
    // The host takes its networks along.
    let (_, left) = spec.without_host("beta").unwrap();
    assert_eq!(left.networks, []);
}

proptest! {
    #[test]
    fn ranges_overlap_if_and_only_if_they_have_a_common_address(
        a in 0_u32..64, a_bits in 24_u8..=29, b in 0_u32..64, b_bits in 24_u8..=29,
    ) {
        let range = |number: u32, bits: u8| {
            let base = 0x0a14_0000 | (number << 3) & (u32::MAX << (32 - bits));
            Range::parse(&format!("{}/{bits}", Ipv4Addr::from(base))).unwrap()
        };
        let (a, b) = (range(a, a_bits), range(b, b_bits));
        let common = (0x0a14_0000..0x0a14_0400).any(|address| a.contains(address) && b.contains(address));
        prop_assert_eq!(a.overlaps(b), common);
        prop_assert_eq!(b.overlaps(a), common);
    }
}
