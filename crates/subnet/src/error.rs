//! Errors of a network, each in one line with its help.

use std::io;

/// Reason why a network can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum SubnetError {
    /// `/dev/net/tun` does not exist.
    #[error("this host has no /dev/net/tun; load the tun module (modprobe tun) or use --net user")]
    NoTun,
    /// `/dev/net/tun` may not be opened.
    #[error("no permission to open /dev/net/tun; run as a user who may, or use --net user")]
    TunPermission(#[source] io::Error),
    /// The TAP device does not exist and this user may not create one, or it belongs to another user.
    #[error("there is no TAP device {0}; create it with: ip tuntap add {0} mode tap{1} user $USER")]
    NoSuchTap(String, &'static str),
    /// The TAP device belongs to another user.
    #[error(
        "no permission to use TAP device {0}; give it to this user: ip tuntap add {0} mode tap user $USER"
    )]
    TapPermission(String),
    /// Another process has the device open.
    #[error("TAP device {0} is in use by another process; choose another device for this VM")]
    TapBusy(String),
    /// The device has another kind or number of queues than requested.
    #[error("TAP device {0} cannot have {1} queue pairs; create it with: ip tuntap add {0} mode tap{2}")]
    TapKind(String, u16, &'static str),
    /// The name cannot be a device's name.
    #[error("{0:?} is no name of a network device; use 1 to 15 characters without '/' or spaces")]
    TapName(String),
    /// Another operation on a TAP device failed.
    #[error("TAP device {name}: {what}")]
    Tap {
        /// Name of the TAP device.
        name: String,
        /// The failed operation.
        what: &'static str,
        /// Reason of the failure.
        #[source]
        source: io::Error,
    },
    /// passt is not installed.
    #[error(
        "user-mode networking needs passt, which is not installed; install Debian's package: apt install \
         passt"
    )]
    NoPasst,
    /// A port of the host is in use.
    #[error("host port {port}/{protocol} is in use; forward another one, or stop what uses it")]
    PortInUse {
        /// Number of the host's port.
        port: u16,
        /// Protocol, `tcp` or `udp`.
        protocol: &'static str,
    },
    /// A port of the host may not be used by this user.
    #[error(
        "host port {port}/{protocol} needs a privilege that the network's process does not have; forward one \
         from 1024 on"
    )]
    PortPermission {
        /// Number of the host's port.
        port: u16,
        /// Protocol, `tcp` or `udp`.
        protocol: &'static str,
    },
    /// A port of the host could not be opened.
    #[error("cannot open host port {port}/{protocol} for a guest")]
    Port {
        /// Number of the host's port.
        port: u16,
        /// Protocol, `tcp` or `udp`.
        protocol: &'static str,
        /// Reason of the failure.
        #[source]
        source: io::Error,
    },
    /// The card of a forwarded port does not exist.
    #[error("there is no network card to which host port {port}/{protocol} could lead")]
    PortWithoutCard {
        /// Number of the host's port.
        port: u16,
        /// Protocol, `tcp` or `udp`.
        protocol: &'static str,
    },
    /// The text of a forwarded port is wrong.
    #[error(
        "{text:?} is no port forwarding: {what}; write HOST:GUEST, tcp:HOST:GUEST or udp:HOST:GUEST, as in \
         8080:80"
    )]
    Forward {
        /// The forwarding as the user wrote it.
        text: String,
        /// The error in it.
        what: &'static str,
    },
    /// The text of a card's address is wrong.
    #[error(
        "{0:?} is no address of a network card; write six bytes, as in 52:54:00:12:34:56, the first one even"
    )]
    Mac(String),
    /// passt ended while it started.
    #[error("passt did not start: {0}")]
    PasstFailed(String),
    /// The host could not start passt.
    #[error("cannot start passt: {what}")]
    Passt {
        /// The failed operation.
        what: &'static str,
        /// Reason of the failure.
        #[source]
        source: io::Error,
    },
    /// A card's frame filter ended while it started.
    #[error("a card did not start: {0}")]
    FilterFailed(String),
    /// The host could not start a card's frame filter.
    #[error("cannot start the frame filter of a card")]
    Filter(#[source] io::Error),
}
