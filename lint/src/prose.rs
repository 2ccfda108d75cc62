//! The prose of a file: its comments, messages and test names, or a document's paragraphs.

/// The kind of a piece of prose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A comment, or a paragraph of a document.
    Text,
    /// The documentation of an item.
    Doc,
    /// Text in quotation marks in code.
    Message,
    /// The name of a test, its words with blanks between.
    TestName,
    /// A line of any kind, for its width.
    Line,
}

/// A piece of prose.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Prose {
    /// The file, from the project's folder.
    pub file: String,
    /// The line that it begins on, from 1.
    pub line: usize,
    /// The kind of this piece.
    pub kind: Kind,
    /// Its text, without marks of comments, lines joined.
    pub text: String,
}

/// The prose of a file; nothing for files that are neither Rust nor documents, and for this tool's own list
/// of words.
pub fn of(file: &str, text: &str) -> Vec<Prose> {
    let mut found = match file.rsplit_once('.') {
        Some((_, "rs")) if file != "lint/src/words.rs" => of_code(file, text),
        Some((_, "md")) => of_document(file, text),
        _ => return Vec::new(),
    };
    let lines = (1..).zip(text.lines());
    found.extend(lines.map(|(line, text)| piece(file, line, Kind::Line, text)));
    found
}

fn piece(file: &str, line: usize, kind: Kind, text: &str) -> Prose {
    Prose {
        file: file.to_owned(),
        line,
        kind,
        text: text.to_owned(),
    }
}

fn of_code(file: &str, text: &str) -> Vec<Prose> {
    let mut found: Vec<Prose> = Vec::new();
    // The comment of the line before: its mark, and its place in `found`.
    let mut open: Option<(&str, usize)> = None;
    let mut is_test = false;
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.trim();
        let mark = ["//!", "///", "//"]
            .into_iter()
            .find(|mark| content.starts_with(mark));
        if let Some(mark) = mark {
            let words = content[mark.len()..].trim();
            match open {
                Some((before, at)) if before == mark && !words.is_empty() => {
                    found[at].text.push(' ');
                    found[at].text.push_str(words);
                }
                // A blank line of a comment begins a paragraph.
                _ if words.is_empty() => open = None,
                _ => {
                    open = Some((mark, found.len()));
                    let kind = if mark == "///" { Kind::Doc } else { Kind::Text };
                    found.push(piece(file, line, kind, words));
                }
            }
            continue;
        }
        open = None;
        if content == "#[test]" {
            is_test = true;
        } else if let Some(rest) = content.strip_prefix("fn ")
            && std::mem::take(&mut is_test)
        {
            let name = rest.split(['(', '<']).next().unwrap_or("");
            found.push(piece(file, line, Kind::TestName, &name.replace('_', " ")));
        }
        let quoted = content
            .split('"')
            .skip(1)
            .step_by(2)
            .filter(|text| text.contains(' '));
        found.extend(quoted.map(|text| piece(file, line, Kind::Message, text)));
    }
    found
}

fn of_document(file: &str, text: &str) -> Vec<Prose> {
    let mut found: Vec<Prose> = Vec::new();
    let (mut is_code, mut is_open) = (false, false);
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.trim();
        if content.starts_with("```") {
            (is_code, is_open) = (!is_code, false);
            continue;
        }
        if is_code || content.is_empty() {
            is_open = false;
            continue;
        }
        let begins = ['|', '#', '-', '*'].iter().any(|mark| content.starts_with(*mark));
        match found.last_mut().filter(|_| is_open && !begins) {
            Some(paragraph) => {
                paragraph.text.push(' ');
                paragraph.text.push_str(content);
            }
            None => found.push(piece(file, line, Kind::Text, content)),
        }
        is_open = !content.starts_with('#') && !content.starts_with('|');
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(file: &str, text: &str, kind: Kind) -> Vec<(usize, String)> {
        let all = of(file, text).into_iter().filter(|one| one.kind == kind);
        all.map(|one| (one.line, one.text)).collect()
    }

    #[test]
    fn comments_messages_and_test_names_of_code_are_found() {
        let code = "//! A module\n//! of two lines.\n//!\n//! And more.\n\n/// One.\n\
                    fn one() {\n    // Why.\n    say(\"no such thing\", \"x\");\n}\n\
                    #[test]\nfn this_is_so() {}\n";
        assert_eq!(
            texts("a.rs", code, Kind::Text),
            [
                (1, "A module of two lines.".into()),
                (4, "And more.".into()),
                (8, "Why.".into())
            ]
        );
        assert_eq!(texts("a.rs", code, Kind::Doc), [(6, "One.".into())]);
        assert_eq!(texts("a.rs", code, Kind::Message), [(9, "no such thing".into())]);
        assert_eq!(texts("a.rs", code, Kind::TestName), [(12, "this is so".into())]);
        assert_eq!(texts("a.rs", code, Kind::Line).len(), 12);
    }

    #[test]
    fn paragraphs_of_documents_are_joined_and_code_is_left_out() {
        let text = "# Head\ntext of\ntwo lines\n\n```\ncode\n```\n- item\n  goes on\n| a | b |\n";
        assert_eq!(
            texts("a.md", text, Kind::Text),
            [
                (1, "# Head".into()),
                (2, "text of two lines".into()),
                (8, "- item goes on".into()),
                (10, "| a | b |".into())
            ]
        );
        assert!(of("a.toml", "x = 1").is_empty());
    }
}
