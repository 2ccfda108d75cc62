//! A disk whose driver resumes from the state of another VM.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::Value;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::driver::*;
use crate::launch::OnFull;
use crate::sandbox::Threads;
use crate::virtio::VirtioDevice;
use crate::virtio::block::Block;

/// A disk of this many sectors, which has no driver yet.
fn disk(sectors: usize) -> (tempfile::TempDir, Driver) {
    let directory = tempfile::tempdir().unwrap();
    let store = raw_store(&numbered(directory.path(), sectors), false);
    let block = Block::new(&Threads::sealed(), "disk1", store, false, 1, None, OnFull::Error).unwrap();
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
    (directory, Driver::of(Arc::new(memory), block))
}

/// Resumes a driver with this saved state on a disk of 40 sectors; returns the number of interrupts that
/// report a change of the configuration.
fn changes_after(state: &Value) -> usize {
    let (_directory, mut driver) = disk(40);
    driver.block.resume(state);
    driver.activate_resumed(1);
    let changes = driver.line.config_changes.load(Ordering::SeqCst);
    driver.assert_works();
    // A later driver of the guest reads the size by itself.
    driver.block.reset();
    driver.activate(1, 0);
    driver.block.reset();
    driver.activate_resumed(1);
    assert_eq!(driver.line.config_changes.load(Ordering::SeqCst), changes);
    changes
}

#[test]
fn driver_that_resumes_on_a_disk_of_another_size_gets_one_interrupt() {
    let saved = |sectors| disk(sectors).1.block.save();
    assert_eq!(changes_after(&saved(1)), 1);
    assert_eq!(changes_after(&saved(41)), 1);
    assert_eq!(changes_after(&saved(40)), 0);
}

#[test]
fn driver_of_a_state_without_a_size_gets_no_interrupt() {
    for state in [Value::Null, serde_json::json!({ "sectors": "1" })] {
        assert_eq!(changes_after(&state), 0, "{state}");
    }
}
