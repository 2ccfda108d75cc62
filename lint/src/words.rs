//! Words that a reader of the field does not expect, and what to write instead.

use crate::Finding;
use crate::prose::{Kind, Prose};

/// Columns of a line of code or prose. A row of a table, and a line with a link, may be longer.
const COLUMNS_MAX: usize = 110;

/// Phrases that are not used, in small letters, and their replacements.
const BANNED: [(&str, &str); 40] = [
    ("mend", "help, repair or fix"),
    ("mends", "help, repairs or fixes"),
    ("mended", "fixed"),
    ("mending", "the fix"),
    ("is told", "receives"),
    ("are told", "receive"),
    ("was told", "received"),
    ("hears of", "is notified of"),
    ("hear of", "be notified of"),
    ("heard of", "was notified of"),
    ("knows of", "has a record of"),
    ("know of", "have a record of"),
    ("is asked", "receives a request"),
    ("are asked", "receive a request"),
    ("was asked", "received a request"),
    ("were asked", "received a request"),
    ("what is said", "the messages"),
    ("what it says", "its reports"),
    ("what comes of", "the result of"),
    ("what is so", "the facts"),
    ("and what not", "and its exceptions"),
    ("no more", "any more, or: nothing else"),
    ("at all events", "in any case"),
    ("to whom", "the receiver"),
    ("somebody", "the process, thread or user by its name"),
    ("anybody", "any process, thread or user"),
    ("everybody", "all processes, threads or users"),
    ("whoever", "the process, thread or user by its name"),
    ("for ever", "forever"),
    ("for good", "permanently"),
    ("once more", "again"),
    ("now and then", "occasionally"),
    ("at last", "finally"),
    ("in vain", "without success"),
    ("is said", "is reported"),
    ("as said", "as stated, with the place"),
    ("be had", "be available"),
    ("at hand", "available"),
    ("and the like", "the kind of the others"),
    ("out of turn", "out of order"),
];

/// Words that are no subject of a sentence, unless it is a question.
const NO_SUBJECTS: [&str; 7] = ["who", "what", "whoever", "whatever", "nobody", "whose", "who's"];

/// The findings of a piece of prose.
pub fn findings(prose: &Prose) -> Vec<Finding> {
    let mut reasons = Vec::new();
    if prose.kind == Kind::Line {
        let is_free = prose.text.trim_start().starts_with('|')
            || prose.text.contains("](")
            || prose.text.contains("://");
        if prose.text.chars().count() > COLUMNS_MAX && !is_free {
            reasons.push(format!("a line of more than {COLUMNS_MAX} columns"));
        }
    } else {
        let text = plain(&prose.text);
        for (phrase, instead) in BANNED {
            reasons.extend(has(&text, phrase).then(|| format!("\"{phrase}\": write {instead}")));
        }
        if prose.kind == Kind::Doc && is_empty(&text) {
            reasons.push(format!("a comment that says nothing: {:?}", prose.text));
        }
        if matches!(prose.kind, Kind::Text | Kind::Doc) {
            let subjects = sentences(&prose.text).filter_map(no_subject);
            reasons.extend(subjects.map(|word| format!("a sentence whose subject is \"{word}\"")));
        }
        if prose.kind == Kind::TestName && no_subject(&prose.text).is_some() {
            reasons.push(format!(
                "a test's name that states no guarantee: \"{}\"",
                prose.text
            ));
        }
    }
    let finding = |why| Finding {
        file: prose.file.clone(),
        line: prose.line,
        why,
    };
    reasons.into_iter().map(finding).collect()
}

/// The text in small letters with one blank around each word; text in backticks is no prose.
fn plain(text: &str) -> String {
    let outside: String = text.split('`').step_by(2).collect::<Vec<_>>().join(" x ");
    let mut plain = String::from(" ");
    for word in outside
        .split(|c: char| !c.is_alphanumeric() && c != '\'')
        .filter(|word| !word.is_empty())
    {
        plain.push_str(&word.to_lowercase());
        plain.push(' ');
    }
    plain
}

fn has(plain: &str, phrase: &str) -> bool {
    plain.contains(&format!(" {phrase} "))
}

/// Whether a comment is a pronoun, or an owner without what is owned.
fn is_empty(plain: &str) -> bool {
    const PRONOUNS: [&str; 12] = [
        "it", "its", "whose", "which", "what", "who", "that", "those", "they", "theirs", "how", "where",
    ];
    match plain.split_whitespace().collect::<Vec<_>>()[..] {
        [word] => PRONOUNS.contains(&word),
        ["the", word] => word.ends_with("'s"),
        [first, second] => (first == "to" || first == "from" || first == "of") && PRONOUNS.contains(&second),
        _ => false,
    }
}

/// The sentences of a text, with their last mark.
fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(['.', '?', '!', ':', ';']).map(str::trim)
}

/// The first word of a sentence, if it is no subject. A phrase such as "what the host is made of" counts too:
/// a noun is better.
fn no_subject(sentence: &str) -> Option<&'static str> {
    if sentence.ends_with('?') {
        return None;
    }
    let first = sentence
        .trim_start_matches(['-', '*', '#', '|', ' '])
        .split_whitespace()
        .next()?
        .to_lowercase();
    NO_SUBJECTS.into_iter().find(|word| *word == first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasons(kind: Kind, text: &str) -> usize {
        let prose = Prose {
            file: "a.rs".into(),
            line: 1,
            kind,
            text: text.into(),
        };
        findings(&prose).len()
    }

    #[test]
    fn banned_words_are_found_as_words_and_not_in_code() {
        assert_eq!(reasons(Kind::Text, "The mend is simple."), 1);
        assert_eq!(reasons(Kind::Text, "It amends the `mend` table."), 0);
        assert_eq!(reasons(Kind::Message, "the cell is asked again"), 1);
        assert_eq!(reasons(Kind::Text, "It waits for ever, and in vain."), 2);
        assert_eq!(reasons(Kind::Text, "It waits at lasting cost."), 0);
    }

    #[test]
    fn comments_that_are_pronouns_are_found() {
        for text in ["It.", "Whose.", "The home's.", "To whom."] {
            assert!(reasons(Kind::Doc, text) > 0, "{text}");
        }
        for text in ["The home.", "Bytes.", "It ends."] {
            assert_eq!(reasons(Kind::Doc, text), 0, "{text}");
        }
    }

    #[test]
    fn sentences_have_subjects_and_questions_may_begin_as_they_do() {
        assert_eq!(reasons(Kind::Text, "It ends. Who finds nothing polls."), 1);
        assert_eq!(reasons(Kind::Text, "What does it take? It takes root."), 0);
        assert_eq!(reasons(Kind::TestName, "what is given is in writing"), 1);
        assert_eq!(
            reasons(Kind::TestName, "grant is persisted before it is announced"),
            0
        );
    }

    #[test]
    fn long_lines_are_found_unless_they_are_rows_or_links() {
        assert_eq!(reasons(Kind::Line, &"x".repeat(COLUMNS_MAX)), 0);
        assert_eq!(reasons(Kind::Line, &"x".repeat(COLUMNS_MAX + 1)), 1);
        assert_eq!(reasons(Kind::Line, &format!("| {}", "x".repeat(COLUMNS_MAX))), 0);
    }
}
