//! Translates the TOML reader's errors for authors of a VM file: one problem and its help.
//!
//! Names of keys and choices come from the reader's own message, so there is no list to maintain.

/// Parts of a reader's message.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Words {
    /// Cause, in one line.
    pub message: String,
    /// Help: how to fix it.
    pub help: String,
}

/// Translates the reader's message.
pub(crate) fn explain(raw: &str) -> Words {
    let raw: String = raw
        .trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    unknown(&raw, "unknown field `", "unknown key", "the keys here:")
        .or_else(|| unknown(&raw, "unknown variant `", "unknown value", "write one of"))
        .or_else(|| missing(&raw))
        .or_else(|| mismatch(&raw))
        .or_else(|| own(&raw))
        .unwrap_or_else(|| syntax(&raw))
}

/// `unknown field `x`, expected one of `a`, `b``.
fn unknown(raw: &str, prefix: &str, what: &str, list: &str) -> Option<Words> {
    let rest = raw.strip_prefix(prefix)?;
    // From the right: the unknown name may contain anything, the known ones contain no backtick.
    let (name, expected) = rest.rsplit_once("`, expected ")?;
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let help = match nearest(name, &known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("{list} `{}`", known.join("`, `")),
    };
    Some(Words {
        message: format!("{what} `{name}`"),
        help,
    })
}

fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    // A key of kilobytes is no typing error, and comparing it takes time.
    if word.len() > 64 {
        return None;
    }
    let word = word.to_lowercase().replace('-', "_");
    known
        .iter()
        .map(|&candidate| {
            (
                strsim::damerau_levenshtein(&word, &candidate.to_lowercase()),
                candidate,
            )
        })
        .filter(|&(distance, candidate)| distance <= 1 + candidate.len() / 4 && distance < candidate.len())
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// `missing field `x``.
fn missing(raw: &str) -> Option<Words> {
    let name = raw.strip_prefix("missing field `")?.strip_suffix('`')?;
    Some(Words {
        message: format!("`{name}` is missing"),
        help: format!("add `{name} = ...` here"),
    })
}

/// `invalid type: integer `5`, expected a string`, and similar messages for values.
fn mismatch(raw: &str) -> Option<Words> {
    let rest = raw
        .strip_prefix("invalid type: ")
        .or_else(|| raw.strip_prefix("invalid value: "))?;
    let (found, expected) = rest.rsplit_once(", expected ")?;
    let (wanted, help) = match expected {
        "a string" | "path string" | "string" => ("text", "put it in quotes".to_owned()),
        "a boolean" => ("true or false", "write true or false, without quotes".to_owned()),
        "u8" => ("a number", "write a whole number from 0 to 255".to_owned()),
        "u16" => ("a number", "write a whole number from 0 to 65535".to_owned()),
        "u32" | "u64" | "i64" => ("a number", "write a whole number, without quotes".to_owned()),
        "a sequence" => ("a list", "write a list, as [\"a\", \"b\"]".to_owned()),
        _ if expected.starts_with("a size") => ("a size", "write a size with a unit, as \"512M\"".to_owned()),
        _ if expected.starts_with("struct ") => ("a table", "write a table of keys and values".to_owned()),
        _ if expected.starts_with("enum ") || expected.contains("variant") => {
            ("one of a few words", "write the word in quotes".to_owned())
        }
        other => (other, format!("write {other}")),
    };
    Some(Words {
        message: format!("{found}, where {wanted} belongs"),
        help,
    })
}

/// This crate's own messages to the reader: `PROBLEM: HELP`, the help starting with `write` or `use`.
fn own(raw: &str) -> Option<Words> {
    let (message, help) = raw.rsplit_once(": ")?;
    (help.starts_with("write ") || help.starts_with("use ")).then(|| Words {
        message: message.to_owned(),
        help: help.to_owned(),
    })
}

/// Text that is not TOML.
fn syntax(raw: &str) -> Words {
    let (message, help) = match raw.split_once(", expected ") {
        Some((message, expected)) if expected != "nothing" => (message, format!("expected {expected}")),
        Some((message, _)) => (message, "remove it".to_owned()),
        None if raw == "duplicate key" => (raw, "give each key once".to_owned()),
        None => (
            raw,
            "write TOML: `key = value` on a line of its own, text in quotes".to_owned(),
        ),
    };
    Words {
        message: message.to_owned(),
        help,
    }
}
