//! Commands with `--request ID`: a command is carried out once, and a repeated one prints the first output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus};

use miette::{IntoDiagnostic, Result, miette};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::geteuid;
use registry::idempotency::{ID_BYTES_MAX, KeyedRequest, Lookup, RequestRecords};
use registry::lease::OWN_PROGRAM;
use serde::{Deserialize, Serialize};

/// Set for the process that carries the command out.
const VARIABLE: &str = "MIRRORBALL_REQUEST";

/// Flag of repeatable commands.
#[derive(Debug, clap::Args)]
pub struct RequestArgs {
    /// Carry this out once: within 10 minutes the same command with the same ID prints the first result, and
    /// does nothing
    #[arg(long = "request", value_name = "ID")]
    pub id: Option<String>,
}

/// Output of a command, and its exit status.
#[derive(Debug, Deserialize, Serialize)]
struct Outcome {
    status: u8,
    output: String,
    errors: String,
}

/// Whether this process handles the id: it is not the one that carries the command out.
pub fn is_outermost() -> bool {
    std::env::var_os(VARIABLE).is_none()
}

/// Carries this process's command out if the id is new, and else repeats its result.
pub fn run_once(id: &str) -> Result<ExitCode> {
    if id.is_empty() || id.len() > ID_BYTES_MAX {
        return Err(miette!(
            help = format!("an id has 1 to {ID_BYTES_MAX} bytes"),
            "--request {id:?} can't be used"
        ));
    }
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let content = content(&words, &std::env::current_dir().into_diagnostic()?);
    let request = KeyedRequest {
        uid: Some(geteuid().as_raw()),
        id,
        content: &content,
    };
    let known = RequestRecords::open().and_then(|requests| requests.begin(request));
    match known.into_diagnostic()? {
        Lookup::New(in_progress) => {
            let outcome = carry_out(&words)?;
            let kept = serde_json::to_value(&outcome).map_err(std::io::Error::from);
            if let Err(error) = kept.and_then(|outcome| in_progress.end(outcome)) {
                eprintln!("mirrorball: the result can't be kept for a repeated request: {error}");
            }
            print(&outcome)
        }
        Lookup::Done(Some(outcome)) => print(&serde_json::from_value(outcome).into_diagnostic()?),
        Lookup::Done(None) => Err(miette!(
            help = "use another id to do it again",
            "--request {id}: it was carried out, and its output was too long to be kept"
        )),
        Lookup::InProgress => Err(miette!(
            help = "repeat it in a second for its result",
            "--request {id}: it is under way"
        )),
        Lookup::Lost(_) => Err(miette!(
            help = "see whether it took effect (`mirrorball ps`), and use another id to do it again",
            "--request {id}: the process that carried it out ended before its result"
        )),
        Lookup::Different => Err(miette!(
            help = "use another id",
            "--request {id}: this id is that of another command"
        )),
        Lookup::Full => Err(miette!(
            help = "wait, or leave out --request",
            "--request {id}: this user has made too many such requests in ten minutes"
        )),
    }
}

/// Returns all inputs of the command: its arguments, and the directory of relative paths.
fn content(words: &[OsString], directory: &std::path::Path) -> Vec<u8> {
    let mut content = directory.as_os_str().as_bytes().to_vec();
    for word in words {
        content.push(0);
        content.extend_from_slice(word.as_bytes());
    }
    content
}

/// Runs the command in a separate process, which must not inherit the lock of the request.
fn carry_out(words: &[OsString]) -> Result<Outcome> {
    let file = |name| memfd_create(name, MFdFlags::MFD_CLOEXEC).map(File::from);
    let (output, errors) = (
        file(c"output").into_diagnostic()?,
        file(c"errors").into_diagnostic()?,
    );
    let status = Command::new(OWN_PROGRAM)
        .args(words)
        .env(VARIABLE, "1")
        .stdout(output.try_clone().into_diagnostic()?)
        .stderr(errors.try_clone().into_diagnostic()?)
        .status()
        .into_diagnostic()?;
    Ok(Outcome {
        status: code(status),
        output: text(output)?,
        errors: text(errors)?,
    })
}

/// Returns the exit status as a shell does: 128 plus the signal.
fn code(status: ExitStatus) -> u8 {
    let signal = status.signal().unwrap_or_default();
    let code = status.code().unwrap_or(128 + signal);
    u8::try_from(code).unwrap_or(u8::MAX)
}

fn text(mut file: File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.read_to_end(&mut bytes))
        .into_diagnostic()?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn print(outcome: &Outcome) -> Result<ExitCode> {
    std::io::stderr()
        .write_all(outcome.errors.as_bytes())
        .and_then(|()| std::io::stdout().write_all(outcome.output.as_bytes()))
        .into_diagnostic()?;
    Ok(ExitCode::from(outcome.status))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn command_with_other_words_or_in_another_directory_is_another_one() {
        let of = |words: &[&str], directory: &str| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            content(&words, Path::new(directory))
        };
        let first = of(&["clone", "web"], "/srv");
        assert_eq!(first, of(&["clone", "web"], "/srv"));
        for (words, directory) in [
            (&["clone", "web2"][..], "/srv"),
            (&["clone web"], "/srv"),
            (&["clone", "web"], "/"),
        ] {
            assert_ne!(first, of(words, directory), "{words:?} {directory}");
        }
    }

    #[test]
    fn status_of_a_command_that_was_killed_is_that_of_a_shell() {
        assert_eq!(code(ExitStatus::from_raw(9)), 137);
        assert_eq!(code(ExitStatus::from_raw(124 << 8)), 124);
    }
}
