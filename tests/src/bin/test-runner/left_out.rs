//! The tests that are allowed to check nothing, each with its reason: `tests/left-out.toml`.

use std::collections::BTreeMap;

/// Reasons by the full names of tests.
pub type Allowed = BTreeMap<String, String>;

/// Reads lines of the form `"shard span::x" = "why"`, and comments.
pub fn parse(text: &str) -> Result<Allowed, String> {
    let mut allowed = Allowed::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || format!("tests/left-out.toml:{number}: write \"TEST\" = \"REASON\"; it is {line:?}");
        let (name, reason) = line.split_once(" = ").ok_or_else(wrong)?;
        let unquoted = |text: &str| Some(text.strip_prefix('"')?.strip_suffix('"')?.to_owned());
        let (name, reason) = unquoted(name).zip(unquoted(reason)).ok_or_else(wrong)?;
        if reason.is_empty() || allowed.insert(name, reason).is_some() {
            return Err(wrong());
        }
    }
    Ok(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_names_a_test_and_a_reason_once() {
        let allowed = parse("# head\n\n\"a b::c\" = \"no device\"\n").expect("sound");
        assert_eq!(allowed["a b::c"], "no device");
        for wrong in [
            "a = \"b\"",
            "\"a\" = \"\"",
            "\"a\" = \"b\"\n\"a\" = \"c\"",
            "\"a\"",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
