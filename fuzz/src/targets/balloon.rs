//! The balloon's queues: inflate, deflate, statistics and reporting.

use crate::guest::{Guest, MEMORY_BYTES};
use crate::script::{Words, run};
use libfuzzer_sys::arbitrary::Unstructured;
use shard::fuzzing::Bare;

pub fn fuzz(data: &[u8]) {
    let mut device = Bare::balloon(MEMORY_BYTES).expect("a device");
    run(
        &mut device,
        &mut Guest::new(4),
        &mut Words,
        &mut Unstructured::new(data),
    );
}
