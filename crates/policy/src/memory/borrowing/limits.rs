//! Amounts at which cells borrow and lend.

/// Minimum time between two passes of a cell, in milliseconds (Cellular Disco, section 5.2).
pub const PERIOD_MS: u64 = 10;
/// Chunk by the paper: 4 MB where 8 CPUs allocate at most 8 x 732 KB in 10 ms (section 5.2), so 0.7 of that.
const CHUNK_PERMILLE: u64 = 700;
/// Low water in chunks: 16 MB and 4 MB in section 5.2.
pub const LOW_WATER_CHUNKS: u64 = 4;
/// A lender's floor in chunks: 32 MB and 4 MB in section 5.2.
pub const FLOOR_CHUNKS: u64 = 8;
/// Smallest chunk by measurement, in bytes: that of section 5.2.
pub const CHUNK_MIN_BYTES: u64 = 4 << 20;
/// A chunk is at most this part of a cell's memory, so that the floor is an eighth. Ours: hosts of today
/// allocate a hundred times as fast as the paper's, and their cells are not a hundred times as large.
const CHUNK_PART: u64 = 64;
/// The amount of free memory, in low waters, at which a cell returns all that it has borrowed and does not
/// use. Ours: the distance to the low water is the hysteresis.
const HIGH_WATER_LOW_WATERS: u64 = 2;

/// Amounts of one cell, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Amount of one loan in advance.
    pub chunk_bytes: u64,
    /// A cell with less free memory of its own borrows.
    pub low_water_bytes: u64,
    /// A lender keeps at least this much free memory of its own.
    pub floor_bytes: u64,
}

impl Limits {
    /// Low water and floor in the paper's ratios to a chunk.
    pub const fn of_chunk(chunk_bytes: u64) -> Self {
        Self {
            chunk_bytes,
            low_water_bytes: chunk_bytes.saturating_mul(LOW_WATER_CHUNKS),
            floor_bytes: chunk_bytes.saturating_mul(FLOOR_CHUNKS),
        }
    }

    /// Limits of a cell with `cpus` CPUs and `memory_bytes`, where one CPU allocates `bytes_per_second`, as
    /// measured on this host.
    pub fn measured(bytes_per_second: u64, cpus: usize, memory_bytes: u64) -> Self {
        let in_period = u128::from(bytes_per_second) * u128::from(PERIOD_MS) / 1000;
        let chunk = in_period.saturating_mul(cpus as u128 * u128::from(CHUNK_PERMILLE)) / 1000;
        let most = (memory_bytes / CHUNK_PART).max(CHUNK_MIN_BYTES);
        let chunk = u64::try_from(chunk).unwrap_or(u64::MAX);
        // Whole MiB, as commands show amounts.
        Self::of_chunk(chunk.clamp(CHUNK_MIN_BYTES, most) >> 20 << 20)
    }

    /// The amount of own free memory at which a cell returns all unused loans.
    pub const fn high_water_bytes(&self) -> u64 {
        self.low_water_bytes.saturating_mul(HIGH_WATER_LOW_WATERS)
    }
}
