//! Unprivileged networking through passt.
//!
//! passt (Debian 12 has 0.0~git20230309) receives one end of a socket pair as its standard input (`--fd 0`).
//! It ends when the other end closes: when the shard that holds it ends, or its monitor before handing it
//! over. A parent-death signal is not used: it would fire at the end of the thread that started passt, and is
//! lost when passt drops root.
//!
//! The guest always has the same network: 10.0.2.15/24, with the gateway 10.0.2.2. passt requires a host
//! interface with a default route as a template for IPv4. On a host without one (a lab), `lo` serves, and the
//! guest reaches at most the host. If root starts it, passt changes to the given user, or to `nobody`, and
//! cannot bind ports below 1024.
//!
//! passt connects its guest to everything that the host reaches, and takes the gateway's address for the
//! host's loopback. A [`FilterProcess`] in front of it blocks both, unless the card allows them. passt also
//! receives the option not to map the gateway (`--no-map-gw`), except where it needs that: without it, passt
//! 2023 can neither return replies to UDP clients on the host's loopback nor offer a resolver there.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use child_process::{LeftProcess, ServiceProcess};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::filter::Resolvers;
use crate::process::{Arguments, Egress, FilterProcess, LeftFilter};
use crate::{PortForward, Protocol, SubnetError, host};

/// The guest's address, assigned by DHCP.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The gateway. A guest that may reach the host uses this address for it.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// Hardware address of the gateway.
const GATEWAY_MAC: &str = "52:55:0a:00:02:02";
/// Time limit for passt's reply to its first frame. On a machine with six times as much work as CPUs, 5 s
/// were not enough. A passt that ends closes the socket, which is noticed at once.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Parameters of a passt to start.
#[derive(Clone, Debug, Default)]
pub struct PasstSpec {
    /// Hardware address of the guest's card, for the first frame.
    pub mac: [u8; 6],
    /// Ports of the host that are forwarded to the guest, on every address of the host.
    pub forward: Vec<PortForward>,
    /// Policy that blocks the host and the cluster; without one the guest reaches both.
    pub egress: Option<Egress>,
    /// User and group of passt and the filter, which only root may choose. Without them, a passt that root
    /// starts runs as `nobody`.
    pub user: Option<(u32, u32)>,
}

/// A running passt. Dropping it ends passt and its filter.
#[derive(Debug)]
pub struct Passt {
    /// The guest's side of the stream: each frame after its length, four bytes, big endian.
    pub socket: OwnedFd,
    /// The processes of the card.
    pub child: PasstChild,
}

/// The processes of a card that a predecessor of this monitor started.
#[derive(Debug)]
pub struct LeftCard {
    /// The process of passt.
    pub passt: LeftProcess,
    /// The filter in front of passt, for a card that may reach neither the host nor the cluster.
    pub filter: Option<LeftFilter>,
}

/// The process of passt, and that of the filter in front of it. Dropping it kills both, and waits.
#[derive(Debug)]
pub struct PasstChild {
    /// Dropped before passt, since it would report that passt has ended.
    filter: Option<FilterProcess>,
    process: ServiceProcess,
}

impl PasstChild {
    /// Adopts the processes of a card that `spec` describes.
    ///
    /// # Errors
    /// Fails if only one of `left` and `spec` has a filter, or the host has no threads left. The processes
    /// are ended then.
    pub fn adopt(left: LeftCard, spec: &PasstSpec) -> std::io::Result<Self> {
        // Processes that are not adopted end with these two.
        let process = ServiceProcess::adopt(left.passt);
        let filter = match (left.filter, &spec.egress) {
            (Some(left), Some(egress)) => Some(FilterProcess::adopt(left, egress)?),
            (None, None) => None,
            (Some(left), None) => {
                drop(ServiceProcess::adopt(left.process));
                return Err(std::io::Error::other(
                    "the card has a frame filter that it must not have",
                ));
            }
            (None, Some(_)) => return Err(std::io::Error::other("the card lacks its frame filter")),
        };
        Ok(Self { filter, process })
    }

