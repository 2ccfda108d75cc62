//! The last error in the log of a cell's processes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes at the end of a log in which the error is searched for.
const TAIL_BYTES: u64 = 64 << 10;
/// Text before the error with which a process of the program ends.
const PREFIX: &str = "mirrorball: ";

/// Returns the last error with which a process ended, without the program's name; none if the log has none.
pub fn last_error(log: &Path) -> Option<String> {
    let mut log = File::open(log).ok()?;
    let length = log.metadata().ok()?.len();
    log.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))
        .ok()?;
    let mut tail = Vec::new();
    log.take(TAIL_BYTES).read_to_end(&mut tail).ok()?;
    let tail = String::from_utf8_lossy(&tail);
    let mut errors = tail.lines().filter_map(|line| line.strip_prefix(PREFIX));
    errors.next_back().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_error_is_found_among_the_lines_of_guard_and_cell() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert_eq!(last_error(&log), None);
        let noise = "2026-11-27T06:21:04Z  WARN the cell's process died\n".repeat(2000);
        std::fs::write(&log, format!("mirrorball: long ago\n{noise}")).unwrap();
        assert_eq!(last_error(&log), None, "it is older than the part that is read");
        std::fs::write(
            &log,
            format!("{noise}mirrorball: first\nmirrorball: no address\nWARN x\n"),
        )
        .unwrap();
        assert_eq!(last_error(&log).as_deref(), Some("no address"));
    }
}
