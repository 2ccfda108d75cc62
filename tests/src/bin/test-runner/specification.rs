//! Compares SPECIFICATION.md with the tests that passed.
//!
//! In each table row whose last cell starts with "tested" or "in part", every name with `::` must match a
//! passed test. A name may omit modules and may be short: `shard block::*`, `endings::five_reboots...`,
//! `boot::cloud_kernel_boots_with_{one,two}_cpus`. A name without a crate takes the crate of the previous
//! name.

use crate::campaign::Kept;

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
    let mut found = Vec::new();
    for (number, line) in (1..).zip(document.lines()) {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [_, proof, .., status] = cells[..] else {
            continue;
        };
        if !line.starts_with('|') || !(status.starts_with("tested") || status.starts_with("in part")) {
            continue;
        }
        let mut package = String::new();
        for quoted in proof
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|quoted| quoted.contains("::"))
        {
            let (own, path) = quoted.rsplit_once(' ').unwrap_or(("", quoted));
            if !own.is_empty() {
                package = own.to_owned();
            }
            let patterns = braces(path);
            let patterns = patterns
                .iter()
                .map(|path| format!("{package} {path}").trim().to_owned());
            found.push(Promise {
                line: number,
                text: quoted.to_owned(),
                patterns: patterns.collect(),
            });
        }
    }
    found
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

/// Expands `a{b,c}d` to `abd` and `acd`.
fn braces(text: &str) -> Vec<String> {
    let Some((start, rest)) = text.split_once('{') else {
        return vec![text.to_owned()];
    };
    let Some((inner, end)) = rest.split_once('}') else {
        return vec![text.to_owned()];
    };
    inner
        .split(',')
        .flat_map(|part| braces(&format!("{start}{}{end}", part.trim())))
        .collect()
}

/// Whether a pattern matches a test's full name.
fn matches(pattern: &str, name: &str) -> bool {
    let (package, path) = pattern.rsplit_once(' ').unwrap_or(("", pattern));
    let (own, modules) = name.split_once(' ').unwrap_or(("", name));
    // A guest test's name has no crate; its program is its first module.
    if !own.is_empty() && !package.is_empty() && package.split(' ').next() != Some(own) {
        return false;
    }
    let mut modules = modules.split("::");
    path.split("::")
        .all(|wanted| modules.by_ref().any(|module| alike(wanted, module)))
}

/// Whether a pattern matches a text; `*` and `...` match anything.
fn alike(wanted: &str, word: &str) -> bool {
    let wanted = wanted.replace("...", "*");
    let mut parts = wanted.split('*');
    let Some(mut rest) = parts.next().and_then(|first| word.strip_prefix(first)) else {
        return false;
    };
    let Some(last) = wanted
        .contains('*')
        .then(|| wanted.rsplit('*').next().unwrap_or_default())
    else {
        return rest.is_empty();
    };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    last.is_empty() || word.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "\
| promise | proof | status |
| --- | --- | --- |
| starts | `boot::cloud_kernel_boots_with_{one,two}_cpus`; `shard block::*`, `net::tests::broken_...`; `make test` | tested |
| later | `boot::no_such_test` | not proven here |
| ends | `endings::five_reboots...` | in part: five |
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
    fn stars_and_dots_stand_for_anything() {
        assert!(alike("a*", "abc") && alike("a*c", "abc") && alike("*", "") && alike("ab...", "ab"));
        assert!(!alike("a", "ab") && !alike("b*", "ab") && !alike("a*d", "abc"));
    }
}
