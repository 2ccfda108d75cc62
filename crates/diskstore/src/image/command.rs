//! Runs the programs of a build: reads their output line by line and keeps its end for the error.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::ImageError;

/// Maximum lines of output in an error.
const LINES_MAX: usize = 15;

/// The longest line kept, in bytes.
const LINE_BYTES_MAX: u64 = 4096;

/// Runs `command` to its end; `each` gets every line of its standard error. Returns its standard output.
pub fn run(
    command: &mut Command,
    package: &'static str,
    each: &mut dyn FnMut(&str),
) -> Result<String, ImageError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let spawned = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    // SAFETY: prctl is async-signal-safe. The program ends with its builder, even a killed one.
    unsafe {
        spawned.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    let mut child = spawned.spawn().map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => ImageError::ProgramMissing {
            program: program.clone(),
            package,
        },
        _ => ImageError::Io {
            what: "start",
            path: program.clone().into(),
            source,
        },
    })?;
    let stdout = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(stdout) = stdout {
            // Truncated without an error: no program used here prints that much useful output.
            let _ = stdout.take(1 << 20).read_to_string(&mut text);
        }
        text
    });
    let mut last = VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        let mut lines = BufReader::new(stderr);
        let mut line = Vec::new();
        loop {
            line.clear();
            match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            each(&text);
            last.push_back(text);
            if last.len() > LINES_MAX {
                last.pop_front();
            }
        }
    }
    let text = reader.join().unwrap_or_default();
    let status = child.wait().map_err(|source| ImageError::Io {
        what: "wait for",
        path: program.clone().into(),
        source,
    })?;
    if status.success() {
        return Ok(text);
    }
    last.extend(
        text.lines()
            .rev()
            .take(LINES_MAX.saturating_sub(last.len()))
            .map(String::from),
    );
    let output = Vec::from(last).join("\n");
    Err(ImageError::ProgramFailed {
        program,
        status: status.to_string(),
        output,
    })
}
