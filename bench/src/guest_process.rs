//! A monitor's process with one guest, whose console is the process's standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::Outcome;

/// Time limit of a guest's end.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Lines of the console that an error has.
const LAST_LINES: usize = 8;

/// A running guest. Ended when dropped.
pub struct GuestProcess {
    /// The monitor's process.
    pub child: Child,
    lines: mpsc::Receiver<String>,
    started: Instant,
    limit: Duration,
}

impl GuestProcess {
    /// Starts a guest by `command`, whose standard input the caller has set. Waits for its lines end `limit`
    /// after the start.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(command: &mut Command, limit: Duration) -> Outcome<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::inherit());
        // SAFETY: prctl is async-signal-safe and takes numbers only.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        let started = Instant::now();
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("no output")?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            lines,
            started,
            limit,
        })
    }

    /// Waits for the first line that has `prefix`. Returns the rest of the line and the time since the start.
    ///
    /// # Errors
    /// If the guest ends without such a line, or takes too long.
    pub fn wait_for(&mut self, prefix: &str) -> Outcome<(String, Duration)> {
        let mut tail = Vec::new();
        loop {
            let left = self.limit.saturating_sub(self.started.elapsed());
            let received = self.lines.recv_timeout(left);
            if let Ok(line) = &received
                && let Some(at) = line.find(prefix)
            {
                let rest = line[at + prefix.len()..].trim().to_owned();
                return Ok((rest, self.started.elapsed()));
            }
            let end = match received {
                Ok(line) => {
                    tail.push(line);
                    continue;
                }
                Err(mpsc::RecvTimeoutError::Timeout) => format!("took longer than {:?}", self.limit),
                Err(mpsc::RecvTimeoutError::Disconnected) => "ended".to_owned(),
            };
            let last = tail.split_off(tail.len().saturating_sub(LAST_LINES)).join("\n  ");
            return Err(format!("the guest {end} without '{prefix}':\n  {last}").into());
        }
    }

    /// Sends an empty line to the guest's console.
    ///
    /// # Errors
    /// If the process has ended, or its standard input is no pipe.
    pub fn send_line(&mut self) -> Outcome<()> {
        let input = self.child.stdin.as_mut().ok_or("the guest has no input")?;
        input.write_all(b"\n")?;
        Ok(input.flush()?)
    }

    /// Time since the start.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Waits for a clean end.
    ///
    /// # Errors
    /// If the guest does not end.
    pub fn end(&mut self) -> Outcome<()> {
        let deadline = Instant::now() + END_LIMIT;
        while Instant::now() < deadline {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err("the guest did not power off".into())
    }
}

impl Drop for GuestProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str, limit: Duration) -> GuestProcess {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped());
        GuestProcess::start(&mut command, limit).unwrap()
    }

    #[test]
    fn guest_answers_a_line_and_ends() {
        let script = "echo '[0.1] BENCH ready {}'; read line; echo 'BENCH done'";
        let mut guest = start(script, Duration::from_secs(60));
        assert_eq!(guest.wait_for("BENCH ready").unwrap().0, "{}");
        guest.send_line().unwrap();
        assert_eq!(guest.wait_for("BENCH ").unwrap().0, "done");
        guest.end().unwrap();
    }

    #[test]
    fn error_of_a_wait_has_the_last_lines_and_the_reason() {
        let mut guest = start("echo panic", Duration::from_secs(60));
        let error = guest.wait_for("BENCH ").unwrap_err().to_string();
        assert_eq!(error, "the guest ended without 'BENCH ':\n  panic");
        let mut guest = start("read line", Duration::from_millis(50));
        let error = guest.wait_for("BENCH ").unwrap_err().to_string();
        assert_eq!(error, "the guest took longer than 50ms without 'BENCH ':\n  ");
    }
}
