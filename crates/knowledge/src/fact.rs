//! Facts: a name with terms, such as `distance("host", 0, 1, 21)`.

use std::fmt;

use crate::shape::{self, ShapeError};

/// A number or a text.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Term {
    /// A number: a count, an amount or an identity.
    Number(i64),
    /// A name, or a word of an enumeration.
    Text(String),
}

impl From<i64> for Term {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for Term {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl fmt::Display for Term {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(out, "{number}"),
            // The parser below decodes all escapes of Rust that can occur here.
            Self::Text(text) => write!(out, "\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
        }
    }
}

/// A fact: a relation's name and its terms.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Fact {
    /// Name of the relation.
    pub name: String,
    /// Terms, in the order of the relation's schema.
    pub terms: Vec<Term>,
}

impl Fact {
    /// Returns a fact with these terms.
    pub fn new<const N: usize>(name: &str, terms: [Term; N]) -> Self {
        Self {
            name: name.to_owned(),
            terms: terms.into(),
        }
    }

    /// Returns the number at this position, counted from 0.
    pub fn number(&self, place: usize) -> Option<i64> {
        match self.terms.get(place)? {
            Term::Number(number) => Some(*number),
            Term::Text(_) => None,
        }
    }

    /// Returns the text at this position, counted from 0.
    pub fn text(&self, place: usize) -> Option<&str> {
        match self.terms.get(place)? {
            Term::Text(text) => Some(text),
            Term::Number(_) => None,
        }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}(", self.name)?;
        for (index, term) in self.terms.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(out, "{comma}{term}")?;
        }
        write!(out, ")")
    }
}

/// Error in a list of facts.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct FactError {
    /// Line number, from 1.
    pub line: usize,
    /// Problem and help.
    what: LineError,
}

/// Problem of a line, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
enum LineError {
    #[error("{0}; {FACT_HELP}")]
    Syntax(&'static str),
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// Help for a line that is no fact.
const FACT_HELP: &str = "a line is like `distance(\"host\", 0, 1, 21)`, or a comment after `#`";

/// Reads a list of facts, one on a line, with comments after `#`.
///
/// # Errors
/// The first line that is no fact, or whose terms do not match the schema of its name.
pub fn parse(text: &str) -> Result<Vec<Fact>, FactError> {
    let lines = text.lines().enumerate();
    let lines = lines.map(|(index, line)| (index + 1, line.trim()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(line, text)| checked(text).map_err(|what| FactError { line, what }))
        .collect()
}

fn checked(text: &str) -> Result<Fact, LineError> {
    let fact = fact(text).map_err(LineError::Syntax)?;
    shape::check(&fact)?;
    Ok(fact)
}

fn fact(text: &str) -> Result<Fact, &'static str> {
    let (name, mut rest) = text.split_once('(').ok_or("there is no `(`")?;
    let is_name = name.starts_with(|first: char| first.is_ascii_lowercase())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
    if !is_name {
        return Err("the name is not of lower-case letters, digits and `_`");
    }
    let mut terms = Vec::new();
    loop {
        let (term, after) = term(rest.trim_start())?;
        terms.push(term);
        rest = after.trim_start();
        match rest.chars().next() {
            Some(',') => rest = &rest[1..],
            Some(')') => break,
            _ => return Err("after a number or text there is neither `,` nor `)`"),
        }
    }
    let end = rest[1..].trim_start();
    let end = end.strip_prefix(';').unwrap_or(end).trim_start();
    if !end.is_empty() && !end.starts_with('#') {
        return Err("something follows the `)`");
    }
    Ok(Fact {
        name: name.to_owned(),
        terms,
    })
}

/// Parses the leading term. Returns the term and the rest of the text.
pub(crate) fn term(text: &str) -> Result<(Term, &str), &'static str> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|sign: char| sign != '-' && !sign.is_ascii_digit());
        let (number, rest) = text.split_at(end.unwrap_or(text.len()));
        let number = number
            .parse()
            .map_err(|_| "there is neither a number nor a text in quotes")?;
        return Ok((Term::Number(number), rest));
    };
    let mut content = String::new();
    let mut signs = quoted.char_indices();
    while let Some((at, sign)) = signs.next() {
        match sign {
            '"' => return Ok((Term::Text(content), &quoted[at + 1..])),
            '\\' => content.extend(signs.next().map(|(_, sign)| sign)),
            sign => content.push(sign),
        }
    }
    Err("a text has no closing quote")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn printed_facts_parse_to_the_same_facts(
            terms in prop::collection::vec(
                prop_oneof![
                    any::<i64>().prop_map(Term::Number),
                    "[ -~]{0,20}".prop_map(Term::Text)
                ],
                1..6
            )
        ) {
            let fact = Fact { name: "some_fact2".into(), terms };
            prop_assert_eq!(parse(&format!("# facts\n\n  {fact};  # so it is\n")), Ok(vec![fact]));
        }

        #[test]
        fn any_text_is_parsed_or_rejected_without_panic(text in "\\PC{0,60}") {
            let _ = parse(&text);
        }
    }

    #[test]
    fn parse_error_names_its_line() {
        for (text, what) in [
            ("node", "there is no `(`"),
            ("Node(1)", "the name"),
            ("node(x)", "neither a number nor a text"),
            ("node(\"x)", "no closing quote"),
            ("node(1 2)", "neither `,` nor `)`"),
            ("node(1) node(2)", "follows"),
            ("node(99999999999999999999)", "neither a number nor a text"),
            (
                "latency_ns(\"a\", 0, 1, 9)",
                "has 4 terms instead of 5; write `latency_ns(Host, From, To, Transport, Value)`",
            ),
            (
                "latency_ns(\"a\", 0, 1, \"ring\", -1)",
                "Value must be a number from 0 on; write",
            ),
            (
                "latency_ns(\"a\", 0, 1, 7, 7)",
                "Transport must be a text in quotes; write",
            ),
            ("distance(\"a\", \"0\", 1, 21)", "From must be a number; write"),
        ] {
            let error = parse(&format!("host(\"a\")\n{text}")).expect_err(text);
            assert_eq!(error.line, 2);
            assert!(error.to_string().contains(what), "{text}: {error}");
        }
    }
}
