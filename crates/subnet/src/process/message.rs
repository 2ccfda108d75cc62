//! Messages to a filter's process: lists of barred addresses. Pure.
//!
//! Each is one packet of a `SOCK_SEQPACKET` socket: whole or absent. The process sends a single byte to
//! request one.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::filter::Barred;

/// Greatest length of a message, bytes: 32,000 IPv4 addresses, or 8,000 of IPv6.
pub const MESSAGE_BYTES_MAX: usize = 128 << 10;
/// Byte by which the process requests a list.
pub const ASK: u8 = b'?';
const SAME: u8 = 0;
const LIST: u8 = 1;
const V4_BYTES: usize = 4;
const V6_BYTES: usize = 16;

/// A message to a filter's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The list is unchanged.
    Same,
    /// The addresses that the filter bars from now on.
    List(Barred),
}

impl Message {
    /// Bytes of a message that nothing has changed.
    pub const SAME: [u8; 1] = [SAME];

    /// Returns the bytes of a list; none if the addresses are too many for a message.
    pub fn list(barred: &Barred) -> Option<Vec<u8>> {
        let mut bytes = vec![LIST];
        for set in [&barred.own, &barred.cluster] {
            let (mut v4, mut v6) = (Vec::new(), Vec::new());
            for address in set {
                match address {
                    IpAddr::V4(address) => v4.extend(address.octets()),
                    IpAddr::V6(address) => v6.extend(address.octets()),
                }
            }
            for (addresses, size) in [(v4, V4_BYTES), (v6, V6_BYTES)] {
                let count = u16::try_from(addresses.len() / size).ok()?;
                bytes.extend(count.to_le_bytes());
                bytes.extend(addresses);
            }
        }
        (bytes.len() <= MESSAGE_BYTES_MAX).then_some(bytes)
    }

    /// Parses a message; returns none if the bytes are no message.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = bytes.split_first()?;
        let message = match *kind {
            SAME => Self::Same,
            LIST => Self::List(Barred {
                own: addresses(&mut rest)?,
                cluster: addresses(&mut rest)?,
            }),
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

/// Takes one set of addresses from the beginning of `bytes`.
fn addresses(bytes: &mut &[u8]) -> Option<HashSet<IpAddr>> {
    let v4 = numbers::<V4_BYTES>(bytes)?.map(|octets| Ipv4Addr::from(octets).into());
    let mut set: HashSet<IpAddr> = v4.collect();
    set.extend(numbers::<V6_BYTES>(bytes)?.map(|octets| IpAddr::from(Ipv6Addr::from(octets))));
    Some(set)
}

/// Takes a count and so many addresses of `SIZE` bytes from the beginning of `bytes`.
fn numbers<'a, const SIZE: usize>(
    bytes: &mut &'a [u8],
) -> Option<impl Iterator<Item = [u8; SIZE]> + use<'a, SIZE>> {
    let (count, rest) = bytes.split_first_chunk()?;
    let (addresses, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*count)) * SIZE)?;
    *bytes = rest;
    let whole = |octets: &[u8]| octets.first_chunk().copied();
    Some(addresses.chunks_exact(SIZE).filter_map(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn barred() -> Barred {
        let set = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        Barred {
            own: set(&["127.0.0.1", "::1", "192.0.2.7", "::ffff:192.0.2.7"]),
            cluster: set(&["198.51.100.3", "2001:db8::3"]),
        }
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for list in [barred(), Barred::default()] {
            let bytes = Message::list(&list).unwrap();
            assert_eq!(Message::read(&bytes), Some(Message::List(list)));
        }
        assert_eq!(Message::read(&Message::SAME), Some(Message::Same));
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        let whole = Message::list(&barred()).unwrap();
        for end in 0..whole.len() {
            assert_eq!(Message::read(&whole[..end]), None, "{end} bytes");
        }
        let longer = [&whole[..], &[0]].concat();
        for bytes in [&longer[..], &[SAME, SAME], &[2], &[LIST, 0xff, 0xff]] {
            assert_eq!(Message::read(bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn list_that_is_too_long_for_a_message_is_not_cut() {
        let addresses = |count: u32| Barred {
            own: (0..count).map(|number| Ipv4Addr::from(number).into()).collect(),
            ..Barred::default()
        };
        assert!(Message::list(&addresses(32_000)).is_some());
        assert_eq!(Message::list(&addresses(40_000)), None);
        assert_eq!(Message::list(&addresses(70_000)), None);
    }
}
