//! Errors in a VM file: cause, place, and help.

use std::ops::Range;
use std::sync::Arc;

use miette::{Diagnostic, NamedSource, SourceSpan};

use crate::fault::Fault;
use crate::reader;

/// One error in a VM file or in flags, rendered by `miette` with file, line, caret and help.
#[derive(Clone, Debug, thiserror::Error, Diagnostic)]
#[error("{message}")]
pub struct ConfigError {
    /// Cause, in one line.
    pub message: String,
    /// The text with the error; absent for a spec made from flags, and for a file without text.
    #[source_code]
    pub source_code: Option<Arc<NamedSource<String>>>,
    /// Byte range of the error in the text.
    #[label("{label}")]
    pub span: Option<SourceSpan>,
    label: &'static str,
    /// Help: how to fix the error.
    #[help]
    pub help: Option<String>,
}

impl ConfigError {
    /// Makes an error from an error of the TOML parser.
    pub(crate) fn from_toml(source_name: &str, text: &str, error: &toml::de::Error) -> Self {
        let words = reader::explain(error.message());
        Self::at(source_name, text, error.span(), words.message, words.help)
    }

    /// Makes an error from a check of the parsed spec, and finds the key in the text again.
    pub(crate) fn from_fault(source_name: &str, text: &str, fault: &Fault) -> Self {
        let span = locate(text, &fault.path);
        Self::at(source_name, text, span, fault.message.clone(), fault.help.clone())
    }

    /// Makes an error from a check of a spec that was made from `run`'s flags. There is no text to point at,
    /// so the message names the flag.
    pub fn from_flags(fault: &Fault) -> Self {
        let message = match flag_of(&fault.path) {
            Some(flag) => format!("{flag}: {}", fault.message),
            None => fault.message.clone(),
        };
        Self {
            message,
            source_code: None,
            span: None,
            label: "here",
            help: Some(fault.flag_help.as_ref().unwrap_or(&fault.help).clone()),
        }
    }

    /// Makes an error about what a command is to change, which no text shows.
    pub(crate) fn plain(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            source_code: None,
            span: None,
            label: "here",
            help: Some(help.into()),
        }
    }

    /// Returns the file and the line, for a message of one line; `None` without a text.
    pub fn place(&self) -> Option<String> {
        let (text, span) = (self.source_code.as_ref()?, self.span?);
        let line = text.inner().get(..span.offset())?.matches('\n').count() + 1;
        Some(format!("{} line {line}", text.name()))
    }

    /// Makes an error about a file that has no text to point at.
    pub(crate) fn without_text(message: String, help: String) -> Self {
        Self {
            message,
            source_code: None,
            span: None,
            label: "here",
            help: Some(help),
        }
    }

    fn at(source_name: &str, text: &str, span: Option<Range<usize>>, message: String, help: String) -> Self {
        // A fault without a place in the text is shown at its start, because an error without a place would
        // not name its file.
        let span = fit(text, span.unwrap_or(0..0));
        Self {
            message,
            source_code: Some(Arc::new(NamedSource::new(source_name, text.to_owned()))),
            span: Some(span.into()),
            label: "here",
            help: Some(help),
        }
    }
}

/// Returns the flag of `run` that sets the field at `path` in a spec.
fn flag_of(path: &[String]) -> Option<String> {
    let flag = match path.first()?.as_str() {
        "kernel" => match path.get(1).map(String::as_str) {
            Some("initrd") => "--initrd".to_owned(),
            Some("cmdline") => "--cmdline".to_owned(),
            _ => "--kernel".to_owned(),
        },
        "disks" => numbered("--disk", path.get(1)),
        "folders" => numbered("--folder", path.get(1)),
        "nets" => numbered("--net", path.get(1)),
        "command" => "the command after `--`".to_owned(),
        key => format!("--{}", key.replace('_', "-")),
    };
    Some(flag)
}

/// Formats a flag that may be repeated; the first one has no number.
fn numbered(flag: &str, index: Option<&String>) -> String {
    match index.and_then(|index| index.parse::<usize>().ok()) {
        Some(index) if index > 0 => format!("{flag} (number {})", index.saturating_add(1)),
        _ => flag.to_owned(),
    }
}

/// Clips a range to the text, to character boundaries (the renderer relies on both) and to its first line, so
/// that a caret is under a table's header and not under the whole table.
fn fit(text: &str, range: Range<usize>) -> Range<usize> {
    let mut start = range.start.min(text.len());
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    let mut end = range.end.clamp(start, text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let end = end.max(start);
    let first_line = text[start..end].find(['\n', '\r']).unwrap_or(end - start);
    start..start + first_line
}

/// Finds the value at `path` (keys, or indices into arrays) in the text.
fn locate(text: &str, path: &[String]) -> Option<Range<usize>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_a_text_are_clipped_to_it_and_to_one_line() {
        let text = "a\u{e9}b\ncd";
        let fitted = |range: Range<usize>| fit(text, range);
        assert_eq!(fitted(0..4), 0..4);
        assert_eq!(fitted(0..2), 0..1, "a character is not cut at its end");
        assert_eq!(fitted(2..4), 1..4, "nor at its start");
        assert_eq!(fitted(2..2), 1..1);
        assert_eq!(fitted(3..7), 3..4, "the first line only");
        assert_eq!(fitted(5..100), 5..7);
        assert_eq!(fitted(100..200), 7..7);
        assert_eq!(fitted(Range { start: 6, end: 2 }), 6..6);
    }
}
