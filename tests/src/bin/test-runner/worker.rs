//! Runs test programs inside a lab host, one at a time, on request of [`crate::lane`].
//!
//! A request is a JSON array of words on one line. The program's output goes to this process's standard
//! output. A line of [`END`] and the exit status follows each program.

use std::io::BufRead;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

/// The argument that makes this program a worker.
pub const ARGUMENT: &str = "--worker";
/// Prefix of the line that follows a program's output.
pub const END: &str = "\u{1e}test-runner: exit status ";

/// Serves requests until the input ends.
pub fn serve(requests: impl BufRead) -> ExitCode {
    for request in requests.lines() {
        let words: Result<Vec<String>, _> = request
            .map_err(|error| error.to_string())
            .and_then(|line| serde_json::from_str(&line).map_err(|error| error.to_string()));
        match words {
            Ok(words) if !words.is_empty() => println!("\n{END}{}", status(&words)),
            other => {
                eprintln!("test-runner: not a request: {other:?}");
                return ExitCode::from(2);
            }
        }
    }
    ExitCode::SUCCESS
}

/// Runs a program. Returns its exit status, or 128 plus the signal that killed it.
pub fn status(words: &[String]) -> i32 {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    // One stream keeps the lines in order.
    match std::os::fd::AsFd::as_fd(&std::io::stdout()).try_clone_to_owned() {
        Ok(stdout) => command.stderr(stdout),
        Err(_) => command.stderr(Stdio::inherit()),
    };
    ended(command.status(), &words[0])
}

/// The exit status of a program, 128 plus the signal that killed it, or 127 for one that could not start.
pub fn ended(status: std::io::Result<ExitStatus>, program: &str) -> i32 {
    match status {
        Ok(status) => status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
        Err(error) => {
            println!("test-runner: {program}: {error}");
            127
        }
    }
}
