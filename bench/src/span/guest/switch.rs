//! Two processes that take turns on one CPU.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use bench::Outcome;
use bench::cpu::pin;

use crate::each_ns;

/// The word for the other process.
pub const ECHO: &str = "echo";

/// Time of a switch from one process to another, both on `cpu`, by a byte through a pipe; nanoseconds.
pub fn one_cpu(cpu: usize) -> Outcome<f64> {
    pin(cpu)?;
    let mut other = Command::new("/proc/self/exe")
        .arg(ECHO)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (there, back) = (other.stdin.take(), other.stdout.take());
    let (mut there, mut back) = there.zip(back).ok_or("no pipes")?;
    let mut byte = [0];
    let round_trip = each_ns(|| {
        there.write_all(&byte)?;
        Ok(back.read_exact(&mut byte)?)
    });
    drop(there);
    other.wait()?;
    Ok(round_trip? / 2.0)
}

/// Runs the other process: sends each byte back.
pub fn echo() -> Outcome<()> {
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut byte = [0];
    while input.read(&mut byte)? == 1 {
        output.write_all(&byte)?;
        output.flush()?;
    }
    Ok(())
}
