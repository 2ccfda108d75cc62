//! Checks the project's prose: words, links, widths. `make lint` runs it; docs/contributing/writing.md has
//! the rules.
//!
//! `lint/allowed.txt` has, for each folder, how many findings of older text are left. A folder with more
//! fails the check. `lint --lower` lowers the numbers of folders that have fewer by now. Links have no
//! allowance.

mod allowed;
mod links;
mod prose;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::allowed::Allowed;

/// Path of the allowances, from the project's folder.
const ALLOWED: &str = "lint/allowed.txt";

/// Most findings of one folder that are shown.
const SHOWN_MAX: usize = 40;

/// A place that breaks a rule.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Finding {
    /// The file, from the project's folder.
    file: String,
    /// Line number, from 1.
    line: usize,
    /// The rule, in a few words.
    why: String,
}

fn main() -> ExitCode {
    let lowers = std::env::args().nth(1).as_deref() == Some("--lower");
    match check(Path::new("."), lowers) {
        Ok(()) => ExitCode::SUCCESS,
        Err(lines) => {
            lines.iter().for_each(|line| eprintln!("lint: {line}"));
            ExitCode::FAILURE
        }
    }
}

/// Checks the project in a folder. Errors are lines for a person.
fn check(root: &Path, lowers: bool) -> Result<(), Vec<String>> {
    let one = |line: String| vec![line];
    let files = files(root).map_err(|error| one(format!("the project's files: {error}")))?;
    let text =
        std::fs::read_to_string(root.join(ALLOWED)).map_err(|error| one(format!("{ALLOWED}: {error}")))?;
    let mut allowed = Allowed::parse(&text).map_err(|error| one(format!("{ALLOWED}: {error}")))?;
    let mut found: BTreeMap<String, Vec<Finding>> = BTreeMap::new();
    let mut broken = Vec::new();
    for file in files {
        // A file that is no text has no prose.
        let Ok(text) = std::fs::read_to_string(root.join(&file)) else {
            continue;
        };
        let name = file.display().to_string();
        if name.ends_with(".md") {
            broken.extend(links::broken(root, &file, &text));
        }
        let of_file = prose::of(&name, &text)
            .iter()
            .flat_map(words::findings)
            .collect::<Vec<_>>();
        found
            .entry(allowed::folder_of(&name))
            .or_default()
            .extend(of_file);
    }
    let mut lines: Vec<String> = broken.iter().map(ToString::to_string).collect();
    for (folder, findings) in &found {
        let most = allowed.of(folder);
        if findings.len() > most {
            lines.extend(findings.iter().take(SHOWN_MAX).map(ToString::to_string));
            lines.push(format!(
                "{folder} has {} findings, and {most} are allowed; \
                 help: change what you wrote by docs/contributing/writing.md",
                findings.len()
            ));
        } else {
            allowed.set(folder, findings.len());
        }
    }
    if lowers {
        let written = std::fs::write(root.join(ALLOWED), allowed.to_string());
        written.map_err(|error| one(format!("{ALLOWED}: {error}")))?;
    }
    if lines.is_empty() { Ok(()) } else { Err(lines) }
}

/// The files in a folder and the folders in it, from `root` and in their order, without hidden ones and those
/// that a build makes.
fn files(root: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let name = entry.file_name();
            if name == "target" || name.to_string_lossy().starts_with('.') {
                continue;
            }
            let kind = entry.file_type()?;
            match kind.is_dir() {
                true => folders.push(folder.join(name)),
                false if kind.is_file() => found.push(folder.join(name)),
                false => {}
            }
        }
    }
    found.sort();
    Ok(found)
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.why)
    }
}
