//! Report on a VM's coherent memory, made from its status, and as tables for people. Pure.

use std::fmt::Write;

use registry::vms::Record;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shard::arch::x86_64::layout::Layout;
use shard::memory::part_ranges;

use super::symbols::Symbols;

/// Report on a VM's coherent memory.
#[derive(Debug, Serialize)]
pub struct Heat {
    /// Name of the VM.
    pub name: String,
    /// The VM's shards that replied.
    pub shards: Vec<Shard>,
    /// The most transferred pages, the hottest first.
    pub pages: Vec<Page>,
}

/// A shard's page-fault stalls, and the messages that it sent.
#[derive(Debug, Serialize, Deserialize)]
pub struct Shard {
    cell: Option<u16>,
    /// The cell's host, in a cluster of several hosts.
    host: Option<String>,
    faults: Faults,
    /// Number of messages to other shards.
    messages: u64,
    /// Number of these messages that had a page.
    pages: u64,
    bytes: u64,
    ahead: Ahead,
    tables: Tables,
}

/// Pages that the shard requested before any of its threads wanted them (prefetch).
#[derive(Debug, Serialize, Deserialize)]
struct Ahead {
    pages: u64,
    /// Threads that accessed such a page before it arrived, and waited for the rest of its transfer.
    joined: u64,
    /// Prefetch requests of other shards that this shard declined (Nack).
    declined: u64,
    /// Pages that were prefetched to be written.
    filled: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Faults {
    read: Stalls,
    write: Stalls,
    upgrade: Stalls,
}

#[derive(Debug, Serialize, Deserialize)]
struct Stalls {
    count: u64,
    seconds: f64,
    /// Mean duration of a stall, microseconds; none without a stall.
    mean_us: Option<f64>,
}

/// Merged page tables.
#[derive(Debug, Serialize, Deserialize)]
struct Tables {
    merged: u64,
    unmerged: u64,
    words: u64,
    conflicts: u64,
}

/// A page that is often transferred.
#[derive(Debug, Serialize)]
pub struct Page {
    /// Guest-physical address, as `0x2a07000`.
    address: String,
    /// Number of transfers of the page, to all shards.
    times: u64,
    /// Cell whose range of the guest's memory contains it.
    home: Option<u16>,
    /// Symbols of the guest's kernel in the page, if a file of symbols was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    symbols: Option<Vec<String>>,
}

/// Reads the report from a VM's status; none if the VM has no coherent memory. `host_of` names the host of a
/// cell.
pub fn read(
    record: &Record,
    status: &Value,
    symbols: Option<&Symbols>,
    host_of: impl Fn(u16) -> Option<String>,
) -> Option<Heat> {
    let coherence = status.get("span")?.get("coherence")?;
    let shard = |told: &Value| {
        let mut shard = Shard::deserialize(told).ok()?;
        shard.host = shard.cell.and_then(&host_of);
        let Faults { read, write, upgrade } = &mut shard.faults;
        for stalls in [read, write, upgrade] {
            stalls.mean_us = (stalls.count > 0).then(|| stalls.seconds * 1e6 / stalls.count as f64);
        }
        Some(shard)
    };
    let page = |told: &Value| {
        let text = told.get("address")?.as_str()?;
        let address = u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()?;
        Some(Page {
            address: text.to_owned(),
            times: told.get("times")?.as_u64()?,
            home: home(record, address),
            symbols: symbols.map(|symbols| symbols.of_page(address)),
        })
    };
    Some(Heat {
        name: record.name.clone(),
        shards: coherence
            .get("shards")?
            .as_array()?
            .iter()
            .filter_map(shard)
            .collect(),
        pages: coherence
            .get("heat")?
            .as_array()?
            .iter()
            .filter_map(page)
            .collect(),
    })
}

/// Returns the cell whose range of the guest's memory contains an address.
fn home(record: &Record, address: u64) -> Option<u16> {
    let layout = Layout::new(record.spec.memory.0, &[])?;
    let parts = part_ranges(&layout, record.span.iter().map(|part| part.memory_bytes));
    let mut cells = record.span.iter().zip(parts);
    let (part, _) = cells.find(|(_, ranges)| ranges.iter().any(|range| range.contains(&address)))?;
    Some(part.cell)
}

impl Heat {
    /// Formats the report as tables for people.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{:>4} {:<10} {:<8} {:>9} {:>10} {:>10}\n",
            "CELL", "HOST", "FAULT", "COUNT", "SECONDS", "MEAN"
        );
        // Writing to a string can't fail.
        for shard in &self.shards {
            let Faults { read, write, upgrade } = &shard.faults;
            for (kind, stalls) in [("read", read), ("write", write), ("upgrade", upgrade)] {
                let mean = stalls
                    .mean_us
                    .map_or_else(|| "-".to_owned(), |mean| format!("{mean:.0}us"));
                let _ = writeln!(
                    text,
                    "{} {kind:<8} {:>9} {:>10.3} {mean:>10}",
                    shard.place(),
                    stalls.count,
                    stalls.seconds
                );
            }
        }
        let _ = writeln!(
            text,
            "\n{:>4} {:<10} {:>9} {:>9} {:>12} {:>8} {:>8} {:>8} {:>9} {:>9}",
            "CELL", "HOST", "MESSAGES", "PAGES", "BYTES", "AHEAD", "MERGED", "UNMERGED", "WORDS", "CONFLICTS"
        );
        for shard in &self.shards {
            let Tables {
                merged,
                unmerged,
                words,
                conflicts,
            } = &shard.tables;
            let _ = writeln!(
                text,
                "{} {:>9} {:>9} {:>12} {:>8} {merged:>8} {unmerged:>8} {words:>9} {conflicts:>9}",
                shard.place(),
                shard.messages,
                shard.pages,
                shard.bytes,
                shard.ahead.pages + shard.ahead.filled
            );
        }
        if self.pages.is_empty() {
            return text + "\nno page has come yet\n";
        }
        let has_symbols = self.pages.iter().any(|page| page.symbols.is_some());
        let last = if has_symbols { "  SYMBOLS" } else { "" };
        let _ = writeln!(text, "\n{:>12} {:>9} {:>4}{last}", "PAGE", "TIMES", "HOME");
        for page in &self.pages {
            let names = match page.symbols.as_deref() {
                None => String::new(),
                Some([]) => "  -".to_owned(),
                Some(names) => format!("  {}", names.join(", ")),
            };
            let home = or_dash(page.home);
            let _ = writeln!(text, "{:>12} {:>9} {home:>4}{names}", page.address, page.times);
        }
        text
    }
}

