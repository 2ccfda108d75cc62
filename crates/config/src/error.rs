//! An error in a VM file: what is wrong, where, and how to mend it.

use miette::{Diagnostic, NamedSource, SourceSpan};

use crate::validate::Fault;

/// One error in a VM file, rendered by `miette` with file, line, caret and mend.
#[derive(Clone, Debug, thiserror::Error, Diagnostic)]
#[error("{message}")]
pub struct ConfigError {
    /// What is wrong, in one line.
    pub message: String,
    /// The text it is in; absent for a spec made from flags.
    #[source_code]
    pub source_code: Option<NamedSource<String>>,
    /// Where.
    #[label("{label}")]
    pub span: Option<SourceSpan>,
    label: String,
    /// How to mend it.
    #[help]
    pub mend: Option<String>,
}

/// Every key of a VM file, for suggestions.
const KEYS: [&str; 34] = [
    "name",
    "image",
    "cpus",
    "memory",
    "kernel",
    "root",
    "disks",
    "nets",
    "nodes",
    "pages",
    "prefault",
    "balloon",
    "command",
    "sandbox",
    "path",
    "initrd",
    "cmdline",
    "persistent",
    "format",
    "mode",
    "read_only",
    "as",
    "queues",
    "kind",
    "tap",
    "forward",
    "mac",
    "distances",
    "host_node",
    "private",
    "exclusive",
    "block",
    "pmem",
    "require",
];

impl ConfigError {
    /// From what the TOML reader says.
    pub(crate) fn from_toml(source_name: &str, text: &str, error: &toml::de::Error) -> Self {
        let message = error.message().trim().replace('\n', ", ");
        let mend = mend_of(&message);
        Self::at(source_name, text, error.span(), message, "here", mend)
    }

    /// From a check of the parsed spec; finds the key in the text again.
    pub(crate) fn from_fault(source_name: &str, text: &str, fault: &Fault) -> Self {
        let span = locate(text, &fault.path);
        Self::at(
            source_name,
            text,
            span,
            fault.message.clone(),
            "this",
            Some(fault.mend.clone()),
        )
    }

    /// From a check of a spec that was made from flags: there is no text to point at.
    pub fn from_flags(fault: &Fault) -> Self {
        Self {
            message: fault.message.clone(),
            source_code: None,
            span: None,
            label: String::new(),
            mend: Some(fault.mend.clone()),
        }
    }

    fn at(
        source_name: &str,
        text: &str,
        span: Option<std::ops::Range<usize>>,
        message: String,
        label: &str,
        mend: Option<String>,
    ) -> Self {
        Self {
            message,
            source_code: Some(NamedSource::new(source_name, text.to_owned())),
            span: span.map(|range| fit(text, range).into()),
            label: label.to_owned(),
            mend,
        }
    }
}

/// Brings a range inside the text and onto character boundaries, which the renderer relies on.
fn fit(text: &str, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
    let mut start = range.start.min(text.len());
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    let mut end = range.end.clamp(start, text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    start..end.max(start)
}

/// The mend of a reader's error, where one can be told from its words.
fn mend_of(message: &str) -> Option<String> {
    let rest = message
        .strip_prefix("unknown field `")
        .or_else(|| message.strip_prefix("unknown variant `"))?;
    let (unknown, rest) = rest.split_once('`')?;
    // The reader lists what it would have taken: prefer those names to all names.
    let expected: Vec<&str> = rest.split('`').skip(1).step_by(2).collect();
    let known = if expected.is_empty() {
        KEYS.to_vec()
    } else {
        expected
    };
    match nearest(unknown, &known) {
        Some(near) => Some(format!("did you mean `{near}`?")),
        None => Some(format!("known here: {}", known.join(", "))),
    }
}

fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|&candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|&(distance, candidate)| distance <= 1 + candidate.len() / 4)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Finds the value at `path` (keys, or indices into arrays) in the text.
fn locate(text: &str, path: &[String]) -> Option<std::ops::Range<usize>> {
    let document = toml::de::DeTable::parse(text).ok()?;
    let mut span = None;
    let mut table = Some(document.get_ref());
    let mut array: Option<&toml::de::DeArray<'_>> = None;
    for step in path {
        let value = match (table, array) {
            (Some(table), _) => table.get(step.as_str()),
            (_, Some(array)) => step.parse::<usize>().ok().and_then(|index| array.get(index)),
            _ => None,
        };
        let Some(value) = value else { break };
        span = Some(value.span());
        table = value.get_ref().as_table();
        array = value.get_ref().as_array();
    }
    span
}
