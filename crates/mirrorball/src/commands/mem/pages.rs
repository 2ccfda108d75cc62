//! The table of `mirrorball mem VM --explain` for people.

use operations::page_use::{GuestUse, PageUse, UseRow};
use registry::control::HostPage;

use super::mib;

/// Columns of memory that only this VM has.
const PRIVATE: [(&str, HostPage); 8] = [
    ("LOADED", HostPage::Loaded),
    ("COPIED", HostPage::Copied),
    ("OVERWRITTEN", HostPage::Overwritten),
    ("UNALIGNED", HostPage::Unaligned),
    ("COLD", HostPage::Cold),
    ("WRITTEN", HostPage::Written),
    ("ZERO", HostPage::Zero),
    ("UNKNOWN", HostPage::Unknown),
];

/// Formats the table.
pub(super) fn text(table: &PageUse) -> String {
    let mut lines = vec![format!(
        "{:<15}{:>9}{:>9}{:>9}{:>9}",
        "USE", "MEMORY", "ABSENT", "SHARED", "PRIVATE"
    )];
    for (name, _) in PRIVATE {
        lines[0] += &column(name, name);
    }
    lines.extend(table.uses.iter().map(row));
    lines.push(row(&table.total));
    if let Some(reason) = &table.unread {
        lines.push(format!("the guest reports no use of its pages: {reason}"));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn row(row: &UseRow) -> String {
    let shared = [HostPage::Image, HostPage::Frozen, HostPage::Merged].map(|host| row.of(host));
    let mut line = format!(
        "{:<15}{:>9}{:>9}{:>9}{:>9}",
        row.guest.map_or("total", GuestUse::name),
        mib(row.bytes),
        mib(row.of(HostPage::Absent)),
        mib(shared.iter().sum()),
        mib(row.private_bytes)
    );
    for (name, host) in PRIVATE {
        line += &column(name, &mib(row.of(host)));
    }
    line
}

/// Formats a value as wide as its heading, 8 columns at least.
fn column(heading: &str, value: &str) -> String {
    format!(" {value:>width$}", width = heading.len().max(8))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn each_private_origin_has_a_column_and_the_columns_are_in_line() {
        let origins = BTreeMap::from([
            (HostPage::Absent, MIB),
            (HostPage::Image, 2 * MIB),
            (HostPage::Frozen, 2 * MIB),
            (HostPage::Merged, MIB),
            (HostPage::Overwritten, 4 * MIB),
            (HostPage::Unknown, 5 * MIB),
        ]);
        let total = UseRow {
            guest: None,
            bytes: 15 * MIB,
            private_bytes: 9 * MIB,
            origins,
        };
        let slab = UseRow {
            guest: Some(GuestUse::Slab),
            ..total.clone()
        };
        let table = PageUse {
            vm: "a".to_owned(),
            uses: vec![slab],
            total,
            unread: Some("no agent answers".to_owned()),
        };
        let text = text(&table);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[0].len(), lines[1].len());
        assert_eq!(lines[1].len(), lines[2].len());
        let words: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(
            words,
            [
                "slab", "15.0M", "1.0M", "5.0M", "9.0M", "0.0M", "0.0M", "4.0M", "0.0M", "0.0M", "0.0M",
                "0.0M", "5.0M"
            ]
        );
        assert!(lines[2].starts_with("total "), "{text}");
        assert!(lines[3].ends_with(": no agent answers"), "{text}");
    }
}
