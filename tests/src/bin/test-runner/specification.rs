//! Compares SPECIFICATION.md with the tests that passed, and with the tests that cite its promises.
//!
//! Each row of a table is a promise with an id, as `CELL-07`, which it keeps when rows move. In each row
//! whose last cell starts with "tested" or "in part", every name with `::` must match a passed test. A name
//! may omit modules and may be short: `shard block::*`, `endings::five_reboots...`,
//! `boot::cloud_kernel_boots_with_{one,two}_cpus`. A name without a crate takes the crate of the previous
//! name.

pub mod citations;
mod pattern;

use std::collections::BTreeMap;

use crate::campaign::Kept;
use pattern::{braces, matches};

/// A row of a table.
#[derive(Debug)]
struct Row<'a> {
    /// Line number, from 1.
    line: usize,
    /// Text between bars that are not escaped.
    cells: Vec<&'a str>,
}

impl Row<'_> {
    fn id(&self) -> &str {
        self.cells.first().copied().unwrap_or_default()
    }

    /// Test names of the row, with their braces expanded.
    fn promises(&self) -> Vec<Promise> {
        let [_, _, proof, .., status] = self.cells[..] else {
            return Vec::new();
        };
        if !(status.starts_with("tested") || status.starts_with("in part")) {
            return Vec::new();
        }
        let mut package = String::new();
        let quoted = proof.split('`').skip(1).step_by(2);
        let names = quoted.filter(|quoted| quoted.contains("::"));
        names
            .map(|quoted| {
                let (own, path) = quoted.rsplit_once(' ').unwrap_or(("", quoted));
                if !own.is_empty() {
                    package = own.to_owned();
                }
                let patterns = braces(path).into_iter();
                Promise {
                    line: self.line,
                    text: quoted.to_owned(),
                    patterns: patterns
                        .map(|path| format!("{package} {path}").trim().to_owned())
                        .collect(),
                }
            })
            .collect()
    }
}

/// The rows of all tables, without their heads.
fn rows(document: &str) -> Vec<Row<'_>> {
    let is_rule = |line: &str| line.starts_with("| ---");
    let lines: Vec<&str> = document.lines().collect();
    let is_row = |(index, line): &(usize, &str)| {
        let is_head = lines.get(index + 1).is_some_and(|next| is_rule(next));
        line.starts_with('|') && !is_rule(line) && !is_head
    };
    let numbered = lines.iter().copied().enumerate().filter(is_row);
    numbered
        .map(|(index, line)| Row {
            line: index + 1,
            cells: cells(line),
        })
        .collect()
}

/// The cells of a row. `\|` is a bar within a cell.
fn cells(line: &str) -> Vec<&str> {
    let bars = line
        .match_indices('|')
        .map(|(at, _)| at)
        .filter(|at| !line[..*at].ends_with('\\'));
    let bars: Vec<usize> = bars.collect();
    bars.windows(2)
        .map(|bars| line[bars[0] + 1..bars[1]].trim())
        .collect()
}

/// A test name in the document.
#[derive(Clone, Debug, PartialEq)]
pub struct Promise {
    /// Line number, from 1.
    pub line: usize,
    /// The name as written.
    pub text: String,
    /// The name with its braces expanded; a test of each pattern must have passed.
    patterns: Vec<String>,
}

/// The names in rows that say "tested" or "in part".
pub fn promises(document: &str) -> Vec<Promise> {
    rows(document).iter().flat_map(Row::promises).collect()
}

/// Errors of ids: a row without one, an id of two rows.
pub fn wrong_ids(document: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut seen = BTreeMap::new();
    for row in rows(document) {
        if !is_id(row.id()) {
            wrong.push(format!(
                "SPECIFICATION.md:{}: the first cell is no id; write one as CELL-07",
                row.line
            ));
        } else if let Some(first) = seen.insert(row.id().to_owned(), row.line) {
            wrong.push(format!(
                "SPECIFICATION.md:{}: {} is the id of line {first} too",
                row.line,
                row.id()
            ));
        }
    }
    wrong
}

/// Whether a text is the id of a row: capitals, a hyphen, two digits or more.
fn is_id(text: &str) -> bool {
    text.split_once('-').is_some_and(|(subject, number)| {
        let is_number = number.len() >= 2 && number.bytes().all(|byte| byte.is_ascii_digit());
        !subject.is_empty() && subject.bytes().all(|byte| byte.is_ascii_uppercase()) && is_number
    })
}

/// Promises without a passed test. Full test names start with their program: `boot::x`, `shard block::y`.
pub fn unproven(promises: &[Promise], passed: &[String]) -> Vec<Promise> {
    let kept = |pattern: &String| passed.iter().any(|name| matches(pattern, name));
    let broken = |promise: &&Promise| !promise.patterns.iter().all(kept);
    promises.iter().filter(broken).cloned().collect()
}

