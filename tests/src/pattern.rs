//! Contents that both sides can compute: numbers from a seed, and a digest to compare them.
//!
//! Cheap without optimisation, since guests in a lab host are slow. The digest finds lost, stale, swapped and
//! torn blocks; it is not meant to withstand an attacker.

/// splitmix64: each step gives 64 bits that depend on every bit of the seed.
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// Starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Fills `bytes`, a multiple of 8.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
    }
}

/// A number in which every bit depends on every bit of `value`.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Digest of bytes that arrive in pieces.
#[derive(Clone, Debug, Default)]
pub struct Digest {
    state: u64,
    rest: Vec<u8>,
    bytes: u64,
}

impl Digest {
    /// Adds the next bytes.
    pub fn add(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if !self.rest.is_empty() {
            let take = bytes.len().min(8 - self.rest.len());
            self.rest.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.rest.len() == 8 {
                let word = std::mem::take(&mut self.rest);
                self.words(&word);
            }
        }
        let whole = bytes.len() / 8 * 8;
        self.words(&bytes[..whole]);
        self.rest.extend_from_slice(&bytes[whole..]);
    }

    fn words(&mut self, bytes: &[u8]) {
        let mut state = self.state;
        for word in bytes.chunks_exact(8) {
            let word = u64::from_le_bytes([
                word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
            ]);
            state = (state.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        self.state = state;
    }

    /// The digest of everything added, in hexadecimal, and the number of bytes.
    pub fn finish(&self) -> String {
        let mut last = [0; 8];
        last[..self.rest.len()].copy_from_slice(&self.rest);
        let state = mix(self.state ^ u64::from_le_bytes(last)) ^ mix(self.bytes);
        format!("{:016x}-{}", mix(state), self.bytes)
    }
}

/// Digest of bytes in memory.
pub fn digest(bytes: &[u8]) -> String {
    let mut digest = Digest::default();
    digest.add(bytes);
    digest.finish()
}

/// Random writes to a disk, the same on both sides.
#[derive(Clone, Debug)]
pub struct DiskWrites {
    numbers: Numbers,
    disk_bytes: u64,
    left: u32,
}

/// Write of a pattern's bytes to a disk.
pub struct DiskWrite {
    /// Offset, a multiple of 512.
    pub offset: u64,
    /// Contents; 512 bytes to 64 KiB, a multiple of 512.
    pub bytes: Vec<u8>,
}

impl DiskWrites {
    /// Makes `count` writes in a disk of `disk_bytes` bytes, a multiple of 512.
    pub fn new(seed: u64, count: u32, disk_bytes: u64) -> Self {
        Self {
            numbers: Numbers::new(seed),
            disk_bytes,
            left: count,
        }
    }

    /// Applies them to a copy of the disk in memory.
    pub fn apply(self, disk: &mut [u8]) {
        for write in self {
            let offset = write.offset as usize;
            disk[offset..offset + write.bytes.len()].copy_from_slice(&write.bytes);
        }
    }
}

impl Iterator for DiskWrites {
    type Item = DiskWrite;

    fn next(&mut self) -> Option<DiskWrite> {
        self.left = self.left.checked_sub(1)?;
        let sectors = 1 + self.numbers.below(128).min(self.disk_bytes / 512 - 1);
        let offset = self.numbers.below(self.disk_bytes / 512 - sectors + 1) * 512;
        let mut bytes = vec![0; sectors as usize * 512];
        self.numbers.fill(&mut bytes);
        Some(DiskWrite { offset, bytes })
    }
}

/// A disk's sector.
pub const SECTOR_BYTES: usize = 512;

/// Contents of a disk's sectors, as 8 bytes for each: the sector's bytes follow from its number.
///
/// A sector that was written starts with its writer's [`canary`], so that it can be recognised wherever it
/// turns up.
#[derive(Clone, Debug)]
pub struct Sectors {
    contents: Vec<u64>,
    written: u64,
}

/// The content of zeroes; that of sector `n` of a base is `n + 1`.
const ZEROES: u64 = 0;
/// Contents that were written have this, the writer, and a number of its own.
const WRITTEN: u64 = 1 << 63;
const WRITER_SHIFT: u32 = 40;

/// The 16 bytes that a writer's sectors start with.
pub fn canary(writer: u64) -> [u8; 16] {
    let mut canary = [0; 16];
    Numbers::new(mix(WRITTEN | writer)).fill(&mut canary);
    canary
}

impl Sectors {
    /// A base of `sectors`, each with bytes of its own.
    pub fn base(sectors: u64) -> Self {
        Self {
            contents: (1..=sectors).collect(),
            written: 0,
        }
    }

    /// The bytes of a whole base.
    pub fn base_bytes(sectors: u64) -> Vec<u8> {
        let mut bytes = vec![0; sectors as usize * SECTOR_BYTES];
        Self::base(sectors).fill(0, &mut bytes);
        bytes
    }

    /// Number of sectors; never zero.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.contents.len() as u64
    }

    fn range(&mut self, first: u64, count: u64) -> &mut [u64] {
        &mut self.contents[first as usize..(first + count) as usize]
    }

    /// Gives sectors contents that were never there; `writer` is below 2^23.
    pub fn renew(&mut self, first: u64, count: u64, writer: u64) {
        for sector in first..first + count {
            self.written += 1;
            self.contents[sector as usize] = WRITTEN | writer << WRITER_SHIFT | self.written;
        }
    }

    /// Makes sectors zero.
    pub fn zero(&mut self, first: u64, count: u64) {
        self.range(first, count).fill(ZEROES);
    }

    /// Gives sectors the present contents of those at `from`.
    pub fn copy(&mut self, from: u64, to: u64, count: u64) {
        let from = from as usize;
        self.contents
            .copy_within(from..from + count as usize, to as usize);
    }

    /// Writes the sectors' bytes into `bytes`.
    pub fn fill(&self, first: u64, bytes: &mut [u8]) {
        let contents = &self.contents[first as usize..];
        for (content, sector) in contents.iter().zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
            Self::sector(*content, sector);
        }
    }

