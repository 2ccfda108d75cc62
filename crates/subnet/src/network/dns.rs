//! DNS server of a network: it answers for names and addresses of the network, and leaves others to the
//! host's resolver.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use smoltcp::wire::{DnsFlags, DnsOpcode, DnsPacket, DnsQuestion, DnsRcode};

use super::header::u16_at;

/// Domain of the network's names: the VM `web` is `web` and `web.vm.internal`. ICANN reserves `internal` for
/// private use.
pub const DOMAIN: &str = "vm.internal";
/// Port of DNS.
pub const PORT: u16 = 53;

/// Seconds for which a guest may keep an answer. VMs come and go.
const LIFETIME_SECONDS: u32 = 5;
const HEADER_BYTES: usize = 12;
/// Bytes of an answer by UDP that each guest accepts (RFC 1035).
const DATAGRAM_BYTES: u16 = 512;
const CLASS_INTERNET: u16 = 1;
const TYPE_ADDRESS: u16 = 1;
const TYPE_POINTER: u16 = 12;
const TYPE_ADDRESS_V6: u16 = 28;
const TYPE_OPTIONS: u16 = 41;
const TYPE_ANY: u16 = 255;
/// Bytes of an answer that senders may expect to pass everywhere.
const PAYLOAD_BYTES: u16 = 1232;

/// Addresses of a host of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAddresses {
    /// IPv4 address.
    pub ipv4: Ipv4Addr,
    /// IPv6 address, if the guest has shown that it has one.
    pub ipv6: Option<Ipv6Addr>,
}

/// Names of a network.
pub trait Zone {
    /// Returns the addresses of a host by its name in lower case.
    fn host(&self, name: &str) -> Option<HostAddresses>;

    /// Returns the name of the host with this address.
    fn name_of(&self, address: IpAddr) -> Option<&str>;

    /// Returns whether the address is in one of the network's ranges.
    fn contains(&self, address: IpAddr) -> bool;
}

/// Decision about a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The network answers itself.
    Answer(Vec<u8>),
    /// The host's resolver answers.
    Upstream,
    /// The message is no query.
    Ignore,
}

/// Decides about a message. `upstream` is whether guests may query names of the outside: a network without
/// it answers that such a name does not exist.
pub fn decide(message: &[u8], zone: &dyn Zone, upstream: bool) -> Decision {
    let Ok(packet) = DnsPacket::new_checked(message) else {
        return Decision::Ignore;
    };
    if packet.flags().contains(DnsFlags::RESPONSE) {
        return Decision::Ignore;
    }
    if packet.opcode() != DnsOpcode::Query {
        return Decision::Answer(error(message, DnsRcode::NotImp));
    }
    let Some(question) = question(&packet) else {
        return Decision::Answer(error(message, DnsRcode::FormErr));
    };
    match lookup(&question, zone) {
        Lookup::Found(records) => Decision::Answer(answer(message, &question, DnsRcode::NoError, &records)),
        Lookup::Missing => Decision::Answer(answer(message, &question, DnsRcode::NXDomain, &[])),
        Lookup::Outside if upstream => Decision::Upstream,
        Lookup::Outside => Decision::Answer(answer(message, &question, DnsRcode::NXDomain, &[])),
    }
}

/// Returns the bytes of an answer that a query by UDP accepts: 512, or those that it announces by extended
/// DNS (RFC 6891).
pub fn datagram_bytes_max(query: &[u8]) -> u16 {
    let announced = || {
        let packet = DnsPacket::new_checked(query).ok()?;
        let end = HEADER_BYTES + question(&packet)?.bytes;
        has_options(query, end).then(|| u16_at(query, end + 3)).flatten()
    };
    announced().unwrap_or(0).max(DATAGRAM_BYTES)
}

