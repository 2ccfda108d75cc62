//! The shard's own log: lines for the person who runs the VM.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::virtio::transport::Log;

/// Lines kept: a guest that makes a device complain must not fill the host's disk.
const LINES_MAX: u32 = 1000;

/// A log that writes to `file` until it has had its fill.
pub fn to_file(file: File) -> Log {
    let lines = AtomicU32::new(0);
    Arc::new(move |text| {
        let number = lines.fetch_add(1, Ordering::Relaxed);
        let end = if number == LINES_MAX {
            "; nothing more is logged"
        } else {
            ""
        };
        if number <= LINES_MAX {
            // There is nowhere to complain about a log that can't be written.
            let _ = (&file).write_all(format!("{text}{end}\n").as_bytes());
        }
    })
}
