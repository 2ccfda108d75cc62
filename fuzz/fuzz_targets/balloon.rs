//! The balloon's queues: inflate, deflate, statistics and reporting.
#![no_main]

use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use mirrorball_fuzz::guest::{Guest, MEMORY_BYTES};
use mirrorball_fuzz::script::{Words, run};
use shard::fuzzing::Bare;

fuzz_target!(|data: &[u8]| {
    let mut device = Bare::balloon(MEMORY_BYTES).expect("a device");
    run(
        &mut device,
        &mut Guest::new(4),
        &mut Words,
        &mut Unstructured::new(data),
    );
});
