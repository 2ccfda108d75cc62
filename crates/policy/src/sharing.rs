//! When a page read from an image is shared (SOSP '97, section 4.3.3: the global buffer cache).
//!
//! Mapping costs more time than copying and saves memory: a page copied costs 0.5 us, a page mapped alone 6.5
//! us, a page of a mapped run of 32 about 2 us. So reads copy at once, and the background replaces copies by
//! mappings, unless the host is short of memory.

/// Inputs of the sharing decision for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingInputs {
    /// Whether another VM may map the image's pages as well.
    pub is_shared: bool,
    /// Available memory of the host, in thousandths of its total.
    pub available_permille: u32,
}

/// Sharing mode of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingMode {
    /// Copy, and record the origin of each page: another VM may share it later.
    Remember,
    /// Copy, record the origins, and replace the copies by mappings in the background, in runs of at least
    /// this many pages.
    Deferred {
        /// The shortest run worth mapping.
        run_pages_min: u64,
    },
    /// Map runs of at least this many pages at once; copy the rest, and replace it in the background.
    AtRead {
        /// The shortest run worth mapping.
        run_pages_min: u64,
    },
}

/// Available memory below which the host is short of it, in thousandths.
pub const SHORT_PERMILLE: u32 = 125;
/// Available memory below which saving memory outweighs any time, in thousandths.
pub const SCARCE_PERMILLE: u32 = 50;
/// The shortest run that is mapped in the background while there is plenty of memory. Of the reads of a
/// Debian guest that boots and compiles, three of four runs are one page long and have a quarter of the
/// pages: without them, sharing costs a third.
pub const RUN_PAGES_PLENTY: u64 = 2;
/// The shortest run that is mapped when memory is short: 32 KiB, where a mapped page costs about six times a
/// copied one.
pub const RUN_PAGES_SHORT: u64 = 8;

impl SharingMode {
    /// Returns the shortest run of copies that the background replaces, in pages; `None` if it replaces none.
    pub fn run_pages_min_later(self) -> Option<u64> {
        match self {
            Self::Remember => None,
            Self::Deferred { run_pages_min } => Some(run_pages_min),
            Self::AtRead { .. } => Some(1),
        }
    }
}

/// The rule of `share = "adaptive"`.
pub fn adaptive(inputs: SharingInputs) -> SharingMode {
    match inputs.available_permille {
        available if available < SCARCE_PERMILLE => SharingMode::AtRead { run_pages_min: 1 },
        available if available < SHORT_PERMILLE => SharingMode::AtRead {
            run_pages_min: RUN_PAGES_SHORT,
        },
        // For a single VM a mapping only saves the copy in the host's page cache, which the host can drop by
        // itself.
        _ if !inputs.is_shared => SharingMode::Remember,
        _ => SharingMode::Deferred {
            run_pages_min: RUN_PAGES_PLENTY,
        },
    }
}

/// Trimming starts at one in this many of the mappings that a VM may have.
const TRIM_FROM: usize = 2;
/// The next trim waits until the mappings have grown by one in this many of the limit.
const TRIM_STEP: usize = 64;

/// Whether to trim the overwritten mappings of a VM with `mappings` of `most` now, when `trimmed` were left
/// after the last trim. A trim reads the page table page by page: every five seconds, this was half of the
/// cost of sharing for a VM of 15,000 shared pages.
pub fn trims(mappings: usize, trimmed: usize, most: usize) -> bool {
    mappings > most / TRIM_FROM && mappings >= trimmed.saturating_add(most / TRIM_STEP)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn eagerness(mode: SharingMode) -> u64 {
        match mode {
            SharingMode::Remember => 0,
            SharingMode::Deferred { run_pages_min } => 100 - run_pages_min,
            SharingMode::AtRead { run_pages_min } => 1000 - run_pages_min,
        }
    }

    proptest! {
        #[test]
        fn sharing_is_monotonic_in_memory_pressure_and_users(
            is_shared: bool, becomes_shared: bool, available in 0..1000u32, less in 0..1000u32,
        ) {
            let before = adaptive(SharingInputs { is_shared, available_permille: available });
            let inputs = SharingInputs {
                is_shared: is_shared || becomes_shared,
                available_permille: available.saturating_sub(less),
            };
            prop_assert!(eagerness(adaptive(inputs)) >= eagerness(before));
        }
    }

    proptest! {
        #[test]
        fn trims_are_bounded_and_precede_the_limit(most in 64..100_000usize, growth in 1..50usize) {
            let (mut trimmed, mut count) = (0, 0);
            for mappings in (0..=most).step_by(growth) {
                if trims(mappings, trimmed, most) {
                    (trimmed, count) = (mappings, count + 1);
                }
            }
            prop_assert!(count <= 2 * TRIM_STEP);
            prop_assert!(trimmed + most / TRIM_STEP + growth >= most, "the last at {trimmed} of {most}");
        }
    }

    #[test]
    fn single_vm_with_ample_memory_only_records_origins() {
        let inputs = SharingInputs {
            is_shared: false,
            available_permille: 800,
        };
        assert_eq!(adaptive(inputs), SharingMode::Remember);
        assert_eq!(
            adaptive(SharingInputs {
                is_shared: true,
                ..inputs
            }),
            SharingMode::Deferred { run_pages_min: 2 }
        );
    }

    #[test]
    fn pressure_thresholds_are_exclusive() {
        let mode = |available_permille| {
            adaptive(SharingInputs {
                is_shared: false,
                available_permille,
            })
        };
        let at_read = |run_pages_min| SharingMode::AtRead { run_pages_min };
        assert_eq!(mode(SCARCE_PERMILLE - 1), at_read(1));
        assert_eq!(mode(SCARCE_PERMILLE), at_read(RUN_PAGES_SHORT));
        assert_eq!(mode(SHORT_PERMILLE - 1), at_read(RUN_PAGES_SHORT));
        assert_eq!(mode(SHORT_PERMILLE), SharingMode::Remember);
    }

    #[test]
    fn background_replaces_runs_of_the_modes_minimum_length() {
        assert_eq!(SharingMode::Remember.run_pages_min_later(), None);
        assert_eq!(
            SharingMode::Deferred { run_pages_min: 2 }.run_pages_min_later(),
            Some(2)
        );
        assert_eq!(
            SharingMode::AtRead { run_pages_min: 8 }.run_pages_min_later(),
            Some(1)
        );
    }

    #[test]
    fn trim_requires_half_the_limit_and_a_64th_of_growth() {
        assert_eq!([500, 501].map(|mappings| trims(mappings, 0, 1000)), [false, true]);
        assert_eq!(
            [614, 615].map(|mappings| trims(mappings, 600, 1000)),
            [false, true]
        );
    }
}
