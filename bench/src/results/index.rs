//! The list of result files, `bench/results/index.toml`.

use serde::Deserialize;

use super::plot::Plot;
use super::value::{Object, Value, field};

/// All results that have a page.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// In the order of the index page.
    #[serde(rename = "result")]
    pub results: Vec<Entry>,
}

/// A result file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Its name in `bench/results`.
    pub file: String,
    /// The title of its page.
    pub title: String,
    /// The measured figures, in sentences.
    pub measured: String,
    /// The command that writes it.
    pub command: String,
    /// The page that discusses it, from the project's folder.
    pub discussed: String,
    /// A picture beside it that the command draws.
    pub picture: Option<String>,
    /// A picture that is drawn from the file.
    pub plot: Option<Plot>,
    /// Fields that its page leaves out, at any depth.
    #[serde(default)]
    pub hidden: Vec<String>,
    /// Date, commit and machine of a file that does not name them itself.
    pub date: Option<String>,
    pub commit: Option<String>,
    pub machine: Option<String>,
}

/// The origin of a file's figures.
#[derive(Debug, PartialEq)]
pub struct Origin {
    pub date: String,
    pub commit: String,
    pub machine: String,
}

impl Entry {
    /// The file's name without its ending.
    pub fn name(&self) -> &str {
        self.file.strip_suffix(".json").unwrap_or(&self.file)
    }

    /// The name of its picture in `bench/results`, if it has one.
    pub fn picture(&self) -> Option<String> {
        let drawn = || self.plot.as_ref().map(|_| format!("{}.svg", self.name()));
        self.picture.clone().or_else(drawn)
    }

    /// The origin of the figures: by the file itself, or by this entry if the file does not name it.
    ///
    /// # Errors
    /// The field that neither names.
    pub fn origin(&self, file: &Object) -> Result<Origin, String> {
        let of = |name: &str, own: &Option<String>| {
            let text = field(file, name).and_then(Value::text).or(own.as_deref());
            text.map(str::to_owned).ok_or_else(|| {
                format!(
                    "bench/results/{}: no `{name}`; help: let its program write one, or add it to index.toml",
                    self.file
                )
            })
        };
        Ok(Origin {
            date: of("date", &self.date)?,
            commit: of("commit", &self.commit)?,
            machine: of("machine", &self.machine)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_in_the_file_precedes_that_of_the_index() {
        let text = "[[result]]\nfile = \"a.json\"\ntitle = \"A\"\nmeasured = \"M.\"\ncommand = \"make a\"\n\
                    discussed = \"a.md\"\ndate = \"2026-01-01\"\nmachine = \"m\"\n";
        let index: Index = toml::from_str(text).unwrap();
        let entry = &index.results[0];
        let file: Value = serde_json::from_str(r#"{"date": "2026-02-02", "commit": "abc"}"#).unwrap();
        let origin = entry.origin(file.object().unwrap()).unwrap();
        assert_eq!(
            (origin.date.as_str(), origin.commit.as_str()),
            ("2026-02-02", "abc")
        );
        assert_eq!(origin.machine, "m");
        let error = entry.origin(&Vec::new()).unwrap_err();
        assert!(
            error.starts_with("bench/results/a.json: no `commit`; help: "),
            "{error}"
        );
    }
}
