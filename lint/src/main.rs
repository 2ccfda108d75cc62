//! Checks the project's prose: words, links, widths. `make lint` runs it; docs/contributing/writing.md has
//! the rules.

mod links;
mod prose;
mod words;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    match check(Path::new(".")) {
        Ok(lines) if lines.is_empty() => return ExitCode::SUCCESS,
        Ok(lines) => {
            lines.iter().for_each(|line| eprintln!("lint: {line}"));
            eprintln!(
                "lint: {} findings; help: change the text by docs/contributing/writing.md",
                lines.len()
            );
        }
        Err(error) => eprintln!("lint: the project's files can't be read: {error}"),
    }
    ExitCode::FAILURE
}

/// Checks the project in a folder. Returns the findings, as lines for a person.
fn check(root: &Path) -> std::io::Result<Vec<String>> {
    let mut lines = Vec::new();
    for file in files(root)? {
        // A file that is no text has no prose.
        let Ok(text) = std::fs::read_to_string(root.join(&file)) else {
            continue;
        };
        let name = file.display().to_string();
        if name.ends_with(".md") {
            lines.extend(links::broken(root, &file, &text).iter().map(ToString::to_string));
        }
        let findings = prose::of(&name, &text);
        let findings = findings.iter().flat_map(words::findings);
        lines.extend(findings.map(|finding| finding.to_string()));
    }
    Ok(lines)
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
