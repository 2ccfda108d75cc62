use std::fs::File;

use nix::sched::{CloneFlags, unshare};

use super::super::{move_to_network, readdress, routes};
use super::*;
use crate::protocol::{CardAddress, Ipv4Settings};

const OLD: [u8; 6] = [2, 0, 0, 0, 0, 7];
const NEW: [u8; 6] = [2, 0, 0, 0, 0, 8];

#[test]
fn ipv6_addresses_of_an_interface_are_read_and_others_are_not() {
    let table = "fe800000000000000000000000000007 02 40 20 80     eth0\n\
                 00000000000000000000000000000001 01 80 10 80       lo\n\
                 nonsense\n\nfd00000000000000000000000000000a 02 40 00 80     eth0\n";
    let addresses: [Ipv6Addr; 2] = ["fe80::7".parse().unwrap(), "fd00::a".parse().unwrap()];
    assert_eq!(parse_ipv6(table, "eth0"), addresses);
}

/// An Ethernet interface in a network namespace of this thread alone, which ends with its file.
fn interface() -> (File, Interface) {
    unshare(CloneFlags::CLONE_NEWNET).expect("root makes network namespaces");
    let tap = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .expect("/dev/net/tun");
    let interface = Interface::open("card0").unwrap();
    let mut request = interface.request().unwrap();
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the kernel reads and writes this structure, which outlives the call.
    let made = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(made, 0, "{}", io::Error::last_os_error());
    interface.set_hardware_address(OLD).unwrap();
    (tap, interface)
}

fn settings(last: u8) -> Ipv4Settings {
    Ipv4Settings {
        address: [10, 213, 7, last].into(),
        prefix_bits: 16,
        gateway: [10, 213, 0, 1].into(),
    }
}

fn of_default() -> Route {
    Route {
        destination: Ipv4Addr::UNSPECIFIED,
        mask: Ipv4Addr::UNSPECIFIED,
        gateway: Some([10, 213, 0, 1].into()),
        metric: 100,
    }
}

#[test]
fn interface_gets_its_new_addresses_and_keeps_its_routes() {
    let (_tap, interface) = interface();
    interface.set_ipv4([10, 213, 7, 7].into(), 16).unwrap();
    interface.set_up(true).unwrap();
    interface.add_route(&of_default()).unwrap();
    let before = routes::of_interface("card0").unwrap();
    assert!(before.contains(&of_default()) && before.len() == 2, "{before:?}");
    readdress(&CardAddress {
        from: OLD,
        to: NEW,
        ipv4: Some(settings(8)),
    })
    .unwrap();
    assert_eq!(interface.hardware_address(), Some(NEW));
    let own = interface.addresses().unwrap();
    let ipv4: Vec<_> = own.iter().filter(|address| address.is_ipv4()).collect();
    assert_eq!(ipv4, [&IpAddr::from([10, 213, 7, 8])]);
    let link_local: IpAddr = "fe80::ff:fe00:7".parse().unwrap();
    assert!(!own.contains(&link_local), "{own:?} has the parent's");
    assert!(interface.is_up().unwrap());
    assert_eq!(routes::of_interface("card0").unwrap(), before);
}

#[test]
fn interface_that_is_down_or_has_no_address_gets_its_hardware_address_alone() {
    let (_tap, interface) = interface();
    let card = |from, to| CardAddress {
        from,
        to,
        ipv4: Some(settings(8)),
    };
    readdress(&card(OLD, NEW)).unwrap();
    assert!(!interface.is_up().unwrap());
    interface.set_up(true).unwrap();
    readdress(&card(NEW, OLD)).unwrap();
    assert_eq!(interface.hardware_address(), Some(OLD));
    assert_eq!(interface.ipv4().unwrap(), None);
}

#[test]
fn link_is_up_again_after_a_step_that_failed() {
    let (_tap, interface) = interface();
    interface.set_ipv4([10, 213, 7, 7].into(), 16).unwrap();
    interface.set_up(true).unwrap();
    // A group's address, which the kernel refuses.
    let error = move_to_network(&interface, [1, 0, 0, 0, 0, 1], settings(8));
    assert!(error.is_err());
    assert!(interface.is_up().unwrap());
}
