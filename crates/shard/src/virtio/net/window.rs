//! Keeps the guest's TCP connections through passt alive if a receiver on the host is slow.
//!
//! passt (at least Debian 12's) reports a closed window to the guest. When the window opens again, passt
//! records that and sends nothing. Linux then probes with segments without data, to which passt does not
//! reply: the connection stalls until it is reset. So the guest never receives a closed window. The smallest
//! open one (one unit, at most 128 bytes of passt's) makes the guest probe with data, and passt acknowledges
//! data together with its window. passt drops data that it cannot forward, and the guest retransmits, as on
//! any network.

const ETHER_TYPE: usize = 12;
const IP: usize = 14;
const IPV4: [u8; 2] = [0x08, 0x00];
const IPV6: [u8; 2] = [0x86, 0xdd];
const IPV6_HEADER_BYTES: usize = 40;
const TCP: u8 = 6;
/// Offsets of flags, window and checksum in a TCP header.
const FLAGS: usize = 13;
const WINDOW: usize = 14;
const CHECKSUM: usize = 16;
/// SYN and RST: such segments announce no window.
const SYN_RST: u8 = 0x02 | 0x04;

/// Opens a closed window in `frame` by one unit, if it is a TCP segment with one. Other frames are unchanged.
pub fn keep_open(frame: &mut [u8]) {
    if let Some(tcp) = tcp_header(frame)
        && let Some(header) = frame.get_mut(tcp..tcp + CHECKSUM + 2)
        && header[FLAGS] & SYN_RST == 0
        && header[WINDOW..WINDOW + 2] == [0, 0]
    {
        header[WINDOW + 1] = 1;
        // RFC 1624, equation 3: complement of (complement of the old sum + complement of the old word + the
        // new one). The middle term is 0xffff, which adds nothing.
        let old = u16::from_be_bytes([header[CHECKSUM], header[CHECKSUM + 1]]);
        let sum = u32::from(!old) + 1;
        // The sum is at most 0x1_0000, so that one fold suffices.
        let folded = (sum & 0xffff) + (sum >> 16);
        header[CHECKSUM..CHECKSUM + 2].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    }
}

/// Returns the offset of the TCP header, if `frame` is IP directly followed by TCP and not a later fragment.
fn tcp_header(frame: &[u8]) -> Option<usize> {
    let kind = frame.get(ETHER_TYPE..IP)?;
    let ip = &frame[IP..];
    if kind == IPV4 {
        let header = usize::from(ip.first()? & 15) * 4;
        let fragment = u16::from_be_bytes([*ip.get(6)?, *ip.get(7)?]) & 0x1fff;
        (*ip.get(9)? == TCP && header >= 20 && fragment == 0).then_some(IP + header)
    } else if kind == IPV6 {
        (*ip.get(6)? == TCP).then_some(IP + IPV6_HEADER_BYTES)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A TCP segment of 20 bytes in IPv4 or IPv6 with a checksum over it (the addresses are zero).
    fn segment(kind: [u8; 2], flags: u8, window: u16) -> Vec<u8> {
        let mut frame = vec![0; IP];
        frame[ETHER_TYPE..].copy_from_slice(&kind);
        let mut header = vec![0; if kind == IPV4 { 20 } else { IPV6_HEADER_BYTES }];
        if kind == IPV4 {
            header[0] = 0x45;
            header[9] = TCP;
        } else {
            header[6] = TCP;
        }
        frame.extend(header);
        let mut tcp = vec![0x15, 0xb3, 0xcf, 0x40, 1, 2, 3, 4, 5, 6, 7, 8, 0x50, flags];
        tcp.extend(window.to_be_bytes());
        tcp.extend([0; 4]);
        let sum = checksum(&tcp);
        tcp[CHECKSUM..CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
        frame.extend(tcp);
        frame
    }

    fn checksum(bytes: &[u8]) -> u16 {
        let mut sum: u32 = bytes
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    #[test]
    fn a_closed_window_opens_by_one_and_the_checksum_holds() {
        for kind in [IPV4, IPV6] {
            let mut frame = segment(kind, 0x10, 0);
            keep_open(&mut frame);
            assert_eq!(frame, segment(kind, 0x10, 1));
            let tcp = tcp_header(&frame).unwrap();
            assert_eq!(checksum(&frame[tcp..]), 0);
        }
    }

    #[test]
    fn every_checksum_survives() {
        for sequence in 0..=u16::MAX {
            let mut frame = segment(IPV4, 0x10, 0);
            let tcp = tcp_header(&frame).unwrap();
            frame[tcp + 4..tcp + 6].copy_from_slice(&sequence.to_be_bytes());
            frame[tcp + CHECKSUM..tcp + CHECKSUM + 2].fill(0);
            let sum = checksum(&frame[tcp..]);
            frame[tcp + CHECKSUM..tcp + CHECKSUM + 2].copy_from_slice(&sum.to_be_bytes());
            keep_open(&mut frame);
            assert_eq!(checksum(&frame[tcp..]), 0, "sequence {sequence}");
        }
    }

    #[test]
    fn all_else_stays_as_it_is() {
        let mut fragment = segment(IPV4, 0x10, 0);
        fragment[IP + 7] = 1;
        let mut udp = segment(IPV4, 0x10, 0);
        udp[IP + 9] = 17;
        let whole = segment(IPV4, 0x10, 0);
        let mut frames = vec![
            segment(IPV4, 0x10, 7),
            segment(IPV4, 0x04, 0),
            segment(IPV6, 0x12, 0),
            fragment,
            udp,
        ];
        frames.extend((0..IP + 20 + CHECKSUM + 2).map(|length| whole[..length].to_vec()));
        for mut frame in frames {
            let before = frame.clone();
            keep_open(&mut frame);
            assert_eq!(frame, before);
        }
    }
}
