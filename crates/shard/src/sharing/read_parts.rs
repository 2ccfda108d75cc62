//! Divides a read into the parts that can be shared (whole pages of a base at whole pages of RAM) and the
//! rest.
//!
//! Pure: closures supply the place of the bytes.

use super::extents::{ImageId, Run};
use super::pages::PAGE_BYTES;

/// Place of the front of a range of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// `bytes` bytes from `offset` of the file of an image without a writer.
    Image { image: ImageId, offset: u64, bytes: u64 },
    /// `bytes` bytes of another file.
    Other { bytes: u64 },
}

/// A part of a read. Offsets are from the start of the read, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadPart {
    /// The guest pages from `page` on can map `run`.
    Share { start: u64, page: u64, run: Run },
    /// These bytes must be copied. Those of an image (`of_image`) are no whole pages of it.
    Copy { start: u64, bytes: u64, of_image: bool },
}

/// Divides a read of `pieces` (address and length each) from `offset` of a disk.
///
/// `source` returns the front of a range of the disk. `page_at` returns the guest page at an address and the
/// number of pages of RAM from there on.
pub(crate) fn cut(
    pieces: impl Iterator<Item = (u64, u64)>,
    offset: u64,
    mut source: impl FnMut(u64, u64) -> Source,
    page_at: impl Fn(u64) -> Option<(u64, u64)>,
) -> Vec<ReadPart> {
    let mut parts = ReadParts::default();
    let mut start = 0;
    for (host, length) in pieces {
        let mut done = 0;
        while done < length {
            let left = length - done;
            let bytes = match source(offset + start, left) {
                Source::Other { bytes } => {
                    let bytes = bytes.clamp(1, left);
                    parts.copy(start, bytes, false);
                    bytes
                }
                Source::Image { image, offset, bytes } => {
                    let bytes = bytes.clamp(1, left);
                    let base = (host + done, offset);
                    parts.image(start, base, bytes, image, &page_at);
                    bytes
                }
            };
            done += bytes;
            start += bytes;
        }
    }
    parts.0
}

#[derive(Default)]
struct ReadParts(Vec<ReadPart>);

impl ReadParts {
    fn copy(&mut self, start: u64, bytes: u64, of_image: bool) {
        match self.0.last_mut() {
            _ if bytes == 0 => (),
            Some(ReadPart::Copy {
                start: before,
                bytes: length,
                of_image: before_is,
            }) if *before + *length == start && *before_is == of_image => *length += bytes,
            _ => self.0.push(ReadPart::Copy {
                start,
                bytes,
                of_image,
            }),
        }
    }

    /// Appends `bytes` of `image` for the memory at `host`.
    fn image(
        &mut self,
        start: u64,
        (host, offset): (u64, u64),
        bytes: u64,
        image: ImageId,
        page_at: impl Fn(u64) -> Option<(u64, u64)>,
    ) {
        let head = (host.next_multiple_of(PAGE_BYTES) - host).min(bytes);
        let whole = (bytes - head) / PAGE_BYTES;
        let aligned = host % PAGE_BYTES == offset % PAGE_BYTES;
        let Some((page, in_ram)) = page_at(host + head).filter(|_| aligned && whole > 0) else {
            return self.copy(start, bytes, true);
        };
        let pages = whole.min(in_ram);
        self.copy(start, head, true);
        let run = Run {
            pages,
            image,
            first: (offset + head) / PAGE_BYTES,
        };
        self.0.push(ReadPart::Share {
            start: start + head,
            page,
            run,
        });
        let end = head + pages * PAGE_BYTES;
        self.copy(start + end, bytes - end, true);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RAM_START: u64 = 0x10_0000;
    const RAM_PAGES: u64 = 64;

    fn page_at(host: u64) -> Option<(u64, u64)> {
        let page = host.checked_sub(RAM_START)? / PAGE_BYTES;
        (page < RAM_PAGES).then(|| (1000 + page, RAM_PAGES - page))
    }

    proptest! {
        #[test]
        fn parts_cover_the_read_and_match_its_origins(
            pieces in proptest::collection::vec((0..40u64, 0..9u64, 1..40u64), 1..6),
            offset in 0..100u64,
            sizes in proptest::collection::vec((any::<bool>(), 1..30u64, 0..8u64), 1..8),
        ) {
            // In sectors, so that alignment varies; some memory lies past the end of RAM.
            let pieces: Vec<_> = pieces.into_iter().map(|(page, sector, sectors)| {
                (RAM_START + (page + 40) * PAGE_BYTES + sector * 512, sectors * 512)
            }).collect();
            let mut turn = 0;
            let mut origins = std::collections::HashMap::new();
            let parts = cut(pieces.iter().copied(), offset * 512, |at, left| {
                let (image, sectors, skew) = sizes[turn % sizes.len()];
                turn += 1;
                let bytes = (sectors * 512).min(left);
                let from = at + skew * 512;
                if image {
                    for sector in 0..bytes / 512 {
                        origins.insert(at + sector * 512, from + sector * 512);
                    }
                    Source::Image { image: 3, offset: from, bytes }
                } else {
                    Source::Other { bytes }
                }
            }, page_at);
            let total: u64 = pieces.iter().map(|(_, length)| length).sum();
            let sectors = |(host, length): &(u64, u64)| {
                let host = *host;
                (0..length / 512).map(move |sector| host + sector * 512)
            };
            let hosts: Vec<u64> = pieces.iter().flat_map(sectors).collect();
            let mut at = 0;
            for part in parts {
                match part {
                    ReadPart::Copy { start, bytes, of_image } => {
                        prop_assert_eq!(start, at);
                        prop_assert!(bytes > 0);
                        for sector in 0..bytes / 512 {
                            let from = offset * 512 + start + sector * 512;
                            prop_assert_eq!(origins.contains_key(&from), of_image);
                        }
                        at += bytes;
                    }
                    ReadPart::Share { start, page, run } => {
                        prop_assert_eq!(start, at);
                        prop_assert!(run.pages > 0 && run.image == 3);
                        for sector in 0..run.pages * 8 {
                            let place = start + sector * 512;
                            let host = hosts[(place / 512) as usize];
                            prop_assert_eq!(host, RAM_START + (page - 1000) * PAGE_BYTES + sector * 512);
                            let origin = run.first * PAGE_BYTES + sector * 512;
                            prop_assert_eq!(origins[&(offset * 512 + place)], origin);
                        }
                        at += run.pages * PAGE_BYTES;
                    }
                }
            }
            prop_assert_eq!(at, total);
        }
    }
}