    /// Returns the process of passt.
    pub fn passt(&self) -> &ServiceProcess {
        &self.process
    }

    /// Returns the filter in front of passt.
    pub fn filter(&self) -> Option<&FilterProcess> {
        self.filter.as_ref()
    }

    /// Returns the processes of passt and of the filter in front of it.
    pub fn processes(&self) -> impl Iterator<Item = &ServiceProcess> {
        let filter = self.filter.iter().map(FilterProcess::process);
        std::iter::once(&self.process).chain(filter)
    }

    /// Returns the process id of passt.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

/// Starts passt and the filter in front of it, and waits until passt replies.
pub fn start(spec: &PasstSpec) -> Result<Passt, SubnetError> {
    spec.forward.iter().try_for_each(check_free)?;
    let failed = |what| move |source| SubnetError::Passt { what, source };
    let (mut ours, theirs) = UnixStream::pair().map_err(failed("no socket pair"))?;
    let log = memfd_create(c"passt", MFdFlags::MFD_CLOEXEC)
        .map_err(|error| failed("no memory file")(error.into()))?;
    let mut log = File::from(log);
    let stderr = log.try_clone().map_err(failed("no memory file"))?;
    let resolv_conf = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let resolvers = Resolvers::of(&resolv_conf, &host::ipv6_gateways());
    let maps_gateway = spec.egress.is_none() || resolvers.at_gateway || !udp_ports(&spec.forward).is_empty();
    let process = Command::new("passt")
        .args(arguments(spec, has_default_route(), maps_gateway))
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => SubnetError::NoPasst,
            _ => failed("cannot run it")(error),
        })?;
    let mut child = PasstChild {
        filter: None,
        process: ServiceProcess::of_child(process).map_err(failed("no pidfd"))?,
    };
    if let Some(egress) = &spec.egress {
        let (card, near) = UnixStream::pair().map_err(failed("no socket pair"))?;
        let arguments = Arguments {
            seal: egress.seal,
            user: spec.user,
            resolvers,
            udp_ports: udp_ports(&spec.forward),
        };
        let filter = FilterProcess::start(egress, &arguments, near.into(), ours.into());
        child.filter = Some(filter.map_err(SubnetError::Filter)?);
        ours = card;
    }
    if !answers(&mut ours, spec.mac) {
        let failure = child.filter.as_ref().and_then(FilterProcess::failure);
        drop(child);
        if let Some(failure) = failure {
            return Err(SubnetError::FilterFailed(failure));
        }
        let mut text = String::new();
        let _ = log.rewind().and_then(|()| log.read_to_string(&mut text));
        return Err(explain(&text));
    }
    ours.set_read_timeout(None).map_err(failed("no time limit"))?;
    ours.set_nonblocking(true)
        .map_err(failed("cannot make the socket non-blocking"))?;
    Ok(Passt {
        socket: ours.into(),
        child,
    })
}

/// Returns the guest's ports to which UDP is forwarded.
fn udp_ports(forward: &[PortForward]) -> Vec<u16> {
    let udp = forward.iter().filter(|forward| forward.protocol == Protocol::Udp);
    udp.map(|forward| forward.guest).collect()
}

/// Returns passt's command line.
fn arguments(spec: &PasstSpec, default_route: bool, maps_gateway: bool) -> Vec<String> {
    let (address, gateway) = (GUEST_ADDRESS.to_string(), GATEWAY.to_string());
    let mut arguments: Vec<String> = ["--foreground", "--quiet", "--stderr", "--fd", "0"]
        .map(String::from)
        .into();
    for (option, value) in [
        ("--address", &*address),
        ("--netmask", "24"),
        ("--gateway", &*gateway),
        ("--mac-addr", GATEWAY_MAC),
    ] {
        arguments.extend([option.to_owned(), value.to_owned()]);
    }
    if !default_route {
        arguments.extend(["--ipv4-only", "--interface", "lo"].map(String::from));
    }
    if !maps_gateway {
        arguments.push("--no-map-gw".to_owned());
    }
    if let Some((uid, gid)) = spec.user {
        arguments.extend(["--runas".to_owned(), format!("{uid}:{gid}")]);
    }
    for forward in &spec.forward {
        let option = match forward.protocol {
            Protocol::Tcp => "--tcp-ports",
            Protocol::Udp => "--udp-ports",
        };
        arguments.extend([option.to_owned(), format!("{}:{}", forward.host, forward.guest)]);
    }
    arguments
}

