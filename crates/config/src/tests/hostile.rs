//! No text makes the reader, the checks or the renderer panic, and every error has a place and help.

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::shown;
use crate::{cpulist, parse};

const EXAMPLES: [&str; 5] = [
    include_str!("../../../../examples/debian.toml"),
    include_str!("../../../../examples/tiny.toml"),
    include_str!("../../../../examples/numa.toml"),
    include_str!("../../../../examples/span.toml"),
    include_str!("../../../../examples/paging.toml"),
];

/// Values that are invalid in most places.
const VALUES: [&str; 16] = [
    "-1",
    "0",
    "255",
    "1e400",
    "9223372036854775807",
    "\"\"",
    "\"0B\"",
    "\"99999999999999999999G\"",
    "\"\\u0000\"",
    "\"ß\\n\"",
    "[]",
    "[[]]",
    "{}",
    "true",
    "1979-05-27",
    "\"0-253,254\"",
];

fn show_if_refused(text: &str) {
    let Err(error) = parse("ä.toml", text) else {
        return;
    };
    let span = error.span.unwrap();
    assert!(text.get(span.offset()..span.offset() + span.len()).is_some());
    assert!(error.help.as_ref().is_some_and(|help| !help.is_empty()));
    assert!(
        !error.message.is_empty() && !error.message.contains('\n'),
        "{:?}",
        error.message
    );
    shown(&error);
}

/// Changes an example: a value, a line or a range of text.
fn change(text: &str, how: u8, at: Index, value: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    if lines.is_empty() {
        return value.to_owned();
    }
    let line = at.index(lines.len());
    match how {
        0 => {
            lines[line] = format!(
                "{} = {value}",
                lines[line].split(" = ").next().unwrap_or_default()
            )
        }
        1 => drop(lines.remove(line)),
        2 => lines.insert(line, lines[line].clone()),
        3 => lines[line] = lines[line].trim_start_matches('#').to_owned(),
        4 => lines[line].insert_str(0, value),
        _ => lines[line] = lines[line].chars().rev().collect(),
    }
    lines.join(if how == 5 { "\r\n" } else { "\n" })
}

proptest! {
    #[test]
    fn any_text_is_parsed_or_refused_without_panic(text in any::<String>()) {
        show_if_refused(&text);
    }

    #[test]
    fn changed_example_is_parsed_or_refused_without_panic(
        example in select(&EXAMPLES[..]),
        changes in prop::collection::vec((0..6u8, any::<Index>(), select(&VALUES[..])), 1..8),
    ) {
        let mut text = example.to_owned();
        for (how, at, value) in changes {
            text = change(&text, how, at, value);
        }
        show_if_refused(&text);
    }

    #[test]
    fn a_list_of_cpus_is_sorted_and_below_254(text in "[0-9,+ -]{0,12}") {
        if let Some(cpus) = cpulist::parse(&text) {
            assert!(!cpus.is_empty() && cpus.is_sorted() && cpus.iter().all(|&cpu| cpu < 254));
        }
    }
}

#[test]
fn list_of_cpus_in_descending_order_is_refused() {
    assert_eq!(cpulist::parse("5-4"), None);
    assert_eq!(cpulist::parse("4,0-1"), Some(vec![0, 1, 4]));
}
