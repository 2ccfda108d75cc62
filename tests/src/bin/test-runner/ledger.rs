//! The names of all tests, in `tests/ledger.txt`. A removed or renamed test fails the run, so that no change
//! that shortens the run loses a test unnoticed.

use std::collections::BTreeSet;

/// Names in the ledger that are missing from `ran`. The ledger has one name a line; `#` starts a comment.
pub fn missing(ledger: &str, ran: &[String]) -> Vec<String> {
    let ran: BTreeSet<&str> = ran.iter().map(String::as_str).collect();
    names(ledger)
        .filter(|name| !ran.contains(name))
        .map(str::to_owned)
        .collect()
}

/// Names of the ledger.
pub fn names(ledger: &str) -> impl Iterator<Item = &str> {
    ledger
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_is_gone_is_missed_by_name() {
        let ran = ["boot::one".to_owned(), "shard a::two".to_owned()];
        assert_eq!(
            missing("# head\nboot::one\n\nshard a::three\n", &ran),
            ["shard a::three"]
        );
        assert!(missing("boot::one\n", &ran).is_empty());
    }
}
