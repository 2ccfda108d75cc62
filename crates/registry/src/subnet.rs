//! Protocol of the gateway of a user's subnet: its socket, requests and responses, each a line of JSON.
//!
//! The gateway is one process for each user and host (`crates/gateway`). Its socket is `subnet.sock` in the
//! [runtime directory](crate::runtime). Monitors and cells [`join`](Request::Join) cards to networks: a
//! connection for each card, whose end means that the card leaves. Commands and the API list cards and
//! capture frames.

mod connection;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};
use urpc::version::Versions;

pub use self::connection::{Connection, RECEIVED_FILES_MAX, Received, socket_path};
use crate::json_line::Protocol;

/// The client's side of the protocol.
pub const OF_CLIENT: Protocol = Protocol {
    name: "the protocol of the subnet's gateway",
    peer: "the gateway",
    versions: Versions::up_to(1),
};
/// The gateway's side of the protocol.
pub const OF_GATEWAY: Protocol = Protocol {
    peer: "the client",
    ..OF_CLIENT
};

/// Maximum length of a line from a client, bytes.
pub const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Maximum length of a line from the gateway, bytes.
pub const RESPONSE_BYTES_MAX: usize = 16 << 20;
/// Maximum length of the text of a host's `resolv.conf` in [`HostFacts`], bytes. The C library reads three
/// servers; the rest is comments.
pub const RESOLV_CONF_BYTES_MAX: usize = 16 << 10;

/// A request to the gateway.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Request {
    /// Join a card to a network, with the gateway's end of the card's packet socket. The response is
    /// [`Response::Joined`] or [`Response::Refused`]. The card leaves when the connection ends.
    Join(Box<Join>),
    /// The current facts of the host, from a client that has joined a card, on [`Response::NeedFacts`].
    Facts(HostFacts),
    /// List networks and cards. The response is [`Response::Networks`].
    List,
    /// Send the frames of cards as a pcap stream, after [`Response::Capturing`], until the connection ends.
    Capture {
        /// The cards.
        of: Captured,
    },
}

/// A card that joins a network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Join {
    /// Name of the network, which the first card makes.
    pub network: String,
    /// Name of the VM, by which others on the network find it.
    pub vm: String,
    /// Number of the card among those of the VM.
    pub card: usize,
    /// Hardware address of the card.
    pub mac: [u8; 6],
    /// Address that the VM's file requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Ipv4Addr>,
    /// Ports of the host that lead to the card, as in a VM file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forward: Vec<String>,
    /// Whether the guest may reach the host and its cluster.
    #[serde(default)]
    pub host: bool,
    /// Maximum bytes per second from the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Maximum packets per second from the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packets: Option<u32>,
    /// Whether each packet of the card has a virtio-net header of 12 bytes before its frame, by which
    /// checksums and segmentation are left to the receiver. A gateway that does so confirms it in
    /// [`Response::Joined`]; one of an older release does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offloads: bool,
    /// Whether the VM requires all layers of the sandbox, the gateway's too.
    #[serde(default)]
    pub sandbox_required: bool,
    /// Whether the guest may reach the outside, if its network leads there.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub outside: bool,
    /// Settings of the network; the default ones when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<NetworkSettings>,
    /// The host at this time.
    pub facts: HostFacts,
}

/// Settings of a network, the same for all of its cards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSettings {
    /// Range of IPv4 addresses, as `10.20.0.0/24`; the default one when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// Whether no guest reaches the outside.
    pub isolated: bool,
    /// Whether guests reach one another.
    pub peers: bool,
}

fn yes() -> bool {
    true
}

/// Serde predicate to skip true values.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_yes(value: &bool) -> bool {
    *value
}

/// Facts of the host that the gateway, which opens no files, does not find by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Addresses of the host's interfaces.
    pub own: Vec<IpAddr>,
    /// Addresses of the cluster's hosts and of its etcd.
    pub cluster: Vec<IpAddr>,
    /// Text of `/etc/resolv.conf`, at most [`RESOLV_CONF_BYTES_MAX`].
    pub resolv_conf: String,
}

/// Cards whose frames are captured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Captured {
    /// All cards of a network.
    Network(String),
    /// All cards of a VM.
    Vm(String),
}

