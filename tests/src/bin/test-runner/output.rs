//! Parses the output of test programs.

use std::collections::BTreeMap;

/// Prefix of a line by which a test reports that it could not check anything here.
pub const LEFT_OUT: &str = "left out: ";

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    Ignored,
}

/// One test of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Test {
    /// Without its program.
    pub name: String,
    pub verdict: Verdict,
    /// Duration, measured from the end of the previous test.
    pub seconds: f64,
    /// The test's reason for checking nothing.
    pub left_out: Option<String>,
    /// The test's own output, where the program shows it.
    pub text: String,
}

/// Parses tests from output lines with their arrival times in seconds.
///
/// A program that runs one test at a time begins a test's line before the test and ends it after. The tests'
/// own output follows behind all of them (`--show-output`).
pub fn tests(lines: &[(f64, String)]) -> Vec<Test> {
    let mut found: Vec<Test> = Vec::new();
    let mut texts: BTreeMap<String, String> = BTreeMap::new();
    let mut section: Option<String> = None;
    let mut begun: Option<String> = None;
    let mut last = lines.first().map_or(0.0, |(at, _)| *at);
    for (at, line) in lines {
        if line.starts_with("running ") {
            last = *at;
        }
        // A child process of the test may write behind the name; the verdict then has a line of its own.
        let ended = match &begun {
            Some(name) if matches!(line.as_str(), "ok" | "FAILED") => {
                result(&format!("test {name} ... {line}"))
            }
            _ => result(line),
        };
        let open = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "));
        begun = match (&ended, open) {
            (None, Some((name, _))) => Some(name.to_owned()),
            (None, None) => begun,
            (Some(_), _) => None,
        };
        if let Some((name, verdict, left_out)) = ended {
            found.push(Test {
                name,
                verdict,
                seconds: at - last,
                left_out,
                text: String::new(),
            });
            last = *at;
            continue;
        }
        let heading = line
            .strip_prefix("---- ")
            .and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = heading {
            section = Some(name.to_owned());
        } else if matches!(line.as_str(), "successes:" | "failures:") {
            section = None;
        } else if let Some(name) = &section {
            let text = texts.entry(name.clone()).or_default();
            text.push_str(line);
            text.push('\n');
        }
    }
    for test in &mut found {
        test.text = texts.remove(&test.name).unwrap_or_default();
        let why = test.text.lines().find_map(|line| line.strip_prefix(LEFT_OUT));
        test.left_out = test.left_out.take().or_else(|| why.map(str::to_owned));
    }
    found
}

/// The name, the verdict, and why a test was ignored.
fn result(line: &str) -> Option<(String, Verdict, Option<String>)> {
    let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let (verdict, reason) = match verdict {
        "ok" => (Verdict::Passed, None),
        "FAILED" => (Verdict::Failed, None),
        ignored => {
            let reason = ignored.strip_prefix("ignored")?.trim_start_matches(", ");
            (
                Verdict::Ignored,
                Some(if reason.is_empty() {
                    "no reason is given"
                } else {
                    reason
                }),
            )
        }
    };
    // "- should panic" is no part of the name.
    let name = name.split(" - should panic").next().unwrap_or(name);
    Some((name.to_owned(), verdict, reason.map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<(f64, String)> {
        let numbered = text.lines().zip(1..);
        numbered
            .map(|(line, at)| (f64::from(at), line.to_owned()))
            .collect()
    }

    #[test]
    fn a_verdict_behind_a_childs_words_is_found() {
        let found = super::tests(&lines(
            "running 1 test\ntest a::b ... mirrorball: no lab\nmore words\nok\nok\n",
        ));
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].name.as_str(), found[0].verdict),
            ("a::b", Verdict::Passed)
        );
    }

    #[test]
    fn results_times_and_reasons_are_taken_from_a_programs_output() {
        let said = "running 4 tests\n\ntest one ... ok\ntest two::three ... FAILED\n\
                    test four - should panic ... ok\ntest five ... ignored, for its length\nsuccesses:\n\
                    ---- one stdout ----\nsome words\nleft out: no device\n\
                    failures:\n---- two::three stdout ----\nthread panicked\nfailures:\n    two::three\n\
                    test result: FAILED. 2 passed; 1 failed";
        let found = super::tests(&lines(said));
        let brief: Vec<_> = found
            .iter()
            .map(|test| (test.name.as_str(), test.verdict, test.seconds))
            .collect();
        assert_eq!(
            brief,
            [
                ("one", Verdict::Passed, 2.0),
                ("two::three", Verdict::Failed, 1.0),
                ("four", Verdict::Passed, 1.0),
                ("five", Verdict::Ignored, 1.0),
            ]
        );
        assert_eq!(found[0].left_out.as_deref(), Some("no device"));
        assert_eq!(found[1].text, "thread panicked\n");
        assert_eq!(found[1].left_out, None);
        assert_eq!(found[3].left_out.as_deref(), Some("for its length"));
    }
}
