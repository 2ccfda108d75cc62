//! The log of a process: lines on standard error with a time, a level, and a target, which is the module that
//! wrote the line.
//!
//! | process | standard error | writes its log |
//! | --- | --- | --- |
//! | cell, guard | the cell's log file | always |
//! | shard | the log of its VM | always |
//! | API | that of its parent | always |
//! | monitor | that of its client, where [`LEVEL`] is set, else nothing | where [`LEVEL`] is set |
//!
//! A keeper has no log: it links no formatter, and the process that serves its VM reports its events. A frame
//! filter writes only the reason for its end, which that process reads. Commands print errors for people.

use std::io;

use tracing::level_filters::LevelFilter;

/// Environment variable for the lowest level: `error`, `warn`, `info` (default), `debug`, `trace` or `off`.
pub const LEVEL: &str = "MIRRORBALL_LOG";
/// Environment variable for the format: `text` (default), or `json`, one object per line.
pub const FORMAT: &str = "MIRRORBALL_LOG_FORMAT";

/// Settings of a process's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    level: LevelFilter,
    is_json: bool,
}

impl Settings {
    /// Reads the settings from the environment. Child processes inherit it.
    ///
    /// # Errors
    /// If a variable has a value that is not listed above.
    pub fn of_environment() -> io::Result<Self> {
        Self::of(|name| match std::env::var(name) {
            Ok(text) => Ok(text),
            Err(std::env::VarError::NotPresent) => Ok(String::new()),
            Err(error) => Err(invalid(format!("{name}: {error}"))),
        })
    }

    /// Parses the values of the variables; an unset variable is empty.
    fn of(value: impl Fn(&str) -> io::Result<String>) -> io::Result<Self> {
        let level = match &*value(LEVEL)? {
            "" => LevelFilter::INFO,
            "off" => LevelFilter::OFF,
            "error" => LevelFilter::ERROR,
            "warn" => LevelFilter::WARN,
            "info" => LevelFilter::INFO,
            "debug" => LevelFilter::DEBUG,
            "trace" => LevelFilter::TRACE,
            other => {
                let levels = "error, warn, info, debug, trace or off";
                return Err(invalid(format!("{LEVEL}={other}: no level; help: {levels}")));
            }
        };
        let is_json = match &*value(FORMAT)? {
            "" | "text" => false,
            "json" => true,
            other => {
                return Err(invalid(format!(
                    "{FORMAT}={other}: no format; help: text or json"
                )));
            }
        };
        Ok(Self { level, is_json })
    }

    /// Arguments that pass these settings to a process without an environment; none for the defaults.
    pub fn to_args(self) -> Vec<String> {
        let mut words = Vec::new();
        if self.level != LevelFilter::INFO {
            words.push(format!("{LEVEL}={}", self.level.to_string().to_lowercase()));
        }
        if self.is_json {
            words.push(format!("{FORMAT}=json"));
        }
        words
    }

    /// Reads the settings from arguments made by [`Self::to_args`]; ignores other arguments.
    ///
    /// # Errors
    /// As [`Self::of_environment`].
    pub fn from_args(words: impl IntoIterator<Item = String>) -> io::Result<Self> {
        let words: Vec<String> = words.into_iter().collect();
        Self::of(|name| {
            let value = |word: &String| Some(word.strip_prefix(name)?.strip_prefix('=')?.to_owned());
            Ok(words.iter().find_map(value).unwrap_or_default())
        })
    }

    /// Starts the log of this process with these settings. Must be called once, before the first line.
    ///
    /// # Errors
    /// If the process has started a log already.
    pub fn begin(self) -> io::Result<()> {
        let log = tracing_subscriber::fmt()
            .with_max_level(self.level)
            .with_writer(io::stderr)
            .with_ansi(false);
        let begun = match self.is_json {
            true => log.json().flatten_event(true).try_init(),
            false => log.try_init(),
        };
        begun.map_err(io::Error::other)
    }
}

/// Returns the message of a logged line, without time, level and target. A line of another format is returned
/// unchanged.
pub fn message_of(line: &str) -> String {
    in_text(line)
        .or_else(|| in_json(line))
        .unwrap_or_else(|| line.to_owned())
}

fn in_text(line: &str) -> Option<String> {
    let (time, rest) = line.split_once(' ')?;
    let (level, rest) = rest.trim_start().split_once(' ')?;
    let is_time = time.ends_with('Z') && time.as_bytes().first().is_some_and(u8::is_ascii_digit);
    let (_, message) = rest.split_once(": ")?;
    (is_time && level.parse::<tracing::Level>().is_ok()).then(|| message.to_owned())
}

fn in_json(line: &str) -> Option<String> {
    let line: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).ok()?;
    line.get("message")?.as_str().map(str::to_owned)
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_of_a_log_line_is_extracted_and_other_lines_are_unchanged() {
        for line in [
            "2026-11-26T18:19:39.634637Z  WARN shard::process: no room: 5 bytes",
            concat!(
                r#"{"timestamp":"2026-11-26T18:19:39Z","level":"WARN","#,
                r#""message":"no room: 5 bytes","target":"shard"}"#
            ),
            "no room: 5 bytes",
        ] {
            assert_eq!(message_of(line), "no room: 5 bytes");
        }
        for line in [
            "",
            "Z WARN x: y",
            "2026Z LOUD x: y",
            "2026Z WARN",
            "{}",
            "{\"message\":1}",
            "[1]",
        ] {
            assert_eq!(message_of(line), line);
        }
    }

    #[test]
    fn settings_survive_the_way_through_arguments() {
        for level in [
            LevelFilter::OFF,
            LevelFilter::ERROR,
            LevelFilter::INFO,
            LevelFilter::TRACE,
        ] {
            for is_json in [false, true] {
                let settings = Settings { level, is_json };
                let words = ["vm".to_owned()].into_iter().chain(settings.to_args());
                assert_eq!(Settings::from_args(words).unwrap(), settings);
            }
        }
        assert!(Settings::from_args([format!("{LEVEL}=loud")]).is_err());
    }

    #[test]
    fn variables_without_a_value_are_defaults_and_foreign_values_are_refused_with_the_help() {
        let of = |level: &str, format: &str| {
            let (level, format) = (level.to_owned(), format.to_owned());
            Settings::of(move |name| {
                Ok(if name == LEVEL {
                    level.clone()
                } else {
                    format.clone()
                })
            })
        };
        let settings = |level, is_json| Settings { level, is_json };
        assert_eq!(of("", "").unwrap(), settings(LevelFilter::INFO, false));
        assert_eq!(of("off", "text").unwrap(), settings(LevelFilter::OFF, false));
        assert_eq!(of("trace", "json").unwrap(), settings(LevelFilter::TRACE, true));
        for (level, format, variable) in [("loud", "", LEVEL), ("INFO", "", LEVEL), ("", "xml", FORMAT)] {
            let error = of(level, format).unwrap_err().to_string();
            assert!(error.starts_with(variable) && error.contains("help: "), "{error}");
        }
    }
}
