//! The lines of a failure's text that a report shows.

/// Lines of the start and of the end that [`both_ends`] shows.
const END_LINES: usize = 25;
/// Lines that [`of_panic`] shows.
const PANIC_LINES: usize = 15;
/// Lines before the panic, among them.
const LINES_BEFORE: usize = 3;
const PANIC: &str = " panicked at ";
/// The hint below each panic's message.
const HINT: &str = "note: run with `RUST_BACKTRACE";

/// The first lines of a failure's text, with its reason, and the last ones, with the console.
pub fn both_ends(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= 2 * END_LINES {
        return lines.join("\n");
    }
    let (first, last) = (&lines[..END_LINES], &lines[lines.len() - END_LINES..]);
    format!("{}\n[...]\n{}", first.join("\n"), last.join("\n"))
}

/// The lines around the first panic, which others may follow from. The last lines of a text without a panic.
pub fn of_panic<'a>(text: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let says = |line: &&str| !line.trim().is_empty() && !line.starts_with(HINT);
    let lines: Vec<&str> = text.into_iter().filter(says).collect();
    let last_start = lines.len().saturating_sub(PANIC_LINES);
    let start = match lines.iter().position(|line| line.contains(PANIC)) {
        Some(at) => at.saturating_sub(LINES_BEFORE),
        None => last_start,
    };
    let end = lines.len().min(start + PANIC_LINES);
    lines[start..end].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("line {number}")).collect()
    }

    #[test]
    fn lines_around_the_first_panic_are_shown() {
        let mut text = numbered(50);
        text[20] = "thread 'x' (7) panicked at tests/tests/boot.rs:12:5:".to_owned();
        text[22] = "note: run with `RUST_BACKTRACE=1` environment variable".to_owned();
        text[23] = String::new();
        text[40] = "thread 'y' panicked at tests/tests/boot.rs:99:5:".to_owned();
        let shown = of_panic(text.iter().map(String::as_str));
        assert_eq!(shown.len(), PANIC_LINES);
        assert_eq!((shown[0], shown[3]), ("line 17", text[20].as_str()));
        assert_eq!((shown[4], shown[5]), ("line 21", "line 24"));
    }

    #[test]
    fn a_panic_in_the_first_or_last_line_is_shown() {
        let panic = "thread 'x' panicked at a.rs:1:1:".to_owned();
        let mut text = numbered(40);
        text[0].clone_from(&panic);
        let shown = of_panic(text.iter().map(String::as_str));
        assert_eq!((shown[0], shown.len()), (panic.as_str(), PANIC_LINES));
        text = numbered(40);
        text[39].clone_from(&panic);
        let shown = of_panic(text.iter().map(String::as_str));
        assert_eq!((shown.len(), shown[3]), (4, panic.as_str()));
    }

    #[test]
    fn the_end_of_a_text_without_a_panic_is_shown() {
        let text = numbered(40);
        let shown = of_panic(text.iter().map(String::as_str));
        assert_eq!((shown.len(), shown[14]), (PANIC_LINES, "line 39"));
        assert!(of_panic([]).is_empty());
    }

    #[test]
    fn a_long_text_is_shown_by_both_ends() {
        let text = numbered(51).join("\n");
        let shown = both_ends(&text);
        assert!(shown.contains("line 24\n[...]\nline 26"), "{shown}");
        let text = numbered(50).join("\n");
        assert_eq!(both_ends(&text), text);
    }
}
