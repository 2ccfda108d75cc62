//! Links between documents.

use std::path::{Component, Path, PathBuf};

use crate::Finding;

/// The links of a document that lead nowhere: to no file, or to no heading of one.
pub fn broken(root: &Path, file: &Path, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        for target in targets(content).filter(|target| !target.contains("://")) {
            let (path, heading) = target
                .split_once('#')
                .map_or((target, None), |(path, at)| (path, Some(at)));
            let to = match path {
                "" => file.to_owned(),
                path => normal(&file.parent().unwrap_or(Path::new("")).join(path)),
            };
            let has_heading = |heading: &str| {
                let text = std::fs::read_to_string(root.join(&to)).unwrap_or_default();
                let mut headings = text.lines().filter(|line| line.starts_with('#'));
                headings.any(|line| anchor(line) == heading)
            };
            let is_document = to.extension().is_some_and(|end| end == "md");
            if !root.join(&to).exists()
                || (is_document && heading.is_some_and(|heading| !has_heading(heading)))
            {
                found.push(Finding {
                    file: file.display().to_string(),
                    line,
                    why: format!("the link {target} leads nowhere"),
                });
            }
        }
    }
    found
}

/// The targets of a line's links.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target)
}

/// A path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(result.pop()),
            part => result.push(part),
        }
    }
    result
}

/// The name that a heading has in links, as on the usual sites for repositories.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_to_no_file_or_heading_is_found() {
        let root = std::env::temp_dir().join(format!("lint-links-{}", std::process::id()));
        std::fs::create_dir_all(root.join("docs")).unwrap();
        std::fs::write(root.join("docs/a.md"), "# The `way` there, and back\n").unwrap();
        let text = "[a](docs/a.md) [b](docs/a.md#the-way-there-and-back)\n[c](docs/b.md) [d](docs/a.md#there)\n\
                    [e](https://example.org/x) [f](#own)\n# Own\n";
        let lines: Vec<_> = broken(&root, Path::new("README.md"), text)
            .iter()
            .map(|one| one.line)
            .collect();
        let from_folder = broken(&root, Path::new("docs/c.md"), "[a](a.md) [r](../README.md)");
        std::fs::write(root.join("README.md"), text).unwrap();
        let with_own = broken(&root, Path::new("README.md"), text).len();
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            lines,
            [2, 2, 3],
            "its own headings are in a file that is not there yet"
        );
        assert_eq!(from_folder.len(), 1);
        assert_eq!(with_own, 2);
    }
}
