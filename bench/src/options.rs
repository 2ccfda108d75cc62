//! Options of a bench on its command line: pairs of `--name VALUE`.

use std::collections::HashMap;

use crate::Outcome;

/// Options of a command line: `--name value`, each at most once.
pub struct Options {
    values: HashMap<String, String>,
    usage: &'static str,
}

impl Options {
    /// This process's options. Errors show `usage`.
    ///
    /// # Errors
    /// If a word has no pair.
    pub fn of_process(usage: &'static str) -> Outcome<Self> {
        Self::of(std::env::args().skip(1), usage)
    }

    fn of(mut words: impl Iterator<Item = String>, usage: &'static str) -> Outcome<Self> {
        let mut values = HashMap::new();
        while let Some(name) = words.next() {
            let pair = name.strip_prefix("--").zip(words.next());
            let (name, value) = pair.ok_or_else(|| format!("{name}: no `--name VALUE`; {usage}"))?;
            values.insert(name.to_owned(), value);
        }
        Ok(Self { values, usage })
    }

    /// The value of a name, if it was given.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// The value of a name that must be given.
    ///
    /// # Errors
    /// If it was not given.
    pub fn needed(&self, name: &str) -> Outcome<&str> {
        let value = self.get(name);
        Ok(value.ok_or_else(|| format!("--{name} is missing: {}", self.usage))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Outcome<Options> {
        Options::of(text.split_whitespace().map(str::to_owned), "say --out FILE")
    }

    #[test]
    fn pairs_are_found_by_their_names() {
        let options = options("--out a.json --runs 3").unwrap();
        assert_eq!(
            (options.get("out"), options.get("runs")),
            (Some("a.json"), Some("3"))
        );
        assert_eq!(options.get("machine"), None);
        assert_eq!(options.needed("out").unwrap(), "a.json");
    }

    #[test]
    fn errors_name_the_wrong_option_and_show_the_usage() {
        for (text, wrong) in [
            ("--out", "--out: no `--name VALUE`; say --out FILE"),
            ("out a.json", "out: no `--name VALUE`; say --out FILE"),
        ] {
            let error = options(text).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), Some(wrong));
        }
        let options = options("").unwrap();
        let error = options.needed("out").err().map(|error| error.to_string());
        assert_eq!(error.as_deref(), Some("--out is missing: say --out FILE"));
    }
}