/// Errors of the document about campaigns. Each result needs a row with its file's name and the word `fresh`
/// or `stale`.
pub fn wrong_about_campaigns(document: &str, kept: &[Kept]) -> Vec<String> {
    let mut wrong = Vec::new();
    for kept in kept {
        let file = format!("campaign-{}.json", kept.name);
        let Some(row) = document
            .lines()
            .find(|line| line.starts_with('|') && line.contains(&file))
        else {
            wrong.push(format!("SPECIFICATION.md: no row names docs/results/{file}"));
            continue;
        };
        if let Some(state) = kept.state()
            && !row.contains(state)
        {
            wrong.push(format!(
                "SPECIFICATION.md: {file}, of commit {}, is {state}, and its row does not say so",
                kept.commit
            ));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "\
| id | promise | proof | status |
| --- | --- | --- | --- |
| VM-01 | starts | `boot::cloud_kernel_boots_with_{one,two}_cpus`; `shard block::*`, `net::tests::broken_...`; `make test` | tested |
| VM-02 | later | `boot::no_such_test` | not proven here |
| VM-03 | `stop\\|kill` ends | `endings::five_reboots...` | in part: five |
";

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn names_of_tested_rows_are_found_and_matched() {
        let promises = promises(DOCUMENT);
        let told: Vec<&str> = promises.iter().map(|promise| promise.text.as_str()).collect();
        assert_eq!(
            told,
            [
                "boot::cloud_kernel_boots_with_{one,two}_cpus",
                "shard block::*",
                "net::tests::broken_...",
                "endings::five_reboots..."
            ]
        );
        let passed = names(&[
            "boot::cloud_kernel_boots_with_one_cpus",
            "boot::cloud_kernel_boots_with_two_cpus",
            "shard virtio::block::tests::reads",
            "shard virtio::net::tests::broken_chains",
            "endings::five_reboots_in_place",
        ]);
        assert_eq!(unproven(&promises, &passed), []);
    }

    #[test]
    fn a_test_that_did_not_pass_leaves_its_promise_unproven() {
        let promises = promises(DOCUMENT);
        let passed = names(&[
            "boot::cloud_kernel_boots_with_one_cpus",
            "cell block::tests::reads",
            "shard virtio::net::tests::broken_chains",
        ]);
        let unproven = unproven(&promises, &passed);
        let told: Vec<&str> = unproven.iter().map(|promise| promise.text.as_str()).collect();
        assert_eq!(
            told,
            [
                "boot::cloud_kernel_boots_with_{one,two}_cpus",
                "shard block::*",
                "endings::five_reboots..."
            ]
        );
    }

    #[test]
    fn a_campaign_without_a_row_or_with_the_wrong_state_is_reported() {
        let kept = |name: &str, age_commits| Kept {
            name: name.into(),
            commit: "abc".into(),
            age_commits,
        };
        let document = "| `campaign-moves.json` | abc | fresh |\n| `campaign-boot.json` | abc | stale |\n";
        let wrong = |kept: Kept| wrong_about_campaigns(document, &[kept]).len();
        assert_eq!(wrong(kept("moves", Some(1))), 0);
        assert_eq!(wrong(kept("moves", Some(100_000))), 1);
        assert_eq!(wrong(kept("boot", Some(1))), 1);
        assert_eq!(wrong(kept("boot", None)), 0);
        assert_eq!(wrong(kept("span", Some(1))), 1);
    }

    #[test]
    fn row_without_an_id_and_id_of_two_rows_are_reported() {
        assert_eq!(wrong_ids(DOCUMENT), Vec::<String>::new());
        let twice = DOCUMENT.replace("VM-03", "VM-01");
        assert_eq!(
            wrong_ids(&twice),
            ["SPECIFICATION.md:5: VM-01 is the id of line 3 too"]
        );
        for no_id in ["starts", "VM-1", "vm-01", "VM01", "VM-", ""] {
            let wrong = wrong_ids(&DOCUMENT.replace("VM-02", no_id));
            assert_eq!(
                wrong,
                ["SPECIFICATION.md:4: the first cell is no id; write one as CELL-07"]
            );
        }
    }

    #[test]
    fn specification_of_this_tree_names_known_tests_under_unique_ids() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let read = |name: &str| std::fs::read_to_string(root.join(name)).unwrap();
        let (document, ledger) = (read("SPECIFICATION.md"), read("tests/ledger.txt"));
        assert_eq!(wrong_ids(&document), Vec::<String>::new());
        let known: Vec<String> = crate::ledger::names(&ledger).map(str::to_owned).collect();
        assert_eq!(unproven(&promises(&document), &known), []);
        assert_eq!(citations::wrong(&document, root).unwrap(), Vec::<String>::new());
    }
}
