//! What a shard's devices complain about, for the person who runs the VM.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tracing::warn;

use crate::virtio::transport::Log;

/// Lines kept: a guest that makes a device complain must not fill the host's disk.
const LINES_MAX: u32 = 1000;

/// A log whose lines are warnings in that of the process, until there were enough.
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
