//! Files of captured frames in the format of pcap, as Wireshark and tcpdump read it.

use std::time::Duration;

/// Magic number of files whose times have nanoseconds.
const MAGIC: u32 = 0xa1b2_3c4d;
/// Largest frame that a file holds.
pub const FRAME_MAX: usize = 65_535 + 14;
const LINK_ETHERNET: u32 = 1;

/// Returns the header of a file.
pub fn file_header() -> [u8; 24] {
    let mut header = [0; 24];
    header[..4].copy_from_slice(&MAGIC.to_le_bytes());
    // Version 2.4.
    header[4..6].copy_from_slice(&2_u16.to_le_bytes());
    header[6..8].copy_from_slice(&4_u16.to_le_bytes());
    header[16..20].copy_from_slice(&(FRAME_MAX as u32).to_le_bytes());
    header[20..].copy_from_slice(&LINK_ETHERNET.to_le_bytes());
    header
}

/// Returns the header of a frame, which follows it in the file, and the number of the frame's bytes that
/// follow: at most [`FRAME_MAX`]. `since_epoch` is the time since 1970.
pub fn frame_header(since_epoch: Duration, frame_bytes: usize) -> ([u8; 16], usize) {
    let kept = frame_bytes.min(FRAME_MAX);
    let mut header = [0; 16];
    // The format's seconds end in the year 2106.
    let seconds = u32::try_from(since_epoch.as_secs()).unwrap_or(u32::MAX);
    header[..4].copy_from_slice(&seconds.to_le_bytes());
    header[4..8].copy_from_slice(&since_epoch.subsec_nanos().to_le_bytes());
    header[8..12].copy_from_slice(&(kept as u32).to_le_bytes());
    let whole = u32::try_from(frame_bytes).unwrap_or(u32::MAX);
    header[12..].copy_from_slice(&whole.to_le_bytes());
    (header, kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_the_published_layout() {
        // As `tcpdump --time-stamp-precision=nano` writes it, but for the largest frame.
        let mut expected = vec![0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        expected.extend([0x0d, 0, 1, 0, 1, 0, 0, 0]);
        assert_eq!(file_header()[..], expected);
        let time = Duration::new(0x0102_0304, 5);
        let (header, kept) = frame_header(time, 60);
        assert_eq!(header, [4, 3, 2, 1, 5, 0, 0, 0, 60, 0, 0, 0, 60, 0, 0, 0]);
        assert_eq!(kept, 60);
    }

    #[test]
    fn oversized_frame_is_cut_and_its_length_is_kept() {
        let (header, kept) = frame_header(Duration::ZERO, FRAME_MAX + 1);
        assert_eq!(kept, FRAME_MAX);
        assert_eq!(header[8..12], (FRAME_MAX as u32).to_le_bytes());
        assert_eq!(header[12..], (FRAME_MAX as u32 + 1).to_le_bytes());
    }
}