/// Returns whether the host has an IPv4 default route.
fn has_default_route() -> bool {
    // passt will be in the network namespace of this thread.
    std::fs::read_to_string("/proc/thread-self/net/route").is_ok_and(|table| names_default_route(&table))
}

/// Returns whether a table has a route with destination and mask zero. Its lines have interface, destination,
/// gateway, flags, reference count, use, metric and mask.
fn names_default_route(table: &str) -> bool {
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(1) == Some("00000000") && fields.nth(5) == Some("00000000")
    })
}

fn check_free(forward: &PortForward) -> Result<(), SubnetError> {
    let (port, protocol) = (forward.host, forward.protocol.name());
    let bound = match forward.protocol {
        Protocol::Tcp => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map(drop),
        Protocol::Udp => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).map(drop),
    };
    match bound.map_err(|error| error.kind()) {
        Err(std::io::ErrorKind::AddrInUse) => Err(SubnetError::PortInUse { port, protocol }),
        Err(std::io::ErrorKind::PermissionDenied) => Err(SubnetError::PortPermission { port, protocol }),
        _ => Ok(()),
    }
}

/// Converts passt's output into an error.
fn explain(text: &str) -> SubnetError {
    let noise = |line: &str| line.starts_with("Failed to send") || line.starts_with("Don't run as root");
    let line = text
        .lines()
        .find(|line| !noise(line))
        .unwrap_or("it ended, or did not answer, without a word");
    // "Failed to bind any port for '-t 8080:80', exiting": the port was free a moment ago.
    if let Some((_, rest)) = line.split_once("Failed to bind any port for '-") {
        let protocol = if rest.starts_with('u') { "udp" } else { "tcp" };
        let digits: String = rest
            .chars()
            .skip_while(|c| !c.is_ascii_digit())
            .take_while(char::is_ascii_digit)
            .collect();
        if let Ok(port) = digits.parse() {
            return if port < 1024 {
                SubnetError::PortPermission { port, protocol }
            } else {
                SubnetError::PortInUse { port, protocol }
            };
        }
    }
    SubnetError::PasstFailed(line.to_owned())
}

/// Sends an ARP request for the gateway and reads the reply from the socket.
fn answers(socket: &mut UnixStream, mac: [u8; 6]) -> bool {
    let mut request = Vec::with_capacity(46);
    request.extend(42_u32.to_be_bytes());
    request.extend([0xff; 6]);
    request.extend(mac);
    // ARP, for Ethernet (6-byte addresses) and IPv4 (4), a request.
    request.extend([0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]);
    request.extend(mac);
    request.extend(GUEST_ADDRESS.octets());
    request.extend([0; 6]);
    request.extend(GATEWAY.octets());
    if socket.set_read_timeout(Some(START_LIMIT)).is_err() || socket.write_all(&request).is_err() {
        return false;
    }
    loop {
        let mut length = [0; 4];
        if socket.read_exact(&mut length).is_err() {
            return false;
        }
        let mut frame = vec![0; (u32::from_be_bytes(length) as usize).min(65_553)];
        if socket.read_exact(&mut frame).is_err() {
            return false;
        }
        if frame.get(12..14) == Some(&[0x08, 0x06]) {
            return true;
        }
    }
}

#[cfg(test)]
mod tests;
