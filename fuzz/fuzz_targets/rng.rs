//! The entropy source's queue.
#![no_main]

use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use mirrorball_fuzz::guest::Guest;
use mirrorball_fuzz::script::{Words, run};
use shard::fuzzing::Bare;

fuzz_target!(|data: &[u8]| {
    let mut device = Bare::rng().expect("a device");
    run(
        &mut device,
        &mut Guest::new(1),
        &mut Words,
        &mut Unstructured::new(data),
    );
});
