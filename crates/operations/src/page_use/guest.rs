//! A Linux guest's use of its pages, from its `/proc/kpageflags` and `/proc/iomem`.
//!
//! Pure: no I/O. The flags are part of the kernel's interface (`Documentation/admin-guide/mm/pagemap.rst`).
//! `kpageflags` has a word of 8 bytes for each page, from page 0 on.

use std::ops::Range;

use page::PAGE_BYTES;
use serde::Serialize;

const UPTODATE: u64 = 1 << 3;
const LRU: u64 = 1 << 5;
const SLAB: u64 = 1 << 7;
const BUDDY: u64 = 1 << 10;
const MMAP: u64 = 1 << 11;
const ANON: u64 = 1 << 12;
const SWAPBACKED: u64 = 1 << 14;
const UNEVICTABLE: u64 = 1 << 18;
const NOPAGE: u64 = 1 << 20;
const THP: u64 = 1 << 22;
const OFFLINE: u64 = 1 << 23;
const PGTABLE: u64 = 1 << 26;
const RESERVED: u64 = 1 << 32;

const WORD_BYTES: usize = 8;
/// Pages of a section of the guest's memory on x86-64, 128 MiB. The kernel has page structs for whole
/// sections, in a block of 2 MiB each, and reports whole sections.
const SECTION_PAGES: u64 = 32 << 10;
const BLOCK_PAGES: usize = 512;
/// Greatest number of ranges of the kernel that are taken from `/proc/iomem`.
const RANGES_MAX: usize = 64;

/// A guest's use of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestUse {
    /// Code of the kernel.
    KernelText,
    /// Read-only data of the kernel.
    KernelRodata,
    /// Data of the kernel, zeroed data too.
    KernelData,
    /// The kernel's structs of all pages. They are inferred: reserved blocks of 2 MiB, as many as such
    /// structs take.
    PageStructs,
    /// Other memory that the kernel took as it started, and never frees.
    Early,
    /// Page tables.
    PageTables,
    /// Objects of the kernel.
    Slab,
    /// Memory of the kernel without a mark: stacks, modules, buffers, and the short lists of free pages of
    /// each CPU.
    Kernel,
    /// Pages of files.
    PageCache,
    /// Shared memory and files of tmpfs.
    SharedMemory,
    /// Memory of processes.
    Anonymous,
    /// Pages that the balloon took.
    Balloon,
    /// Free pages.
    Free,
    /// Pages of which the guest reports nothing.
    #[default]
    Unknown,
}

impl GuestUse {
    /// All uses, in the order of the table.
    pub const ALL: [Self; 14] = [
        Self::KernelText,
        Self::KernelRodata,
        Self::KernelData,
        Self::PageStructs,
        Self::Early,
        Self::PageTables,
        Self::Slab,
        Self::Kernel,
        Self::PageCache,
        Self::SharedMemory,
        Self::Anonymous,
        Self::Balloon,
        Self::Free,
        Self::Unknown,
    ];

    /// Returns the name of the row.
    pub fn name(self) -> &'static str {
        match self {
            Self::KernelText => "kernel text",
            Self::KernelRodata => "read-only data",
            Self::KernelData => "kernel data",
            Self::PageStructs => "page structs",
            Self::Early => "early memory",
            Self::PageTables => "page tables",
            Self::Slab => "slab",
            Self::Kernel => "other kernel",
            Self::PageCache => "page cache",
            Self::SharedMemory => "shared memory",
            Self::Anonymous => "anonymous",
            Self::Balloon => "balloon",
            Self::Free => "free",
            Self::Unknown => "not reported",
        }
    }

    /// Returns the use of a page with these flags.
    fn of(flags: u64) -> Self {
        let has = |wanted: u64| flags & wanted != 0;
        if has(NOPAGE) {
            Self::Unknown
        } else if has(BUDDY) {
            Self::Free
        } else if has(OFFLINE) {
            Self::Balloon
        } else if has(PGTABLE) {
            Self::PageTables
        } else if has(SLAB) {
            Self::Slab
        } else if has(RESERVED) {
            Self::Early
        } else if has(ANON) {
            Self::Anonymous
        } else if has(LRU | UNEVICTABLE | MMAP | UPTODATE | THP) {
            if has(SWAPBACKED) {
                Self::SharedMemory
            } else {
                Self::PageCache
            }
        } else {
            Self::Kernel
        }
    }
}

