//! The table of a VM's pages: a row for each use in the guest, with its bytes by origin on the host.
//!
//! Pure: no I/O.

use std::collections::BTreeMap;

use page::PAGE_BYTES;
use registry::control::{HostPage, PageRun};
use serde::Serialize;

use super::guest::{GuestPages, GuestUse};
use super::is_private;

/// Pages of a VM, or of several together, by their use and their origin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PageUse {
    /// The VM's name; of several VMs all names.
    pub vm: String,
    /// A row for each use, in the order of [`GuestUse::ALL`].
    pub uses: Vec<UseRow>,
    /// Sum over all rows.
    pub total: UseRow,
    /// Reason why the guest reports no use, if it does not; of several guests a line each.
    pub unread: Option<String>,
}

impl PageUse {
    /// Returns the sum of the tables of several VMs.
    pub fn sum(tables: &[Self]) -> Self {
        let mut rows: BTreeMap<Option<GuestUse>, UseRow> = BTreeMap::new();
        let mut total = UseRow::default();
        for table in tables {
            for row in &table.uses {
                let sum = rows.entry(row.guest).or_insert_with(|| UseRow {
                    guest: row.guest,
                    ..UseRow::default()
                });
                sum.join(row);
            }
            total.join(&table.total);
        }
        let names: Vec<&str> = tables.iter().map(|table| table.vm.as_str()).collect();
        let unread: Vec<&str> = tables
            .iter()
            .filter_map(|table| table.unread.as_deref())
            .collect();
        Self {
            vm: names.join(", "),
            uses: rows.into_values().collect(),
            total,
            unread: (!unread.is_empty()).then(|| unread.join("\n")),
        }
    }
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

    /// Adds the pages of another VM.
    fn join(&mut self, other: &Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.private_bytes = self.private_bytes.saturating_add(other.private_bytes);
        for (host, bytes) in &other.origins {
            let sum = self.origins.entry(*host).or_default();
            *sum = sum.saturating_add(*bytes);
        }
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

    #[test]
    fn sum_of_several_vms_has_each_use_once_and_all_their_bytes() {
        let table = |vm: &str, pages: &[(GuestUse, HostPage, u64)], unread: Option<&str>| {
            let mut table = PageUse {
                vm: vm.to_owned(),
                unread: unread.map(str::to_owned),
                ..PageUse::default()
            };
            for (guest, host, bytes) in pages {
                let mut row = UseRow {
                    guest: Some(*guest),
                    ..UseRow::default()
                };
                row.add(*host, *bytes);
                table.total.add(*host, *bytes);
                table.uses.push(row);
            }
            table
        };
        let sum = PageUse::sum(&[
            table(
                "a",
                &[
                    (GuestUse::Slab, HostPage::Zero, 5),
                    (GuestUse::Free, HostPage::Absent, 7),
                ],
                None,
            ),
            table("b", &[(GuestUse::Slab, HostPage::Image, 11)], Some("no agent")),
            table("c", &[(GuestUse::Slab, HostPage::Zero, 13)], None),
        ]);
        assert_eq!(
            (sum.vm.as_str(), sum.unread.as_deref()),
            ("a, b, c", Some("no agent"))
        );
        let uses: Vec<_> = sum.uses.iter().map(|row| (row.guest, row.bytes)).collect();
        assert_eq!(uses, [(Some(GuestUse::Slab), 29), (Some(GuestUse::Free), 7)]);
        let slab = &sum.uses[0];
        assert_eq!((slab.of(HostPage::Zero), slab.of(HostPage::Image)), (18, 11));
        assert_eq!(
            (slab.private_bytes, sum.total.private_bytes, sum.total.bytes),
            (18, 18, 36)
        );
    }
}
