//! The queue of persistent memory.

use crate::file::sparse_file;
use crate::guest::Guest;
use crate::script::{Words, run};
use libfuzzer_sys::arbitrary::Unstructured;
use shard::fuzzing::Bare;

pub fn fuzz(data: &[u8]) {
    let mut device = Bare::pmem(sparse_file(4096)).expect("a device");
    run(
        &mut device,
        &mut Guest::new(1),
        &mut Words,
        &mut Unstructured::new(data),
    );
}