/// Pages of the kernel's image in the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelRanges(Vec<(Range<u64>, GuestUse)>);

impl KernelRanges {
    /// Reads a guest's `/proc/iomem`. Lines that make no sense are ignored.
    pub fn of(iomem: &str) -> Self {
        let range = |line: &str| {
            let (addresses, name) = line.trim().split_once(" : ")?;
            let part = match name {
                "Kernel code" => GuestUse::KernelText,
                "Kernel rodata" => GuestUse::KernelRodata,
                "Kernel data" | "Kernel bss" => GuestUse::KernelData,
                _ => return None,
            };
            let (first, last) = addresses.split_once('-')?;
            let first = u64::from_str_radix(first, 16).ok()?;
            let last = u64::from_str_radix(last, 16).ok()?;
            (first < last).then(|| (first / PAGE_BYTES..last / PAGE_BYTES + 1, part))
        };
        Self(iomem.lines().filter_map(range).take(RANGES_MAX).collect())
    }
}

/// A guest's use of each of its pages, by page number.
#[derive(Clone, Debug, Default)]
pub struct GuestPages {
    pages: Vec<GuestUse>,
    end: usize,
    /// Bytes of a word that has not arrived whole.
    rest: Vec<u8>,
}

impl GuestPages {
    /// Creates the map of the pages below `end`. Others that the guest reports are ignored.
    pub fn up_to(end: u64) -> Self {
        Self {
            end: usize::try_from(end).unwrap_or(usize::MAX),
            ..Self::default()
        }
    }

    /// Returns the greatest length of the guest's `kpageflags`, whose memory ends at page `end`.
    pub fn file_bytes_max(end: u64) -> u64 {
        let pages = end
            .div_ceil(SECTION_PAGES)
            .saturating_add(1)
            .saturating_mul(SECTION_PAGES);
        pages.saturating_mul(WORD_BYTES as u64)
    }

    /// Reads the next bytes of the guest's `kpageflags`.
    pub fn read(&mut self, data: &[u8]) {
        self.rest.extend_from_slice(data);
        let mut words = self.rest.chunks_exact(WORD_BYTES);
        for word in words.by_ref() {
            let mut flags = [0; WORD_BYTES];
            flags.copy_from_slice(word);
            if self.pages.len() < self.end {
                self.pages.push(GuestUse::of(u64::from_le_bytes(flags)));
            }
        }
        self.rest = words.remainder().to_vec();
    }

    /// Distinguishes the reserved pages: those of the kernel's image, and the page structs of the memory
    /// `ram`.
    pub fn complete(&mut self, kernel: &KernelRanges, ram: &[Range<u64>]) {
        for (range, part) in &kernel.0 {
            let end = usize::try_from(range.end)
                .unwrap_or(usize::MAX)
                .min(self.pages.len());
            let start = usize::try_from(range.start).unwrap_or(usize::MAX).min(end);
            for page in &mut self.pages[start..end] {
                if *page == GuestUse::Early {
                    *page = *part;
                }
            }
        }
        // Linux allocates them in one piece near the end of memory.
        let blocks = self.pages.chunks_exact_mut(BLOCK_PAGES).rev();
        let reserved = blocks.filter(|block| block.iter().all(|page| *page == GuestUse::Early));
        for block in reserved.take(sections(ram)) {
            block.fill(GuestUse::PageStructs);
        }
    }

    /// Returns the use of a page.
    pub fn get(&self, page: u64) -> GuestUse {
        let page = usize::try_from(page).ok().and_then(|page| self.pages.get(page));
        page.copied().unwrap_or_default()
    }
}

