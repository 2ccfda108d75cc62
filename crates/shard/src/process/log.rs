//! Log of warnings of a shard's devices, for the user of the VM.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tracing::warn;

use crate::virtio::transport::Log;

/// Greatest number of lines: a guest that causes warnings must not fill the host's disk.
const LINES_MAX: u32 = 1000;

/// Creates a log that writes warnings to the process's log, up to that number.
pub fn of_devices() -> Log {
    let lines = AtomicU32::new(0);
    Arc::new(move |text| {
        let number = lines.fetch_add(1, Ordering::Relaxed);
        let end = if number == LINES_MAX {
            "; nothing more is logged"
        } else {
            ""
        };
        if number <= LINES_MAX {
            warn!("{text}{end}");
        }
    })
}
