//! The Internet checksum (RFC 1071).

/// Returns the sum of all words of 16 bits in network byte order, with ones' complement. A last odd byte is a
/// word's high byte.
pub fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks_exact(4);
    let mut last = [0; 4];
    let rest = words.remainder();
    last[..rest.len()].copy_from_slice(rest);
    // 2^32 such words have room in 64 bits; a frame has 2^14.
    let total = words.fold(u64::from(u32::from_be_bytes(last)), |sum, word| {
        sum + u64::from(u32::from_be_bytes([word[0], word[1], word[2], word[3]]))
    });
    fold(total)
}

/// Adds with ones' complement.
pub fn add(one: u16, other: u16) -> u16 {
    fold(u64::from(one) + u64::from(other))
}

fn fold(mut total: u64) -> u16 {
    while total > 0xffff {
        total = (total >> 16) + (total & 0xffff);
    }
    total as u16
}

/// Completes the checksum at `at` of a message, where the sum of its pseudo-header is. `at` is inside.
pub fn complete(message: &mut [u8], at: usize) {
    let checksum = match !sum(message) {
        // Zero means no checksum of UDP; for TCP both are equal.
        0 => u16::MAX,
        checksum => checksum,
    };
    message[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}
