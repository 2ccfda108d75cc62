//! `mirrorball events`: events of VMs and cells, from the journal of this host ([`registry::journal`]).

use std::io::Write;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use miette::{IntoDiagnostic, Result};
use registry::journal::{Entry, Journal, Reader, Token, TokenError};
use serde_json::{Map, Value};

use super::execution_site::in_lab;

/// Poll interval for further events.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Arguments of `events`.
#[derive(Debug, clap::Args)]
pub struct EventsArgs {
    /// Begin behind the event of this token, or with the oldest one that is kept: `start`
    #[arg(long, value_name = "TOKEN|start")]
    after: Option<StartAt>,
    /// As JSON: an object for each event, in a line
    #[arg(long)]
    json: bool,
    /// Print what there is, from the start unless --after says otherwise, and end
    #[arg(long)]
    no_follow: bool,
}

/// Start position.
#[derive(Clone, Copy, Debug, PartialEq)]
enum StartAt {
    Start,
    After(Token),
}

impl FromStr for StartAt {
    type Err = TokenError;

    fn from_str(text: &str) -> std::result::Result<Self, TokenError> {
        match text {
            "start" => Ok(Self::Start),
            token => token.parse().map(Self::After),
        }
    }
}

/// Prints the existing events of VMs and cells, and with following the later ones.
pub fn events(args: &EventsArgs) -> Result<ExitCode> {
    let journal = Journal::open().into_diagnostic()?;
    if !journal.exists()
        && let Some(code) = in_lab()?
    {
        return Ok(code);
    }
    let mut reader = match args.after {
        Some(StartAt::After(token)) => Reader::after(journal, token),
        Some(StartAt::Start) => Reader::from_start(journal),
        None if args.no_follow => Reader::from_start(journal),
        None => Reader::from_end(journal).into_diagnostic()?,
    };
    let mut output = std::io::stdout().lock();
    loop {
        while let Some(entry) = reader.next_entry().into_diagnostic()? {
            let line = match args.json {
                true => entry.with_token().to_string(),
                false => line(&entry),
            };
            writeln!(output, "{line}").into_diagnostic()?;
        }
        output.flush().into_diagnostic()?;
        if args.no_follow {
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Formats an event for people: its time, its token, its kind, its VM or cell, and the rest.
fn line(entry: &Entry) -> String {
    let mut rest = entry.event.clone();
    let unix_ms = take(&mut rest, "unix_ms").and_then(|time| time.as_u64());
    let kind = take(&mut rest, "event")
        .map(|kind| plain(&kind))
        .unwrap_or_default();
    let vm = take(&mut rest, "vm").map(|vm| plain(&vm));
    let cell = || take(&mut rest, "cell").map(|cell| format!("cell {}", plain(&cell)));
    let subject = vm.or_else(cell).unwrap_or_else(|| "-".to_owned());
    let rest: Vec<String> = rest
        .iter()
        .map(|(key, value)| format!("{key}: {}", plain(value)))
        .collect();
    let line = format!(
        "{}  {}  {kind:<16} {subject:<20} {}",
        time(unix_ms.unwrap_or(0)),
        entry.token,
        rest.join(", ")
    );
    line.trim_end().to_owned()
}

fn take(event: &mut Map<String, Value>, key: &str) -> Option<Value> {
    event.remove(key)
}

/// Formats a value as text without terminal control characters.
fn plain(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Formats a time in UTC as in RFC 3339, with milliseconds.
pub(super) fn time(unix_ms: u64) -> String {
    let (seconds, ms) = (unix_ms / 1000, unix_ms % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}.{ms:03}Z",
        second % 60
    )
}

/// Returns year, month and day of a day since 1970 in the Gregorian calendar (H. Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms", `civil_from_days`): years begin in March, so that a leap day is a year's last.
fn date(days: u64) -> (u64, u64, u64) {
    /// Days from 1 March of the year 0 to 1 January 1970.
    const DAYS_TO_1970: u64 = 719_468;
    const DAYS_OF_ERA: u64 = 146_097;
    let days = days + DAYS_TO_1970;
    let (era, day) = (days / DAYS_OF_ERA, days % DAYS_OF_ERA);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, after) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (era * 400 + year + after, month, day)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(event: Value) -> Entry {
        Entry {
            token: "1f-2-300".parse().unwrap(),
            event: event.as_object().unwrap().clone(),
        }
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        // Values of `date -u -d @SECONDS`.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.007Z"),
            (951_782_399, "2000-02-28T23:59:59.007Z"),
            (951_782_400, "2000-02-29T00:00:00.007Z"),
            (951_868_800, "2000-03-01T00:00:00.007Z"),
            (1_795_715_445, "2026-11-26T17:50:45.007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.007Z"),
        ] {
            assert_eq!(time(seconds * 1000 + 7), expected);
        }
    }

    #[test]
    fn line_names_the_token_and_the_subject_and_carries_no_terminal_escapes() {
        let ended = json!({
            "unix_ms": 1, "event": "vm-ended", "vm": "web", "status": 70, "why": "\u{1b}[31mpanic\n"
        });
        assert_eq!(
            line(&entry(ended)),
            "1970-01-01T00:00:00.001Z  1f-2-300  vm-ended         web                  status: 70, why:  \
             [31mpanic"
        );
        let up = json!({ "unix_ms": 1, "event": "cell-up", "cell": 3, "life": 2 });
        assert!(line(&entry(up)).ends_with("cell-up          cell 3               life: 2"));
        // A VM's cell is not its subject, and fields of later versions are shown.
        let later = json!({ "event": "vm-painted", "vm": "a", "cell": 1, "colours": ["red"] });
        assert!(line(&entry(later)).ends_with("a                    cell: 1, colours: [\"red\"]"));
    }

    #[test]
    fn events_begin_at_a_token_or_at_the_start() {
        assert_eq!("start".parse(), Ok(StartAt::Start));
        assert_eq!(
            "1f-2-300".parse(),
            Ok(StartAt::After("1f-2-300".parse().unwrap()))
        );
        let why = "begin".parse::<StartAt>().unwrap_err().to_string();
        assert!(why.contains("is no token"), "{why}");
    }
}
