//! DHCPv4 server. A card has one address at all times, so there is no table of leases.

use std::net::Ipv4Addr;

use smoltcp::wire::{
    DhcpFlags, DhcpMessageType, DhcpOpCode, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress,
};

use super::dns::DOMAIN;
use super::settings::Settings;

/// Ports of DHCP: the server's and the client's.
pub const SERVER_PORT: u16 = 67;
/// Port of clients.
pub const CLIENT_PORT: u16 = 68;
/// Seconds of a lease. A renewal only confirms the address.
const LEASE_SECONDS: u32 = 24 * 3600;
/// Smallest message that old clients accept (RFC 951).
const MESSAGE_BYTES_MIN: usize = 300;
const ETHERNET_HARDWARE: u16 = 1;

const OPTION_MASK: u8 = 1;
const OPTION_NAME_SERVER: u8 = 6;
const OPTION_HOST_NAME: u8 = 12;
const OPTION_DOMAIN: u8 = 15;
const OPTION_MTU: u8 = 26;
const OPTION_REQUESTED_ADDRESS: u8 = 50;
const OPTION_MESSAGE_TYPE: u8 = 53;
const OPTION_SERVER: u8 = 54;
const OPTION_CLIENT: u8 = 61;

/// A client's card.
#[derive(Clone, Copy, Debug)]
pub struct Client<'a> {
    /// Hardware address.
    pub mac: [u8; 6],
    /// Address that the card has.
    pub address: Ipv4Addr,
    /// Name of the host.
    pub name: &'a str,
    /// Whether it reaches the outside.
    pub outside: bool,
}

/// Reply of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Message.
    pub message: Vec<u8>,
    /// Address to which it goes.
    pub destination: Ipv4Addr,
}

/// Returns the reply to a client's message; none if the message needs none or is malformed.
pub fn reply(message: &[u8], client: Client<'_>, settings: &Settings) -> Option<Reply> {
    let request = DhcpPacket::new_checked(message).ok()?;
    let server = settings.ipv4.gateway();
    let mut requested = None;
    let mut kind = None;
    let mut identifier: Option<&[u8]> = None;
    for option in request.options() {
        match (option.kind, option.data) {
            (OPTION_MESSAGE_TYPE, &[number]) => kind = Some(DhcpMessageType::from(number)),
            (OPTION_REQUESTED_ADDRESS, data) => requested = address(data),
            // The client took the offer of another server.
            (OPTION_SERVER, data) if address(data) != Some(server) => return None,
            (OPTION_CLIENT, data) if !data.is_empty() => identifier = Some(data),
            _ => {}
        }
    }
    let is_ethernet = u16::from(request.hardware_type()) == ETHERNET_HARDWARE && request.hardware_len() == 6;
    let is_request = request.opcode() == DhcpOpCode::Request && request.magic_number() == 0x6382_5363;
    if !is_ethernet || !is_request || request.client_hardware_address() != EthernetAddress(client.mac) {
        return None;
    }
    let current = request.client_ip();
    let asked = kind?;
    let kind = match asked {
        DhcpMessageType::Discover => DhcpMessageType::Offer,
        DhcpMessageType::Request if requested.unwrap_or(current) != client.address => DhcpMessageType::Nak,
        DhcpMessageType::Request | DhcpMessageType::Inform => DhcpMessageType::Ack,
        _ => return None,
    };
    // A client that only informs itself keeps its address.
    let is_given = kind != DhcpMessageType::Nak && asked != DhcpMessageType::Inform;
    let answer = Answer {
        kind,
        transaction: request.transaction_id(),
        current,
        given: is_given.then_some(client.address),
        broadcast: request.flags().contains(DhcpFlags::BROADCAST),
        identifier,
    };
    let destination = match kind {
        // A client whose address is refused does not have it.
        DhcpMessageType::Nak => Ipv4Addr::BROADCAST,
        _ if !current.is_unspecified() => current,
        _ if answer.broadcast => Ipv4Addr::BROADCAST,
        _ => client.address,
    };
    let message = compose(&answer, client, settings)?;
    Some(Reply { message, destination })
}

/// The variable parts of a reply.
struct Answer<'a> {
    kind: DhcpMessageType,
    transaction: u32,
    current: Ipv4Addr,
    given: Option<Ipv4Addr>,
    broadcast: bool,
    identifier: Option<&'a [u8]>,
}

fn compose(answer: &Answer<'_>, client: Client<'_>, settings: &Settings) -> Option<Vec<u8>> {
    let server = settings.ipv4.gateway();
    let is_refusal = answer.kind == DhcpMessageType::Nak;
    let (mtu, server_bytes) = (settings.mtu.to_be_bytes(), server.octets());
    let mask = settings.ipv4.mask().octets();
    let mut options = Vec::new();
    let mut option = |kind, data| options.push(DhcpOption { kind, data });
    if let Some(identifier) = answer.identifier {
        // RFC 6842: clients that share a hardware address know their reply by it.
        option(OPTION_CLIENT, identifier);
    }
    if !is_refusal {
        option(OPTION_MASK, &mask);
        option(OPTION_NAME_SERVER, &server_bytes);
        option(OPTION_DOMAIN, DOMAIN.as_bytes());
        option(OPTION_MTU, &mtu);
        option(OPTION_HOST_NAME, client.name.as_bytes());
    }
    let reply = DhcpRepr {
        message_type: answer.kind,
        transaction_id: answer.transaction,
        secs: 0,
        client_hardware_address: EthernetAddress(client.mac),
        client_ip: if is_refusal {
            Ipv4Addr::UNSPECIFIED
        } else {
            answer.current
        },
        your_ip: answer.given.unwrap_or(Ipv4Addr::UNSPECIFIED),
        server_ip: Ipv4Addr::UNSPECIFIED,
        // Without a router, a guest without a way to the outside sees at once that it reaches nothing else.
        router: (client.outside && !is_refusal).then_some(server),
        subnet_mask: None,
        relay_agent_ip: Ipv4Addr::UNSPECIFIED,
        broadcast: answer.broadcast || is_refusal,
        requested_ip: None,
        client_identifier: None,
        server_identifier: Some(server),
        parameter_request_list: None,
        dns_servers: None,
        max_size: None,
        lease_duration: answer.given.map(|_| LEASE_SECONDS),
        renew_duration: None,
        rebind_duration: None,
        additional_options: &options,
    };
    let mut message = vec![0; reply.buffer_len().max(MESSAGE_BYTES_MIN)];
    reply
        .emit(&mut DhcpPacket::new_unchecked(&mut message[..]))
        .ok()?;
    Some(message)
}

fn address(data: &[u8]) -> Option<Ipv4Addr> {
    Some(Ipv4Addr::from(<[u8; 4]>::try_from(data).ok()?))
}

#[cfg(test)]
mod tests;
