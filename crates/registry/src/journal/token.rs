//! A place in the journal.

use std::fmt;
use std::str::FromStr;

/// The place behind an event, from which a reader goes on: `JOURNAL-GENERATION-OFFSET`, the first in
/// hexadecimal. Tokens are text for everybody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    pub(super) journal: u64,
    pub(super) generation: u64,
    pub(super) offset: u64,
}

impl fmt::Display for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:x}-{}-{}", self.journal, self.generation, self.offset)
    }
}

impl FromStr for Token {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('-').collect();
        let parse = |parts: &[&str]| {
            let [journal, generation, offset] = parts else {
                return None;
            };
            Some(Self {
                journal: u64::from_str_radix(journal, 16).ok()?,
                generation: generation.parse().ok()?,
                offset: offset.parse().ok()?,
            })
        };
        // What is written otherwise, as with a sign, is no token.
        let token = parse(&parts).filter(|token: &Self| token.to_string() == text);
        token.ok_or_else(|| format!("{text:?} is no token; use one that `mirrorball events` printed"))
    }
}