/// Returns the number of sections with memory. The ranges are in order.
fn sections(ram: &[Range<u64>]) -> usize {
    let mut next = 0;
    let mut count = 0;
    for range in ram.iter().filter(|range| !range.is_empty()) {
        let first = (range.start / SECTION_PAGES).max(next);
        next = range.end.div_ceil(SECTION_PAGES).max(next);
        count += next.saturating_sub(first);
    }
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Flags of pages of a Debian 6.1 guest, as `page-types` names them.
    #[test]
    fn flags_of_linux_pages_name_their_use() {
        for (flags, expected) in [
            (RESERVED, GuestUse::Early),
            (BUDDY, GuestUse::Free),
            (SLAB | 1 << 15, GuestUse::Slab),
            (PGTABLE | MMAP, GuestUse::PageTables),
            (UPTODATE | LRU | 1 << 2, GuestUse::PageCache),
            (UPTODATE | LRU | MMAP | ANON | SWAPBACKED, GuestUse::Anonymous),
            (ANON | THP | 1 << 16, GuestUse::Anonymous),
            (UPTODATE | LRU | SWAPBACKED, GuestUse::SharedMemory),
            (UPTODATE | UNEVICTABLE, GuestUse::PageCache),
            (OFFLINE, GuestUse::Balloon),
            (NOPAGE | RESERVED, GuestUse::Unknown),
            (0, GuestUse::Kernel),
        ] {
            assert_eq!(GuestUse::of(flags), expected, "{flags:#x}");
        }
    }

    #[test]
    fn each_use_is_a_row_of_the_table_once() {
        let sorted: std::collections::BTreeSet<_> = GuestUse::ALL.into_iter().collect();
        assert_eq!(sorted.into_iter().collect::<Vec<_>>(), GuestUse::ALL);
    }

    #[test]
    fn ranges_of_the_kernel_are_found_among_others() {
        let iomem = "00001000-0009fbff : System RAM\n00100000-0fffffff : System RAM\n  \
                     01000000-01a00fff : Kernel code\n  01c00000-02000fff : Kernel rodata\n  \
                     02200000-0247ffff : Kernel data\n  02b00000-02ffffff : Kernel bss\n\
                     zz-1 : Kernel code\n5-4 : Kernel code\nfee00000-fee00fff : Local APIC\n";
        assert_eq!(
            KernelRanges::of(iomem).0,
            [
                (0x1000..0x1a01, GuestUse::KernelText),
                (0x1c00..0x2001, GuestUse::KernelRodata),
                (0x2200..0x2480, GuestUse::KernelData),
                (0x2b00..0x3000, GuestUse::KernelData),
            ]
        );
    }

    #[test]
    fn page_structs_are_as_many_reserved_blocks_as_memory_has_sections() {
        let mut pages = GuestPages::up_to(16 * 512);
        let flags = |block: u64| match block {
            2 | 3 | 5 | 9 | 10 | 12 => RESERVED,
            _ => BUDDY,
        };
        for block in 0..16 {
            for _ in 0..512 {
                pages.read(&flags(block).to_le_bytes());
            }
        }
        // Blocks 2 and 3 are the kernel's. Block 10 is freed in part.
        pages.pages[10 * 512 + 7] = GuestUse::Free;
        let kernel = KernelRanges(vec![(2 * 512..4 * 512, GuestUse::KernelText)]);
        let ram = [0..100, 100..20 * 1024, 20 * 1024..40 * 1024];
        assert_eq!(sections(&ram), 2);
        pages.complete(&kernel, &ram);
        let of = |block: u64| pages.get(block * 512);
        assert_eq!((of(2), of(3)), (GuestUse::KernelText, GuestUse::KernelText));
        assert_eq!((of(9), of(12)), (GuestUse::PageStructs, GuestUse::PageStructs));
        // Block 5 is farther from the end than as many blocks as the structs take.
        assert_eq!(
            (of(5), of(10), of(1)),
            (GuestUse::Early, GuestUse::Early, GuestUse::Free)
        );
        assert_eq!(pages.get(16 * 512), GuestUse::Unknown);
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_give_the_same_pages(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            cut in 1usize..30,
            end in 0u64..40,
            iomem in ".*",
            first in 0u64..50,
            pages in 0u64..u64::MAX / 2,
        ) {
            let mut whole = GuestPages::up_to(end);
            whole.read(&bytes);
            let mut pieces = GuestPages::up_to(end);
            bytes.chunks(cut).for_each(|piece| pieces.read(piece));
            prop_assert_eq!(&whole.pages, &pieces.pages);
            prop_assert_eq!(whole.pages.len() as u64, end.min(bytes.len() as u64 / 8));
            let ram = first..first + pages;
            pieces.complete(&KernelRanges::of(&iomem), std::slice::from_ref(&ram));
            pieces.complete(&KernelRanges(vec![(first..first + pages, GuestUse::KernelText)]), &[]);
            prop_assert_eq!(pieces.get(end), GuestUse::Unknown);
        }
    }
}