impl Shard {
    fn place(&self) -> String {
        let host = self.host.as_deref().unwrap_or("-");
        format!("{:>4} {host:<10}", or_dash(self.cell))
    }
}

fn or_dash(cell: Option<u16>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record() -> Record {
        let part = |cell, vcpus, mib: u64| json!({ "cell": cell, "vcpus": vcpus, "memory_bytes": mib << 20 });
        let record = json!({
            "name": "big", "state": "running", "monitor_pid": 1, "shard_pid": 2, "started_unix_s": 0,
            "boots": 1, "cid": 3,
            "sandbox_missing": [],
            "span": [part(0, json!({ "start": 0, "end": 1 }), 3584),
                part(2, json!({ "start": 1, "end": 2 }), 512)],
            "spec": { "name": "big", "image": "tiny", "cpus": 2, "memory": "4G" },
        });
        serde_json::from_value(record).unwrap()
    }

    fn status() -> Value {
        let shard = |cell, reads: u64| {
            let stalls = |count: u64, seconds: f64| json!({ "count": count, "seconds": seconds });
            json!({
                "cell": cell,
                "faults": { "read": stalls(reads, 0.5), "write": stalls(0, 0.0),
                    "upgrade": stalls(4, 0.002) },
                "messages": 40, "pages": 9, "bytes": 38_000, "landed": 1, "heat": [],
                "ahead": { "pages": 5, "joined": 2, "declined": 1, "filled": 2 },
                "tables": { "merged": 3, "unmerged": 1, "words": 70, "conflicts": 0 },
            })
        };
        let page = |address: u64, times: u64| json!({ "address": format!("{address:#x}"), "times": times });
        let heat = [page(0x2a0_7000, 411), page(0x1_3000_0000, 17), page(0x5000, 2)];
        json!({ "span": { "coherence": { "shards": [shard(0, 250), shard(2, 0)], "heat": heat } } })
    }

    fn symbols() -> Symbols {
        Symbols::parse(b"ffffffff82a07040 D jiffies\nffffffff82a07080 D jiffies_64\n").unwrap()
    }

    fn host_of(cell: u16) -> Option<String> {
        (cell == 2).then(|| "beta".to_owned())
    }

    #[test]
    fn the_tables_say_where_time_went_and_which_pages_it_was() {
        let heat = read(&record(), &status(), Some(&symbols()), host_of).unwrap();
        let expected = "\
CELL HOST       FAULT        COUNT    SECONDS       MEAN
   0 -          read           250      0.500     2000us
   0 -          write            0      0.000          -
   0 -          upgrade          4      0.002      500us
   2 beta       read             0      0.500          -
   2 beta       write            0      0.000          -
   2 beta       upgrade          4      0.002      500us

CELL HOST        MESSAGES     PAGES        BYTES    AHEAD   MERGED UNMERGED     WORDS CONFLICTS
   0 -                 40         9        38000        7        3        1        70         0
   2 beta              40         9        38000        7        3        1        70         0

        PAGE     TIMES HOME  SYMBOLS
   0x2a07000       411    0  jiffies, jiffies_64
 0x130000000        17    2  -
      0x5000         2    0  -
";
        assert_eq!(heat.text(), expected);
    }

    #[test]
    fn programs_get_the_same_and_no_symbols_unless_asked() {
        let told = serde_json::to_value(read(&record(), &status(), None, host_of).unwrap()).unwrap();
        assert_eq!(told["shards"][0]["faults"]["read"]["mean_us"], 2000.0);
        assert_eq!(told["shards"][1]["faults"]["read"]["mean_us"], Value::Null);
        assert_eq!(told["shards"][1]["host"], "beta");
        assert_eq!(
            told["pages"][0],
            json!({ "address": "0x2a07000", "times": 411, "home": 0 })
        );
    }

    #[test]
    fn fields_missing_in_a_status_are_left_out() {
        for none in [
            json!({}),
            json!({ "span": { "cells": [0] } }),
            json!("unavailable"),
        ] {
            assert!(read(&record(), &none, None, host_of).is_none(), "{none}");
        }
        let mut odd = status();
        odd["span"]["coherence"]["shards"][0] = json!(7);
        odd["span"]["coherence"]["heat"] =
            json!([{ "address": "0xzz", "times": 1 }, 8, { "address": "4096" }]);
        let heat = read(&record(), &odd, Some(&symbols()), host_of).unwrap();
        assert_eq!((heat.shards.len(), heat.pages.len()), (1, 0));
        assert!(heat.text().ends_with("\nno page has come yet\n"));
    }
}
