//! A position in the journal.

use std::fmt;
use std::str::FromStr;

/// Position after an event, from which a reader continues: `JOURNAL-GENERATION-OFFSET`, the first number in
/// hexadecimal. Tokens are opaque text for all other code.
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

/// A text that is not a [`Token`].
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is no token; use one that `mirrorball events` printed")]
pub struct TokenError(String);

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
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
        // Text with another spelling, such as a sign, is no token.
        let token = parse(&parts).filter(|token: &Self| token.to_string() == text);
        token.ok_or_else(|| TokenError(text.to_owned()))
    }
}
