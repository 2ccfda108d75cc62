//! Text from a guest or a shard, on its way to a terminal.

use serde_json::Value;

/// The text without control characters, which a terminal would obey. Each is replaced by a space, so the
/// result is one line.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Makes every string within a JSON value [`printable`], keys included.
pub(crate) fn make_printable(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => *text = printable(text),
        Value::Array(values) => values.iter_mut().for_each(make_printable),
        Value::Object(entries) => {
            if entries.keys().any(|key| key.contains(char::is_control)) {
                let unclean = std::mem::take(entries);
                entries.extend(unclean.into_iter().map(|(key, value)| (printable(&key), value)));
            }
            entries.values_mut().for_each(make_printable);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_control_character_is_left_in_text_or_anywhere_in_json() {
        assert_eq!(
            printable("\x1b]0;title\x07 a\nb\u{9b}2J é"),
            " ]0;title  a b 2J é"
        );
        let mut value = json!({ "a\x1b[2J": ["\u{1b}c", 7, { "b": "x\ry", "c": "clean" }] });
        make_printable(&mut value);
        assert_eq!(value, json!({ "a [2J": [" c", 7, { "b": "x y", "c": "clean" }] }));
    }
}
