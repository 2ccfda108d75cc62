//! KVM's statistics of one vCPU, in the binary form of KVM_GET_STATS_FD (Linux,
//! `Documentation/virt/kvm/api.rst`).
//!
//! A header is followed by the id string, the descriptors and the data, each at an offset that the header
//! names. The file comes from a shard, which a guest may have taken over, so any bytes are possible. Reads
//! are bounded, and bytes that make no sense are an error. The caller checks the file's type first, so that
//! the figures are KVM's own.

use std::time::Duration;

/// Greatest length of the file that is read, bytes. On Linux 6.18 (x86-64) a vCPU's has below 8 KiB.
pub const STATISTICS_BYTES_MAX: usize = 64 << 10;
/// Greatest number of descriptors. Linux 6.18 (x86-64) has 52.
const DESCRIPTORS_MAX: usize = 512;
/// Greatest length of a name with its end, bytes. Linux has 48.
const NAME_BYTES_MAX: usize = 256;
const HEADER_BYTES: usize = 24;
/// Length of a descriptor without its name, bytes.
const DESCRIPTOR_BYTES: usize = 16;

const TYPE_MASK: u32 = 0xF;
const TYPE_CUMULATIVE: u32 = 0;
const TYPE_INSTANT: u32 = 1;
const UNIT_MASK: u32 = 0xF0;
const UNIT_NONE: u32 = 0;
const UNIT_SECONDS: u32 = 2 << 4;
const UNIT_BOOLEAN: u32 = 4 << 4;
const BASE_MASK: u32 = 0xF00;
const BASE_POW10: u32 = 0;
/// Exponent of nanoseconds in a base of ten.
const NANO: i16 = -9;

/// Names of the statistics that are read.
const KNOWN: [&str; 6] = [
    "exits",
    "halt_exits",
    "halt_wait_ns",
    "halt_poll_success_ns",
    "halt_poll_fail_ns",
    "blocking",
];

/// KVM's statistics of a vCPU since its creation. KVM leaves out what it does not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VcpuStatistics {
    /// KVM's name of the vCPU, such as `kvm-4711/vcpu-0`.
    pub id: String,
    /// Exits from the guest, those that KVM served by itself included (`exits`).
    pub exits: Option<u64>,
    /// Exits because the guest halted (`halt_exits`).
    pub halts: Option<u64>,
    /// Offset of the number of halts in the file, at which it may be read again.
    pub halts_at: Option<u64>,
    /// Time for which the halted vCPU's thread was blocked (`halt_wait_ns`), without a wait that goes on.
    pub halt_wait: Option<Duration>,
    /// Time for which KVM polled for an interrupt before it blocked the thread (`halt_poll_success_ns`,
    /// `halt_poll_fail_ns`).
    pub halt_poll: Option<Duration>,
    /// Whether the thread is blocked in a halt now (`blocking`).
    pub is_halted: Option<bool>,
}

