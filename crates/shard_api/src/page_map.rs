//! The host's pages of a VM's memory by their origin, which a shard reports in parts.

use serde::{Deserialize, Serialize};

/// Greatest number of guest pages of one part: 32 MiB, which a shard reads in some 10 ms. A part of runs of
/// one page each has less than 300 KiB as JSON.
pub const PART_PAGES_MAX: u64 = 8192;

/// Reason why a page of a guest takes memory of the host, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostPage {
    /// The host has no memory for the page: it was never touched, or was given back.
    Absent,
    /// The page is an image's, in the page cache of the host.
    Image,
    /// The page is a frozen VM's, from which this one was cloned or which it was itself.
    Frozen,
    /// A page that the host's scanner merged with equal ones, of this VM or of others.
    Merged,
    /// A copy that equals its page of the kernel or initramfs.
    Loaded,
    /// A copy that equals its page of a disk's image.
    Copied,
    /// A copy of an image's page that was written since it was read or loaded.
    Overwritten,
    /// Bytes of an image that begin in the middle of a page of the image, or of the guest.
    Unaligned,
    /// A copy whose page of the image is not in the page cache, so that the two were not compared.
    Cold,
    /// A page of an image or a frozen VM that was written after it was mapped.
    Written,
    /// Only zeroes.
    Zero,
    /// Other bytes, which no read of an image brought.
    Unknown,
}

/// A run of guest pages: the number of the first, the number of pages, and their origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRun(pub u64, pub u64, pub HostPage);

/// A part of the map of a VM's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageMapPart {
    /// Runs in ascending order. Pages between them are no memory.
    pub runs: Vec<PageRun>,
    /// First page of the next part; none after the last part.
    pub next: Option<u64>,
}

impl PageMapPart {
    /// Appends a page, which follows the last one.
    pub fn push(&mut self, page: u64, host: HostPage) {
        match self.runs.last_mut() {
            Some(PageRun(start, pages, last)) if *last == host && *start + *pages == page => *pages += 1,
            _ => self.runs.push(PageRun(page, 1, host)),
        }
    }

    /// Returns whether the part answers a request for the pages from `from` on: its runs are in order and
    /// within the limit, and the next part begins behind them. A shard that a guest controls may send
    /// anything.
    pub fn answers(&self, from: u64) -> bool {
        let mut end = from;
        let mut count = 0_u64;
        for PageRun(start, pages, _) in &self.runs {
            let Some(run_end) = start.checked_add(*pages).filter(|_| *start >= end && *pages > 0) else {
                return false;
            };
            count = count.saturating_add(*pages);
            end = run_end;
        }
        count <= PART_PAGES_MAX && self.next.is_none_or(|next| next > from && next >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_pages_of_one_origin_are_one_run() {
        let mut part = PageMapPart::default();
        for (page, host) in [
            (4, HostPage::Zero),
            (5, HostPage::Zero),
            (6, HostPage::Image),
            (9, HostPage::Image),
        ] {
            part.push(page, host);
        }
        assert_eq!(
            part.runs,
            [
                PageRun(4, 2, HostPage::Zero),
                PageRun(6, 1, HostPage::Image),
                PageRun(9, 1, HostPage::Image)
            ]
        );
        assert!(part.answers(4));
    }

    #[test]
    fn part_that_goes_back_overlaps_or_is_too_long_is_no_answer() {
        let part = |runs: &[(u64, u64)], next| PageMapPart {
            runs: runs
                .iter()
                .map(|&(start, pages)| PageRun(start, pages, HostPage::Zero))
                .collect(),
            next,
        };
        assert!(part(&[(10, 5), (15, 5)], Some(20)).answers(10));
        assert!(part(&[], None).answers(10));
        for wrong in [
            part(&[(9, 5)], None),
            part(&[(10, 5), (14, 5)], None),
            part(&[(10, 0)], None),
            part(&[(10, u64::MAX)], None),
            part(&[(10, PART_PAGES_MAX + 1)], None),
            part(&[(10, 5)], Some(14)),
            part(&[], Some(10)),
        ] {
            assert!(!wrong.answers(10), "{wrong:?}");
        }
    }
}