/// Returns an answer without its records, which says that the whole one is longer than a datagram: the guest
/// asks again by TCP. None if the message is malformed.
pub fn truncated(message: &[u8]) -> Option<Vec<u8>> {
    let packet = DnsPacket::new_checked(message).ok()?;
    let end = HEADER_BYTES + question(&packet)?.bytes;
    let mut answer = message.get(..end)?.to_vec();
    let mut header = DnsPacket::new_unchecked(&mut answer[..]);
    header.set_flags(packet.flags() | DnsFlags::TRUNCATED);
    header.set_answer_record_count(0);
    header.set_authority_record_count(0);
    header.set_additional_record_count(0);
    Some(answer)
}

/// Returns the answer that the host's resolver failed; none if the message is no query.
pub fn server_failure(query: &[u8]) -> Option<Vec<u8>> {
    let packet = DnsPacket::new_checked(query).ok()?;
    let question = question(&packet)?;
    let is_query = !packet.flags().contains(DnsFlags::RESPONSE);
    is_query.then(|| answer(query, &question, DnsRcode::ServFail, &[]))
}

struct Question {
    /// Name in lower case. Characters that no host's name has are replaced by `?`.
    name: String,
    kind: u16,
    /// Bytes of the question in the message.
    bytes: usize,
}

fn question(packet: &DnsPacket<&[u8]>) -> Option<Question> {
    if packet.question_count() != 1 {
        return None;
    }
    let payload = packet.payload();
    let (rest, question) = DnsQuestion::parse(payload).ok()?;
    let mut labels = Vec::new();
    let mut bytes = 0;
    for label in packet.parse_name(question.name) {
        let label = label.ok()?;
        // A name has 255 bytes at most.
        bytes += label.len() + 1;
        if bytes > 255 {
            return None;
        }
        labels.push(label.iter().map(|byte| host_character(*byte)).collect::<String>());
    }
    Some(Question {
        name: labels.join("."),
        kind: question.type_.into(),
        bytes: payload.len() - rest.len(),
    })
}

fn host_character(byte: u8) -> char {
    if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_' {
        char::from(byte.to_ascii_lowercase())
    } else {
        '?'
    }
}

enum Lookup {
    /// The name is the network's; records of another type may exist.
    Found(Vec<Record>),
    Missing,
    Outside,
}

enum Record {
    Address(Ipv4Addr),
    AddressV6(Ipv6Addr),
    Pointer(String),
}

fn lookup(question: &Question, zone: &dyn Zone) -> Lookup {
    if let Some(address) = reverse_address(&question.name) {
        if !zone.contains(address) {
            return Lookup::Outside;
        }
        return match zone.name_of(address) {
            Some(name) if matches!(question.kind, TYPE_POINTER | TYPE_ANY) => {
                Lookup::Found(vec![Record::Pointer(format!("{name}.{DOMAIN}"))])
            }
            Some(_) => Lookup::Found(Vec::new()),
            None => Lookup::Missing,
        };
    }
    let name = question.name.as_str();
    let host = match name.strip_suffix(DOMAIN) {
        // The domain itself has no records.
        Some("") => return Lookup::Found(Vec::new()),
        Some(host) if host.ends_with('.') => &host[..host.len() - 1],
        // Names of one label are never of use to the outside. The empty name is the root.
        _ if !name.contains('.') && !name.is_empty() => name,
        _ => return Lookup::Outside,
    };
    let Some(addresses) = zone.host(host) else {
        return Lookup::Missing;
    };
    let mut records = Vec::new();
    if matches!(question.kind, TYPE_ADDRESS | TYPE_ANY) {
        records.push(Record::Address(addresses.ipv4));
    }
    if matches!(question.kind, TYPE_ADDRESS_V6 | TYPE_ANY) {
        records.extend(addresses.ipv6.map(Record::AddressV6));
    }
    Lookup::Found(records)
}

