//! Starts a cell's process, and starts it again when it dies. It does nothing else, so it has nothing to die of.

use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A process that lived shorter than this died of its start, maybe.
const SHORT: Duration = Duration::from_secs(10);
/// Short lives in a row, after which it is given up.
const SHORT_LIVES_MAX: u32 = 10;
/// Before another try, times the short lives so far.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns when the cell was told to end, or can't be.
pub fn guard(number: u16) -> io::Result<()> {
    let mut short_lives = 0;
    loop {
        let start = Instant::now();
        let mut cell = Command::new("/proc/self/exe")
            .args(["cell", &number.to_string()])
            .stdin(Stdio::null())
            .spawn()?;
        let status = cell.wait()?;
        if status.success() {
            return Ok(());
        }
        eprintln!("cell {number}: its process died: {status}");
        short_lives = if start.elapsed() < SHORT {
            short_lives + 1
        } else {
            0
        };
        if short_lives >= SHORT_LIVES_MAX {
            return Err(io::Error::other(format!(
                "cell {number} died {short_lives} times within {} s of its start",
                SHORT.as_secs()
            )));
        }
        std::thread::sleep(PAUSE * short_lives);
    }
}
