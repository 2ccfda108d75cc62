//! The table of a VM's pages: a row for each use in the guest, with its bytes by origin on the host.
//!
//! Pure: no I/O.

use std::collections::BTreeMap;

use page::PAGE_BYTES;
use registry::control::{HostPage, PageRun};
use serde::Serialize;

use super::guest::{GuestPages, GuestUse};
use super::is_private;

/// Pages of a VM by their use and their origin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PageUse {
    /// The VM's name.
    pub vm: String,
    /// A row for each use, in the order of [`GuestUse::ALL`].
    pub uses: Vec<UseRow>,
    /// Sum over all rows.
    pub total: UseRow,
    /// Reason why the guest reports no use, if it does not.
    pub unread: Option<String>,
}

/// Pages of one use, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UseRow {
    /// The use; `None` for the sum.
    #[serde(rename = "use", skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestUse>,
    /// All pages, whether the host has memory for them or not.
    pub bytes: u64,
    /// Pages in memory of the host that only this VM has.
    pub private_bytes: u64,
    /// Pages by origin.
    pub origins: BTreeMap<HostPage, u64>,
}

impl UseRow {
    fn add(&mut self, host: HostPage, bytes: u64) {
        self.bytes += bytes;
        self.private_bytes += if is_private(host) { bytes } else { 0 };
        *self.origins.entry(host).or_default() += bytes;
    }

    /// Returns the bytes of an origin.
    pub fn of(&self, host: HostPage) -> u64 {
        self.origins.get(&host).copied().unwrap_or(0)
    }
}

/// Joins the host's map with the guest's.
pub fn join(host: &[PageRun], guest: &GuestPages) -> PageUse {
    let mut rows: BTreeMap<GuestUse, UseRow> = BTreeMap::new();
    let mut total = UseRow::default();
    for PageRun(start, pages, origin) in host {
        for page in *start..start + pages {
            let guest = guest.get(page);
            let row = rows.entry(guest).or_insert_with(|| UseRow {
                guest: Some(guest),
                ..UseRow::default()
            });
            row.add(*origin, PAGE_BYTES);
            total.add(*origin, PAGE_BYTES);
        }
    }
    PageUse {
        uses: rows.into_values().collect(),
        total,
        ..PageUse::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOST: [HostPage; 12] = [
        HostPage::Absent,
        HostPage::Image,
        HostPage::Frozen,
        HostPage::Merged,
        HostPage::Loaded,
        HostPage::Copied,
        HostPage::Overwritten,
        HostPage::Unaligned,
        HostPage::Cold,
        HostPage::Written,
        HostPage::Zero,
        HostPage::Unknown,
    ];

    proptest! {
        #[test]
        fn rows_and_origins_add_up_to_all_pages(
            runs in prop::collection::vec((0u64..3, 1u64..20, 0usize..12), 0..20),
            flags in prop::collection::vec(
                prop_oneof![Just(0u64), Just(1 << 10), Just(1 << 7), Just(1 << 5)],
                0..200,
            ),
        ) {
            let mut at = 0;
            let host: Vec<_> = runs.iter().map(|(gap, pages, host)| {
                let run = PageRun(at + gap, *pages, HOST[*host]);
                at += gap + pages;
                run
            }).collect();
            let mut guest = GuestPages::up_to(at);
            flags.iter().for_each(|flags| guest.read(&flags.to_le_bytes()));
            let table = join(&host, &guest);
            let pages: u64 = host.iter().map(|run| run.1).sum();
            prop_assert_eq!(table.total.bytes, pages * PAGE_BYTES);
            for origin in HOST {
                let expected: u64 = host.iter().filter(|run| run.2 == origin).map(|run| run.1).sum();
                prop_assert_eq!(table.total.of(origin), expected * PAGE_BYTES);
                let rows: u64 = table.uses.iter().map(|row| row.of(origin)).sum();
                prop_assert_eq!(rows, expected * PAGE_BYTES);
            }
            let private: u64 = table.uses.iter().map(|row| row.private_bytes).sum();
            prop_assert_eq!(private, table.total.private_bytes);
            let others = [
                HostPage::Absent,
                HostPage::Image,
                HostPage::Frozen,
                HostPage::Merged,
            ];
            let known = others.map(|host| table.total.of(host));
            prop_assert_eq!(private + known.iter().sum::<u64>(), table.total.bytes);
            let names: Vec<_> = table.uses.iter().map(|row| row.guest).collect();
            prop_assert!(names.is_sorted());
        }
    }
}