/// Returns the address whose name is queried by `4.3.2.1.in-addr.arpa` or the like.
fn reverse_address(name: &str) -> Option<IpAddr> {
    if let Some(digits) = name.strip_suffix(".in-addr.arpa") {
        let mut bytes = [0; 4];
        let mut parts = digits.split('.');
        for byte in bytes.iter_mut().rev() {
            *byte = parts.next()?.parse().ok()?;
        }
        return parts.next().is_none().then(|| bytes.into());
    }
    let digits = name.strip_suffix(".ip6.arpa")?;
    let mut address = 0_u128;
    let mut count = 0_u32;
    for digit in digits.split('.').take(33) {
        let digit = (digit.len() == 1).then(|| u128::from_str_radix(digit, 16).ok())??;
        if count == 32 {
            return None;
        }
        address |= digit << (4 * count);
        count += 1;
    }
    (count == 32).then(|| Ipv6Addr::from(address).into())
}

/// Composes an answer without the question, for a message whose question can't be read.
fn error(message: &[u8], code: DnsRcode) -> Vec<u8> {
    header(message, code, 0, 0, 0)
}

fn answer(message: &[u8], question: &Question, code: DnsRcode, records: &[Record]) -> Vec<u8> {
    let end = HEADER_BYTES + question.bytes;
    let has_options = has_options(message, end);
    // Few records, by construction.
    let count = u16::try_from(records.len()).unwrap_or(u16::MAX);
    let mut answer = header(message, code, 1, count, u16::from(has_options));
    answer.extend(message.get(HEADER_BYTES..end).unwrap_or_default());
    for record in records {
        // A pointer to the name in the question.
        answer.extend([0xc0, HEADER_BYTES as u8]);
        let (kind, data) = match record {
            Record::Address(address) => (TYPE_ADDRESS, address.octets().to_vec()),
            Record::AddressV6(address) => (TYPE_ADDRESS_V6, address.octets().to_vec()),
            Record::Pointer(name) => (TYPE_POINTER, encode_name(name)),
        };
        answer.extend(kind.to_be_bytes());
        answer.extend(CLASS_INTERNET.to_be_bytes());
        answer.extend(LIFETIME_SECONDS.to_be_bytes());
        // A name has 255 bytes at most.
        answer.extend(u16::try_from(data.len()).unwrap_or(u16::MAX).to_be_bytes());
        answer.extend(data);
    }
    if has_options {
        answer.push(0);
        answer.extend(TYPE_OPTIONS.to_be_bytes());
        answer.extend(PAYLOAD_BYTES.to_be_bytes());
        answer.extend([0; 6]);
    }
    answer
}

/// Returns whether the record behind the question is that of extended DNS (RFC 6891), which the answer has
/// then, too.
fn has_options(message: &[u8], at: usize) -> bool {
    let no_records = message.get(6..10) == Some(&[0; 4]);
    no_records
        && u16_at(message, 10) != Some(0)
        && message.get(at) == Some(&0)
        && u16_at(message, at + 1) == Some(TYPE_OPTIONS)
}

fn header(message: &[u8], code: DnsRcode, questions: u16, answers: u16, additional: u16) -> Vec<u8> {
    let mut answer = vec![0; HEADER_BYTES];
    let mut packet = DnsPacket::new_unchecked(&mut answer[..]);
    let query = DnsPacket::new_unchecked(message);
    packet.set_transaction_id(query.transaction_id());
    // The code first: the flags leave it as it is.
    let recursion = query.flags() & DnsFlags::RECURSION_DESIRED;
    let flags = DnsFlags::RESPONSE | DnsFlags::AUTHORITATIVE | DnsFlags::RECURSION_AVAILABLE | recursion;
    packet.set_flags(flags);
    packet.set_opcode(query.opcode());
    packet.set_question_count(questions);
    packet.set_answer_record_count(answers);
    packet.set_additional_record_count(additional);
    answer[3] |= u8::from(code) & 0x0f;
    answer
}

fn encode_name(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        // Names of hosts have 63 characters at most.
        let label = &label.as_bytes()[..label.len().min(63)];
        bytes.push(label.len() as u8);
        bytes.extend(label);
    }
    bytes.push(0);
    bytes
}

#[cfg(test)]
mod tests;