/// Reason why bytes are not a vCPU's statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("KVM's statistics of a vCPU are malformed: {0}")]
pub struct Malformed(&'static str);

impl VcpuStatistics {
    /// Returns the time that the vCPU was halted, as far as KVM counted it.
    pub fn halted(&self) -> Option<Duration> {
        match (self.halt_wait, self.halt_poll) {
            (None, None) => None,
            (wait, poll) => Some(wait.unwrap_or_default().saturating_add(poll.unwrap_or_default())),
        }
    }

    /// Parses the whole file.
    ///
    /// # Errors
    /// Fails if an offset, a length or a number is out of bounds, or a name is no text.
    pub fn parse(file: &[u8]) -> Result<Self, Malformed> {
        if file.len() > STATISTICS_BYTES_MAX {
            return Err(Malformed("too long"));
        }
        let header = file.get(..HEADER_BYTES).ok_or(Malformed("no header"))?;
        let field = |index: usize| word(header, 4 * index).ok_or(Malformed("no header"));
        let (name_bytes, count) = (field(1)?, field(2)?);
        let (id, descriptors, data) = (field(3)?, field(4)?, field(5)?);
        if !(1..=NAME_BYTES_MAX).contains(&name_bytes) {
            return Err(Malformed("length of names"));
        }
        if count > DESCRIPTORS_MAX {
            return Err(Malformed("number of statistics"));
        }
        let mut statistics = Self {
            id: text(file, id, name_bytes)?.to_owned(),
            ..Self::default()
        };
        let length = DESCRIPTOR_BYTES + name_bytes;
        for index in 0..count {
            let start = descriptors.saturating_add(index * length);
            let descriptor = part(file, start, length).ok_or(Malformed("descriptor out of bounds"))?;
            statistics.note(file, descriptor, name_bytes, data)?;
        }
        Ok(statistics)
    }

    /// Takes the value of one descriptor, if it is one of ours and in the expected form.
    fn note(
        &mut self,
        file: &[u8],
        descriptor: &[u8],
        name_bytes: usize,
        data: usize,
    ) -> Result<(), Malformed> {
        let name = text(descriptor, DESCRIPTOR_BYTES, name_bytes)?;
        if !KNOWN.contains(&name) {
            return Ok(());
        }
        let short = Malformed("descriptor out of bounds");
        let &[f0, f1, f2, f3, e0, e1, s0, s1] = descriptor.first_chunk::<8>().ok_or(short)?;
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        let (exponent, size) = (i16::from_le_bytes([e0, e1]), u16::from_le_bytes([s0, s1]));
        let offset = word(descriptor, 8).ok_or(short)?;
        if size != 1 {
            return Err(Malformed("size of a counter"));
        }
        let value = part(file, data.saturating_add(offset), 8)
            .and_then(|value| value.first_chunk::<8>())
            .ok_or(Malformed("value out of bounds"))?;
        let value = u64::from_le_bytes(*value);
        let kind = (flags & TYPE_MASK, flags & UNIT_MASK);
        let is_plain = flags & BASE_MASK == BASE_POW10 && exponent == 0;
        let is_nano = flags & BASE_MASK == BASE_POW10 && exponent == NANO;
        match name {
            "blocking" if matches!(kind, (TYPE_INSTANT, UNIT_BOOLEAN | UNIT_NONE)) => {
                self.is_halted = Some(value != 0);
            }
            "exits" if kind == (TYPE_CUMULATIVE, UNIT_NONE) && is_plain => self.exits = Some(value),
            "halt_exits" if kind == (TYPE_CUMULATIVE, UNIT_NONE) && is_plain => {
                self.halts = Some(value);
                self.halts_at = u64::try_from(data.saturating_add(offset)).ok();
            }
            "halt_wait_ns" if kind == (TYPE_CUMULATIVE, UNIT_SECONDS) && is_nano => {
                self.halt_wait = Some(Duration::from_nanos(value));
            }
            "halt_poll_success_ns" | "halt_poll_fail_ns"
                if kind == (TYPE_CUMULATIVE, UNIT_SECONDS) && is_nano =>
            {
                let before = self.halt_poll.unwrap_or_default();
                self.halt_poll = Some(before.saturating_add(Duration::from_nanos(value)));
            }
            // Another kernel may count in another unit.
            _ => {}
        }
        Ok(())
    }
}

/// Returns a little-endian number of 32 bits.
fn word(bytes: &[u8], offset: usize) -> Option<usize> {
    let word = part(bytes, offset, 4)?.first_chunk::<4>()?;
    usize::try_from(u32::from_le_bytes(*word)).ok()
}

fn part(bytes: &[u8], start: usize, length: usize) -> Option<&[u8]> {
    bytes.get(start..start.checked_add(length)?)
}

/// Returns the text of at most `length` bytes before its end, a zero.
fn text(bytes: &[u8], start: usize, length: usize) -> Result<&str, Malformed> {
    let field = part(bytes, start, length).ok_or(Malformed("name out of bounds"))?;
    let end = field
        .iter()
        .position(|byte| *byte == 0)
        .ok_or(Malformed("name without end"))?;
    let name = &field[..end];
    let is_text = name.iter().all(|byte| byte.is_ascii_graphic());
    let name = is_text.then(|| std::str::from_utf8(name).ok()).flatten();
    name.ok_or(Malformed("name that is no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME_BYTES: usize = 48;
    const CUMULATIVE_NS: u32 = UNIT_SECONDS;

    /// A file as KVM writes it: each statistic with flags, exponent and value.
    fn file(statistics: &[(&str, u32, i16, u64)]) -> Vec<u8> {
        let descriptors = HEADER_BYTES + NAME_BYTES;
        let data = descriptors + statistics.len() * (DESCRIPTOR_BYTES + NAME_BYTES);
        let mut file = Vec::new();
        for field in [0, NAME_BYTES, statistics.len(), HEADER_BYTES, descriptors, data] {
            file.extend((field as u32).to_le_bytes());
        }
        let name = |name: &str| {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(NAME_BYTES, 0);
            bytes
        };
        file.extend(name("kvm-4711/vcpu-3"));
        for (index, (known, flags, exponent, _)) in statistics.iter().enumerate() {
            file.extend(flags.to_le_bytes());
            file.extend(exponent.to_le_bytes());
            file.extend(1_u16.to_le_bytes());
            file.extend((8 * index as u32).to_le_bytes());
            file.extend(0_u32.to_le_bytes());
            file.extend(name(known));
        }
        for (.., value) in statistics {
            file.extend(value.to_le_bytes());
        }
        file
    }

    fn usual() -> Vec<u8> {
        file(&[
            ("halt_poll_success_ns", CUMULATIVE_NS, NANO, 5),
            ("halt_poll_fail_ns", CUMULATIVE_NS, NANO, 7),
            ("halt_wait_ns", CUMULATIVE_NS, NANO, 1_000),
            ("blocking", TYPE_INSTANT | UNIT_BOOLEAN, 0, 1),
            ("pf_taken", TYPE_CUMULATIVE, 0, 9),
            ("exits", TYPE_CUMULATIVE, 0, 100),
            ("halt_exits", TYPE_CUMULATIVE, 0, 42),
        ])
    }

    #[test]
    fn statistics_of_a_vcpu_are_read_in_kvms_units() {
        let statistics = VcpuStatistics::parse(&usual()).unwrap();
        assert_eq!(
            statistics,
            VcpuStatistics {
                id: "kvm-4711/vcpu-3".to_owned(),
                exits: Some(100),
                halts: Some(42),
                halts_at: Some((usual().len() - 8) as u64),
                halt_wait: Some(Duration::from_nanos(1_000)),
                halt_poll: Some(Duration::from_nanos(12)),
                is_halted: Some(true),
            }
        );
        assert_eq!(statistics.halted(), Some(Duration::from_nanos(1_012)));
    }

    #[test]
    fn statistic_that_kvm_does_not_have_or_counts_in_another_unit_is_absent() {
        let statistics = VcpuStatistics::parse(&file(&[])).unwrap();
        assert_eq!((statistics.halts, statistics.halted()), (None, None));
        let others = file(&[
            ("halt_wait_ns", CUMULATIVE_NS, -6, 1),
            ("exits", TYPE_CUMULATIVE, 3, 1),
            ("halt_exits", TYPE_INSTANT, 0, 1),
            ("blocking", TYPE_CUMULATIVE | UNIT_SECONDS, NANO, 1),
        ]);
        let statistics = VcpuStatistics::parse(&others).unwrap();
        let id = "kvm-4711/vcpu-3".to_owned();
        assert_eq!(
            statistics,
            VcpuStatistics {
                id,
                ..VcpuStatistics::default()
            }
        );
    }

    #[test]
    fn every_shortened_file_is_refused() {
        let whole = usual();
        // The last value is the last byte that is needed.
        for length in 0..whole.len() {
            assert!(VcpuStatistics::parse(&whole[..length]).is_err(), "{length} bytes");
        }
        assert!(VcpuStatistics::parse(&whole).is_ok());
    }

    #[test]
    fn every_number_of_the_header_and_of_a_descriptor_may_be_anything() {
        let whole = usual();
        let fields = (4..HEADER_BYTES).step_by(4);
        let descriptor = HEADER_BYTES + NAME_BYTES;
        for at in fields.chain((descriptor..descriptor + DESCRIPTOR_BYTES).step_by(4)) {
            for value in [0, 1, 15, 0xFFFF, 0x7FFF_FFFF, u32::MAX - 7, u32::MAX] {
                let mut file = whole.clone();
                file[at..at + 4].copy_from_slice(&value.to_le_bytes());
                let _ = VcpuStatistics::parse(&file);
            }
        }
        for (at, value) in [
            (4, 0),
            (4, 257),
            (8, 513),
            (12, u32::MAX),
            (16, u32::MAX),
            (20, u32::MAX),
        ] {
            let mut file = whole.clone();
            file[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
            assert!(VcpuStatistics::parse(&file).is_err(), "{value} at {at}");
        }
        assert!(VcpuStatistics::parse(&vec![0; STATISTICS_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn name_without_end_or_with_other_bytes_than_text_is_refused() {
        for byte in [b'x', b'\n', 0x1b, 0xff] {
            let mut file = usual();
            file[HEADER_BYTES..HEADER_BYTES + NAME_BYTES].fill(byte);
            assert!(VcpuStatistics::parse(&file).is_err(), "{byte:#x}");
        }
    }
}
