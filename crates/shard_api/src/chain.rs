//! An error with its causes in one line, as a process reports it to the process that started it.

use std::error::Error;

/// Returns the line. A cause that an error's own text has already is not repeated.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::chain;

    #[derive(Debug, thiserror::Error)]
    #[error("{what}")]
    struct Outer {
        what: &'static str,
        source: io::Error,
    }

    #[test]
    fn each_cause_is_named_once() {
        for (what, line) in [
            ("cannot read it", "cannot read it: disk gone"),
            (
                "cannot read it (disk gone); look at it",
                "cannot read it (disk gone); look at it",
            ),
        ] {
            let source = io::Error::other("disk gone");
            assert_eq!(chain(&Outer { what, source }), line);
        }
    }
}