/// A message of the gateway.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Response {
    /// The card has joined.
    Joined {
        /// Its addresses.
        addresses: Vec<IpAddr>,
        /// Whether packets have headers, as [`Join::offloads`] requests it.
        #[serde(default)]
        offloads: bool,
    },
    /// The gateway needs a [`Request::Facts`], since the last ones are old.
    NeedFacts,
    /// All networks.
    Networks {
        /// The networks, by name.
        networks: Vec<NetworkReport>,
        /// The gateway's process.
        process: ProcessReport,
    },
    /// Bytes of a pcap file follow this line.
    Capturing,
    /// The request can't be carried out.
    Refused {
        /// The reason and the help, in one line for people.
        why: String,
    },
}

/// One network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkReport {
    /// Its name.
    pub name: String,
    /// Its ranges of addresses, as `ADDRESS/PREFIX`.
    pub ranges: Vec<String>,
    /// The gateway's addresses on it.
    pub gateway: Vec<IpAddr>,
    /// Whether no card reaches the outside.
    #[serde(default)]
    pub isolated: bool,
    /// Whether its cards reach one another.
    #[serde(default = "yes")]
    pub peers: bool,
    /// Its cards, by name of their VM.
    pub cards: Vec<CardReport>,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardReport {
    /// Name of its VM.
    pub vm: String,
    /// Its number among the VM's cards.
    pub card: usize,
    /// Names by which other VMs find it.
    #[serde(default)]
    pub names: Vec<String>,
    /// Hardware address.
    pub mac: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Ports of the host that lead to it.
    pub forward: Vec<String>,
    /// Whether it reaches the host.
    pub host: bool,
    /// Whether it leaves checksums and segmentation to receivers. Absent from an older gateway.
    #[serde(default)]
    pub offloads: bool,
    /// Whether it reaches the outside.
    #[serde(default = "yes")]
    pub outside: bool,
    /// Frames and bytes that passed, by counter.
    pub counters: BTreeMap<String, u64>,
    /// Frames that were dropped, by reason; only reasons that occurred.
    pub dropped: BTreeMap<String, u64>,
}

/// The gateway's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Process id.
    pub pid: u32,
    /// Connections and flows to the outside, by counter.
    pub outside: BTreeMap<String, u64>,
    /// Captures that run, with the packets that they lost since their reader was too slow.
    pub captures: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_form() {
        let join = Request::Join(Box::new(Join {
            network: "n".into(),
            vm: "a".into(),
            card: 0,
            mac: [2, 0, 0, 0, 0, 1],
            address: None,
            forward: Vec::new(),
            host: false,
            bandwidth: None,
            packets: None,
            offloads: false,
            sandbox_required: false,
            outside: true,
            settings: None,
            facts: HostFacts::default(),
        }));
        let line = String::from_utf8(OF_CLIENT.write(&join).unwrap()).unwrap();
        assert!(
            line.contains("\"ask\":\"join\"") && line.contains("\"vm\":\"a\""),
            "{line}"
        );
        assert!(!line.contains("offloads"), "a card without them: {line}");
        let older = "{\"versions\":{\"oldest\":1,\"newest\":1},\"answer\":\"joined\",\"addresses\":[]}";
        assert!(matches!(
            OF_CLIENT.read::<Response>(older),
            Ok(Response::Joined { offloads: false, .. })
        ));
        assert!(matches!(
            OF_GATEWAY.read::<Request>(&line),
            Ok(Request::Join(join)) if join.mac[5] == 1
        ));
        // A monitor of the release before joins a network with the default settings.
        assert!(!line.contains("outside") && !line.contains("settings"), "{line}");
        assert!(matches!(
            OF_GATEWAY.read::<Request>(&line),
            Ok(Request::Join(join)) if join.outside && join.settings.is_none()
        ));
        let capture = "{\"ask\":\"capture\",\"of\":{\"vm\":\"a\"}}";
        assert!(matches!(
            OF_GATEWAY.read::<Request>(capture),
            Ok(Request::Capture { of: Captured::Vm(vm) }) if vm == "a"
        ));
        let unlike = "{\"versions\":{\"oldest\":8,\"newest\":9},\"ask\":\"list\"}";
        assert!(OF_GATEWAY.read::<Request>(unlike).is_err());
    }
}
