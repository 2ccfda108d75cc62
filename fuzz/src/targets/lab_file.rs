//! A lab's TOML file.

use config::lab::LabSpec;

pub fn fuzz(text: &str) {
    if let Err(error) = LabSpec::parse("fuzz.toml", text) {
        let _ = error.to_string();
    }
}
