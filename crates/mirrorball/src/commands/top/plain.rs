//! Samples as plain text, for `mirrorball top --batch`.

use operations::usage::{Sample, Unknown};

use super::table::{Kind, lines, tenths};
use crate::commands::events::time;

/// Kinds of tables, in the order of the text.
const KINDS: [Kind; 4] = [Kind::Cells, Kind::Cpus, Kind::Vms, Kind::Vcpus];

/// Formats a sample: a line with its time, then a table of each kind that has rows, and an empty line.
pub(super) fn text(sample: &Sample) -> String {
    let mut text = format!("mirrorball top, {}", time(sample.unix_ms));
    if let Some(interval_ms) = sample.interval_ms {
        text.push_str(&format!(", over {} s", tenths(interval_ms)));
    }
    text.push('\n');
    for kind in KINDS {
        let (head, rows) = lines(kind.columns(), &kind.rows(sample));
        if rows.is_empty() {
            continue;
        }
        text.push_str(&format!("\n{}\n{head}\n", kind.title()));
        rows.iter().for_each(|row| text.push_str(&format!("{row}\n")));
    }
    if !sample.unknown.is_empty() {
        text.push_str("\nunknown\n");
        for Unknown { source, why } in &sample.unknown {
            text.push_str(&format!("{source}: {why}\n"));
        }
    }
    text.push('\n');
    text
}
