//! Checks of the network cards of a VM: kinds, addresses and forwarded ports.

use crate::fault::{Fault, fault};
use crate::vm::{NetKind, NetSpec};

/// Least rate that a card can be limited to, bytes per second: a frame of the usual size takes 1.5 s.
const BANDWIDTH_MIN: u64 = 1 << 10;
/// Greatest length of a network's name.
const NAME_BYTES_MAX: usize = 63;

pub(super) fn check(net: &NetSpec, index: &str) -> Result<(), Fault> {
    check_kind(net, index)?;
    check_subnet(net, index)?;
    check_forwards(net, index)?;
    if let Some(text) = &net.mac
        && mac(text).is_none()
    {
        return Err(fault(
            &["nets", index, "mac"],
            format!("{text:?} is not a card's address"),
            "write six bytes, not all zero and not a group's, as \"02:00:00:00:00:01\"",
        ));
    }
    if net.queues.is_some_and(|queues| queues == 0 || queues > 8) {
        return Err(fault(
            &["nets", index, "queues"],
            "not a number of queue pairs",
            "write a number from 1 to 8",
        ));
    }
    if net.kind != NetKind::Tap && net.queues.is_some_and(|queues| queues > 1) {
        return Err(fault(
            &["nets", index, "queues"],
            format!("{} has one queue pair", described(net.kind)),
            "drop `queues`",
        ));
    }
    Ok(())
}

fn described(kind: NetKind) -> &'static str {
    match kind {
        NetKind::User => "user networking",
        NetKind::Subnet => "a card of a subnet",
        NetKind::Tap => "a TAP device",
    }
}

/// Checks the settings of TAP devices, and those that such a device has not.
fn check_kind(net: &NetSpec, index: &str) -> Result<(), Fault> {
    match (net.kind, &net.tap) {
        (NetKind::Tap, None) => {
            return Err(fault(
                &["nets", index, "kind"],
                "which TAP device?",
                "add `tap = \"NAME\"`",
            ));
        }
        (NetKind::User | NetKind::Subnet, Some(_)) => {
            return Err(fault(
                &["nets", index, "tap"],
                format!("{} has no TAP device", described(net.kind)),
                "drop `tap`, or use `kind = \"tap\"`",
            ));
        }
        (NetKind::Tap, Some(tap)) if !tap_name_is_valid(tap) => {
            return Err(fault(
                &["nets", index, "tap"],
                format!("{tap:?} can't name a TAP device"),
                "1 to 15 characters, no `/` or space",
            ));
        }
        _ => {}
    }
    if net.kind == NetKind::Tap && !net.forward.is_empty() {
        return Err(fault(
            &["nets", index, "forward"],
            "a TAP device forwards no ports",
            "drop `forward`, or use `kind = \"user\"`",
        )
        .or_by_flag("drop `forward=`, or use `user`"));
    }
    if net.kind == NetKind::Tap && net.host {
        return Err(fault(
            &["nets", index, "host"],
            "a TAP device reaches what the host lets it",
            "drop `host`, or use `kind = \"user\"`",
        )
        .or_by_flag("drop `host`, or use `user`"));
    }
    Ok(())
}

/// Checks the settings of cards of a subnet, which others have not.
fn check_subnet(net: &NetSpec, index: &str) -> Result<(), Fault> {
    let has = [
        ("network", net.network.is_some()),
        ("address", net.address.is_some()),
        ("bandwidth", net.bandwidth.is_some()),
        ("packets", net.packets.is_some()),
    ];
    if net.kind != NetKind::Subnet
        && let Some((key, _)) = has.into_iter().find(|(_, has)| *has)
    {
        return Err(fault(
            &["nets", index, key],
            format!("{} has no `{key}`", described(net.kind)),
            format!("drop `{key}`, or use `kind = \"subnet\"`"),
        )
        .or_by_flag(format!("drop `{key}=`, or use `subnet`")));
    }
    if let Some(name) = &net.network
        && !network_name_is_valid(name)
    {
        return Err(fault(
            &["nets", index, "network"],
            format!("{name:?} can't name a network"),
            "1 to 63 letters, digits, `-`, `_` and `.`, the first a letter or digit",
        ));
    }
    if net.bandwidth.is_some_and(|bandwidth| bandwidth.0 < BANDWIDTH_MIN) {
        return Err(fault(
            &["nets", index, "bandwidth"],
            "less than 1K per second",
            "write the bytes per second, as \"10M\"",
        ));
    }
    if net.packets == Some(0) {
        return Err(fault(
            &["nets", index, "packets"],
            "a card with no packets",
            "write the packets per second, or drop the card",
        ));
    }
    Ok(())
}

/// Whether `name` can name a network of a subnet.
pub(crate) fn network_name_is_valid(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX
        && name
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn check_forwards(net: &NetSpec, index: &str) -> Result<(), Fault> {
    let mut host_ports = Vec::new();
    for (place, text) in net.forward.iter().enumerate() {
        let at = ["nets", index, "forward", &place.to_string()];
        let Some((transport, host_port, _)) = forward(text) else {
            return Err(fault(
                &at,
                format!("{text:?} is not a port forward"),
                "write HOST:GUEST, as \"8080:80\", or udp:HOST:GUEST, ports from 1 to 65535",
            ));
        };
        if host_ports.contains(&(transport, host_port)) {
            return Err(fault(
                &at,
                format!("port {host_port} of the host is forwarded twice"),
                "forward it once",
            ));
        }
        host_ports.push((transport, host_port));
    }
    Ok(())
}

fn tap_name_is_valid(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 15
        && name != "."
        && name != ".."
        && name
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'/' && byte != b':' && byte != b'%')
}

/// Transport of a port forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP, also the default.
    Tcp,
    /// UDP, only if the text names it.
    Udp,
}

/// Parses a port forward `[tcp:|udp:]HOST:GUEST`: transport, host port, guest port.
pub fn forward(text: &str) -> Option<(Transport, u16, u16)> {
    let (transport, ports) = match text.split_once(':')? {
        ("tcp", ports) => (Transport::Tcp, ports),
        ("udp", ports) => (Transport::Udp, ports),
        _ => (Transport::Tcp, text),
    };
    let (host, guest) = ports.split_once(':')?;
    let port = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|&port| digits && port != 0)
    };
    Some((transport, port(host)?, port(guest)?))
}

/// Parses a card's address. Group addresses and zero are refused: no card may have one.
pub fn mac(text: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next()?;
        if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && bytes[0] & 1 == 0 && bytes != [0; 6]).then_some(bytes)
}
