//! A VM's TOML file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Err(error) = config::parse("fuzz.toml", text) {
        // A message that points into the text.
        let _ = error.to_string();
    }
});
