//! Hardware addresses of network cards.

use crate::SubnetError;

/// Returns a locally administered unicast address for card `index` of the VM `name`. The same name has the
/// same address on any host.
pub fn mac_address(name: &str, index: usize) -> [u8; 6] {
    // FNV-1a, 64 bits: a fixed, published function, unlike the standard library's hashers.
    let bytes = name.bytes().chain([0]).chain((index as u64).to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let [a, b, c, d, e, f, ..] = (hash ^ (hash >> 48)).to_le_bytes();
    [(a & 0xfc) | 0x02, b, c, d, e, f]
}

/// Parses `52:54:00:12:34:56`; refuses a multicast address and all zeroes.
pub fn parse_mac(text: &str) -> Result<[u8; 6], SubnetError> {
    let wrong = || SubnetError::Mac(text.to_owned());
    let mut address = [0_u8; 6];
    let mut parts = text.split(':');
    for byte in &mut address {
        let part = parts.next().ok_or_else(wrong)?;
        if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
    }
    if parts.next().is_some() || address[0] & 1 != 0 || address == [0; 6] {
        return Err(wrong());
    }
    Ok(address)
}

/// Writes an address as [`parse_mac`] reads it.
pub fn write_mac(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_local_unicast_stable_and_distinct() {
        let mut seen = std::collections::HashSet::new();
        for name in ["a", "b", "vm-1", "vm-2"] {
            for index in 0..64 {
                let address = mac_address(name, index);
                assert_eq!(address[0] & 3, 2);
                assert_eq!(address, mac_address(name, index));
                assert!(seen.insert(address));
            }
        }
    }

    #[test]
    fn an_address_is_the_same_in_each_release() {
        assert_eq!(mac_address("web", 1), [0x22, 0x79, 0x3e, 0xf0, 0x8b, 0x0a]);
    }

    #[test]
    fn only_a_cards_address_is_read() {
        assert_eq!(
            parse_mac("52:54:00:12:34:aF").unwrap(),
            [0x52, 0x54, 0, 0x12, 0x34, 0xaf]
        );
        assert_eq!(write_mac([0x52, 0x54, 0, 0x12, 0x34, 0xaf]), "52:54:00:12:34:af");
        for text in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "01:00:00:00:00:00",
            "00:00:00:00:00:00",
            "5:54:00:12:34:56",
        ] {
            assert!(parse_mac(text).is_err(), "{text:?}");
        }
    }
}
