//! The queue of persistent memory.
#![no_main]

use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use mirrorball_fuzz::file::sparse_file;
use mirrorball_fuzz::guest::Guest;
use mirrorball_fuzz::script::{Words, run};
use shard::fuzzing::Bare;

fuzz_target!(|data: &[u8]| {
    let mut device = Bare::pmem(sparse_file(4096)).expect("a device");
    run(
        &mut device,
        &mut Guest::new(1),
        &mut Words,
        &mut Unstructured::new(data),
    );
});
