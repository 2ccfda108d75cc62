//! A lab's TOML file.
#![no_main]

use config::lab::LabSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Err(error) = LabSpec::parse("fuzz.toml", text) {
        let _ = error.to_string();
    }
});
