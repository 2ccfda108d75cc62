//! Promises that tests cite: `/// Promise CELL-07.` in the doc comment of a test whose row names it.

use std::fs;
use std::io;
use std::path::Path;

use super::{Row, pattern, rows};

const CITATION: &str = "/// Promise ";

/// A promise that the doc comment of a test names.
#[derive(Debug, PartialEq)]
struct Citation<'a> {
    /// Line number, from 1.
    line: usize,
    id: &'a str,
    /// The name of the function below the comment.
    test: &'a str,
}

/// The citations of a source file.
fn citations(source: &str) -> Vec<Citation<'_>> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let cited = lines.iter().enumerate().filter_map(|(index, line)| {
        let id = line.strip_prefix(CITATION)?.strip_suffix('.')?;
        let below = lines[index..].iter().find_map(|line| line.split_once("fn "));
        Some(Citation {
            line: index + 1,
            id,
            test: below.map_or("", |(_, function)| {
                function.split(['(', '<']).next().unwrap_or_default()
            }),
        })
    });
    cited.collect()
}

/// Whether a row names a test of this function.
fn names(row: &Row<'_>, test: &str) -> bool {
    let promises = row.promises();
    let mut patterns = promises.iter().flat_map(|promise| &promise.patterns);
    patterns.any(|pattern| {
        let last = pattern.rsplit("::").next().unwrap_or_default();
        pattern::alike(last, test)
    })
}

/// Errors of a file's citations: an id that no row has, or whose row does not name the test.
fn wrong_in(document: &[Row<'_>], path: &str, source: &str) -> Vec<String> {
    let error = |citation: &Citation<'_>| {
        let Citation { line, id, test } = citation;
        match document.iter().find(|row| row.id() == *id) {
            None => Some(format!("{path}:{line}: SPECIFICATION.md has no promise {id}")),
            Some(row) if !names(row, test) => Some(format!(
                "{path}:{line}: {id}, SPECIFICATION.md line {}, does not name the test {test}",
                row.line
            )),
            Some(_) => None,
        }
    };
    citations(source).iter().filter_map(error).collect()
}

/// Errors of the citations of all tests.
///
/// # Errors
/// If a folder or a file can't be read.
pub fn wrong(document: &str, root: &Path) -> io::Result<Vec<String>> {
    let document = rows(document);
    let mut wrong = Vec::new();
    let mut folders = ["crates", "tests"].map(|name| root.join(name)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
                wrong.extend(wrong_in(&document, &shown, &fs::read_to_string(&path)?));
            }
        }
    }
    wrong.sort_unstable();
    Ok(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "\
| id | promise | proof | status |
| --- | --- | --- | --- |
| VM-01 | starts | `boot::starts_...`, `shard block::*` | tested |
| VM-02 | ends | `endings::ends` | tested |
";

    fn wrong_about(comment: &str, test: &str) -> Vec<String> {
        let source = format!("    /// Fast.\n{comment}\n    #[test]\n    fn {test}() {{}}\n");
        wrong_in(&rows(DOCUMENT), "a.rs", &source)
    }

    #[test]
    fn citation_of_a_row_that_names_the_test_is_right() {
        for (id, test) in [
            ("VM-01", "starts_at_once"),
            ("VM-01", "any_test_of_a_file"),
            ("VM-02", "ends"),
        ] {
            // Written in two parts, so that this file cites nothing.
            let comment = format!("    {CITATION}{id}.");
            assert_eq!(wrong_about(&comment, test), Vec::<String>::new());
        }
    }

    #[test]
    fn citation_of_no_row_or_of_a_row_without_the_test_is_reported() {
        let cited = |id: &str, test: &str| wrong_about(&format!("{CITATION}{id}."), test);
        assert_eq!(
            cited("VM-03", "ends"),
            ["a.rs:2: SPECIFICATION.md has no promise VM-03"]
        );
        assert_eq!(
            cited("VM-02", "starts"),
            ["a.rs:2: VM-02, SPECIFICATION.md line 4, does not name the test starts"]
        );
    }
}