    fn sector(content: u64, bytes: &mut [u8]) {
        if content == ZEROES {
            return bytes.fill(0);
        }
        Numbers::new(mix(content)).fill(bytes);
        if content & WRITTEN != 0 {
            let writer = (content & !WRITTEN) >> WRITER_SHIFT;
            bytes[..16].copy_from_slice(&canary(writer));
        }
    }

    /// Compares bytes that were read from the sectors; the error names the wrong sector and the difference.
    pub fn check(&self, first: u64, bytes: &[u8]) -> Result<(), String> {
        let mut wanted = [0; SECTOR_BYTES];
        let contents = &self.contents[first as usize..];
        for (at, found) in bytes.chunks_exact(SECTOR_BYTES).enumerate() {
            Self::sector(contents[at], &mut wanted);
            if found != wanted {
                let byte = found.iter().zip(&wanted).position(|(a, b)| a != b).unwrap_or(0);
                return Err(format!(
                    "sector {}: wrong from byte {byte}: {:02x?} instead of {:02x?} (content {:x})",
                    first + at as u64,
                    &found[byte & !15..][..16],
                    &wanted[byte & !15..][..16],
                    contents[at]
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Digest, DiskWrites, SECTOR_BYTES, Sectors, canary, digest};

    #[test]
    fn sectors_know_what_was_written_copied_and_zeroed_and_by_whom() {
        let mut disk = Sectors::base(64);
        let mut bytes = Sectors::base_bytes(64);
        disk.check(0, &bytes).unwrap();
        disk.renew(8, 4, 7);
        assert!(disk.check(0, &bytes).is_err(), "an old sector passed");
        disk.copy(10, 30, 2);
        disk.zero(11, 1);
        disk.fill(0, &mut bytes);
        disk.check(0, &bytes).unwrap();
        let sector = |number: usize| &bytes[number * SECTOR_BYTES..][..SECTOR_BYTES];
        assert!(sector(8).starts_with(&canary(7)) && sector(30).starts_with(&canary(7)));
        assert_ne!(canary(7), canary(8));
        assert!(sector(11).iter().all(|byte| *byte == 0));
        assert_eq!(sector(30), sector(10), "the copy is of the sector as it was");
        bytes[30 * SECTOR_BYTES + 511] ^= 1;
        assert!(
            disk.check(0, &bytes)
                .unwrap_err()
                .starts_with("sector 30: wrong from byte 511")
        );
    }

    #[test]
    fn a_digest_does_not_depend_on_the_pieces_but_on_every_byte() {
        let mut bytes: Vec<u8> = (0..100u8).collect();
        let whole = digest(&bytes);
        for cut in [1, 7, 8, 9, 50, 99] {
            let mut pieces = Digest::default();
            pieces.add(&bytes[..cut]);
            pieces.add(&bytes[cut..]);
            assert_eq!(pieces.finish(), whole, "cut at {cut}");
        }
        bytes.swap(16, 24);
        assert_ne!(digest(&bytes), whole);
        assert_ne!(digest(&[0; 8]), digest(&[0; 16]));
    }

    #[test]
    fn writes_stay_inside_the_disk() {
        let mut disk = vec![0; 70 << 10];
        let bytes = disk.len() as u64;
        DiskWrites::new(3, 200, bytes).apply(&mut disk);
        assert!(disk.iter().filter(|byte| **byte != 0).count() > 60 << 10);
    }
}
