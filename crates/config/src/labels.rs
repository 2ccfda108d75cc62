//! Labels of a VM, and selectors by which a command names VMs.
//!
//! Keys and values follow Kubernetes' rules (Kubernetes documentation, "Labels and Selectors", "Syntax and
//! character set"). A key is a name, or a prefix, a slash and a name. The prefix is a DNS subdomain.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::fault::{Fault, fault};

/// The labels of a VM, by key.
pub type Labels = BTreeMap<String, String>;

/// Maximum number of a VM's labels.
pub const LABELS_MAX: usize = 64;
/// Maximum length of a key's name and of a value, in bytes.
const WORD_MAX: usize = 63;
/// Maximum length of a key's prefix, in bytes.
const PREFIX_MAX: usize = 253;

const KEY_HELP: &str = "letters, digits, `-`, `_` and `.`, 63 at most, with a letter or digit at both \
    ends; before it, if \
                        anything, a lower-case domain and `/`";
const VALUE_HELP: &str =
    "letters, digits, `-`, `_` and `.`, 63 at most, with a letter or digit at both ends, or nothing";

/// A label, as the value of `--label`: `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// Key: unique in a VM.
    pub key: String,
    /// The value; may be empty.
    pub value: String,
}

/// A condition on the labels of a VM: `KEY`, which must exist, or `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selector {
    key: String,
    value: Option<String>,
}

impl Selector {
    /// Whether labels meet the condition.
    pub fn matches(&self, labels: &Labels) -> bool {
        let found = labels.get(&self.key);
        found.is_some_and(|found| self.value.as_ref().is_none_or(|value| value == found))
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(out, "{}={value}", self.key),
            None => out.write_str(&self.key),
        }
    }
}

/// A flag that is no label, or no condition on one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// No key and value.
    #[error("{0:?} is no label: write KEY=VALUE, as team=web")]
    NotALabel(String),
    /// A key against Kubernetes' rules.
    #[error("{0:?} can't be a label's key; write {KEY_HELP}")]
    Key(String),
    /// A value against Kubernetes' rules.
    #[error("{0:?} can't be a label's value; write {VALUE_HELP}")]
    Value(String),
    /// A key of two labels.
    #[error("the label {0} is given twice; give each key once")]
    Twice(String),
}

impl FromStr for Label {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        let label = text.split_once('=');
        let (key, value) = label.ok_or_else(|| LabelError::NotALabel(text.to_owned()))?;
        check_key(key)?;
        check_value(value)?;
        Ok(Self {
            key: key.to_owned(),
            value: value.to_owned(),
        })
    }
}

impl FromStr for Selector {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        if text.contains('=') {
            let Label { key, value } = text.parse()?;
            return Ok(Self {
                key,
                value: Some(value),
            });
        }
        check_key(text)?;
        Ok(Self {
            key: text.to_owned(),
            value: None,
        })
    }
}

/// Collects the labels of flags.
///
/// # Errors
/// If a key is given twice.
pub fn of_flags(flags: &[Label]) -> Result<Labels, LabelError> {
    let mut labels = Labels::new();
    for Label { key, value } in flags {
        if labels.insert(key.clone(), value.clone()).is_some() {
            return Err(LabelError::Twice(key.clone()));
        }
    }
    Ok(labels)
}

/// Checks the labels of a spec.
pub(crate) fn check(labels: &Labels) -> Result<(), Fault> {
    if labels.len() > LABELS_MAX {
        return Err(fault(
            &["labels"],
            format!("{} labels", labels.len()),
            format!("{LABELS_MAX} at most"),
        ));
    }
    for (key, value) in labels {
        if !is_key(key) {
            return Err(fault(
                &["labels", key],
                format!("{key:?} can't be a label's key"),
                KEY_HELP,
            ));
        }
        if !is_value(value) {
            return Err(fault(
                &["labels", key],
                format!("{value:?} can't be a label's value"),
                VALUE_HELP,
            ));
        }
    }
    Ok(())
}

fn check_key(key: &str) -> Result<(), LabelError> {
    is_key(key)
        .then_some(())
        .ok_or_else(|| LabelError::Key(key.to_owned()))
}

fn check_value(value: &str) -> Result<(), LabelError> {
    is_value(value)
        .then_some(())
        .ok_or_else(|| LabelError::Value(value.to_owned()))
}

fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_domain(prefix) && is_word(name),
        None => is_word(key),
    }
}

fn is_value(value: &str) -> bool {
    value.is_empty() || is_word(value)
}

fn is_word(word: &str) -> bool {
    let has_ends = |word: &str| {
        let ends = [word.chars().next(), word.chars().next_back()];
        ends.iter()
            .all(|end| end.is_some_and(|end| end.is_ascii_alphanumeric()))
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    word.len() <= WORD_MAX && has_ends(word) && word.chars().all(allowed)
}

/// Whether a text is a DNS subdomain (RFC 1123): parts of lower-case letters, digits and inner hyphens,
/// separated by dots.
fn is_domain(text: &str) -> bool {
    let is_part = |part: &str| {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !part.is_empty() && part.chars().all(allowed) && !part.starts_with('-') && !part.ends_with('-')
    };
    text.len() <= PREFIX_MAX && text.split('.').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long(length: usize) -> String {
        "a".repeat(length)
    }

    #[test]
    fn keys_and_values_are_those_of_kubernetes() {
        let keys = [
            "a",
            "team",
            "Team_1.x-y",
            "example.com/team",
            "a-b.c/x",
            "9/9",
            &long(63),
        ];
        for key in keys {
            assert!(is_key(key), "{key}");
        }
        let prefixed = format!("{}/a", long(253));
        assert!(is_key(&prefixed));
        let wrong = [
            "",
            "-a",
            "a-",
            ".a",
            "a.",
            "_a",
            "a b",
            "ä",
            "/a",
            "a/",
            "a/b/c",
            "A.com/x",
            "a..b/x",
            "-a/x",
            "a=b",
            "a\n",
            &long(64),
            &format!("{}/a", long(254)),
        ];
        for key in wrong {
            assert!(!is_key(key), "{key}");
        }
        for value in ["", "0", "web", "1.2_3-x", &long(63)] {
            assert!(is_value(value), "{value}");
        }
        for value in ["-", "a-", "a b", "a/b", "a=b", "ß", &long(64)] {
            assert!(!is_value(value), "{value}");
        }
    }

    #[test]
    fn selector_matches_a_key_or_a_key_with_its_value() {
        let labels = of_flags(&["team=web".parse().unwrap(), "canary=".parse().unwrap()]).unwrap();
        let matches = |text: &str| text.parse::<Selector>().unwrap().matches(&labels);
        for text in ["team", "team=web", "canary", "canary="] {
            assert!(matches(text), "{text}");
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
        for text in ["web", "team=", "team=we", "Team", "canary=web"] {
            assert!(!matches(text), "{text}");
        }
        for text in ["", "=", "=web", "a=b=c", "a b", "team=web "] {
            assert!(text.parse::<Selector>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn label_that_is_given_twice_is_refused() {
        let flags = ["a=1", "b=1", "a=1"].map(|text| text.parse().unwrap());
        let why = of_flags(&flags).unwrap_err().to_string();
        assert!(why.contains("label a is given twice"), "{why}");
        let why = "team".parse::<Label>().unwrap_err().to_string();
        assert!(why.contains("KEY=VALUE"), "{why}");
    }

    #[test]
    fn labels_of_a_file_are_read_checked_and_written_again() {
        let text = |labels: &str| format!("image = \"x\"\nlabels = {{ {labels} }}\n");
        let spec = crate::parse("vm.toml", &text("team = \"web\", \"example.com/tier\" = \"1\"")).unwrap();
        assert_eq!(spec.labels["team"], "web");
        assert_eq!(spec.labels["example.com/tier"], "1");
        let again = toml::to_string(&spec).unwrap();
        assert_eq!(crate::parse("again.toml", &again).unwrap().labels, spec.labels);
        let many: Vec<String> = (0..=LABELS_MAX)
            .map(|number| format!("k{number} = \"\""))
            .collect();
        crate::parse("vm.toml", &text(&many[1..].join(", "))).unwrap();
        for (labels, why) in [
            (&many.join(", ")[..], "65 labels"),
            ("\"-a\" = \"\"", "\"-a\" can't be a label's key"),
            ("a = \"b c\"", "\"b c\" can't be a label's value"),
        ] {
            let error = crate::parse("vm.toml", &text(labels)).unwrap_err();
            assert_eq!(error.message, why);
            assert!(error.help.is_some());
        }
    }
}
