//! A VM's TOML file.

pub fn fuzz(text: &str) {
    if let Err(error) = config::parse("fuzz.toml", text) {
        // A message that points into the text.
        let _ = error.to_string();
    }
}
