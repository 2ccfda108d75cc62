//! How many findings each folder may have.

use std::collections::BTreeMap;
use std::fmt;

/// The comment at the top of the file.
const HEAD: &str =
    "# Findings of `make lint` in text that is older than the rules, by folder. Numbers only fall.\n";

/// The numbers by folder.
#[derive(Debug, Default)]
pub struct Allowed(BTreeMap<String, usize>);

impl Allowed {
    /// Reads lines of a folder and a number.
    ///
    /// # Errors
    /// The line that is neither a folder and a number nor a comment.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        let read = lines.map(|line| {
            let (folder, count) = line
                .rsplit_once(' ')
                .ok_or_else(|| format!("no number in {line:?}"))?;
            let count = count.parse().map_err(|_| format!("no number in {line:?}"))?;
            Ok((folder.to_owned(), count))
        });
        read.collect::<Result<_, String>>().map(Self)
    }

    /// The number of a folder.
    pub fn of(&self, folder: &str) -> usize {
        self.0.get(folder).copied().unwrap_or(0)
    }

    /// Changes the number of a folder.
    pub fn set(&mut self, folder: &str, count: usize) {
        match count {
            0 => drop(self.0.remove(folder)),
            count => drop(self.0.insert(folder.to_owned(), count)),
        }
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HEAD)?;
        self.0
            .iter()
            .try_for_each(|(folder, count)| writeln!(f, "{folder} {count}"))
    }
}

/// The folder that a file counts for: a crate, or a folder of documents.
pub fn folder_of(file: &str) -> String {
    let parts: Vec<&str> = file.split('/').collect();
    match parts[..] {
        [top @ ("crates" | "docs" | "tests"), folder, _, ..] => format!("{top}/{folder}"),
        [top, _, ..] => top.to_owned(),
        _ => ".".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_counts_for_its_crate_or_folder() {
        for (file, folder) in [
            ("README.md", "."),
            ("crates/cell/src/vm.rs", "crates/cell"),
            ("docs/guide/lab.md", "docs/guide"),
            ("docs/README.md", "docs"),
            ("fuzz/src/a.rs", "fuzz"),
        ] {
            assert_eq!(folder_of(file), folder);
        }
    }

    #[test]
    fn numbers_are_read_lowered_and_written_and_a_folder_without_findings_leaves_the_list() {
        let mut allowed = Allowed::parse("# head\ncrates/a 3\ncrates/b 2\n").unwrap();
        assert_eq!((allowed.of("crates/a"), allowed.of("crates/c")), (3, 0));
        allowed.set("crates/a", 1);
        allowed.set("crates/b", 0);
        assert_eq!(allowed.to_string(), format!("{HEAD}crates/a 1\n"));
        assert!(Allowed::parse("crates/a three").is_err());
    }
}
