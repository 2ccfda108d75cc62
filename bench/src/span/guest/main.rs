//! The program that `bench-span` runs in a guest. `bench-span-guest figures` measures, and prints one line of
//! JSON, in nanoseconds; `bench-span-guest storm` has every CPU interrupt every other one until its standard
//! input ends, and prints how often.
//!
//! *Far* is the last CPU, in another shard than CPU 0 if there are several; *near* is CPU 1, in the same one.

mod fault;
mod interrupt;
mod switch;
mod timer;
mod wake;

use std::fmt::Write;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::tables::median;

/// Time limit of one figure.
const TIME: Duration = Duration::from_secs(2);
/// Repetitions for one figure, if there is time.
const TIMES: usize = 20_000;
/// Longest storm, if its input does not end.
const STORM_LIMIT: Duration = Duration::from_secs(300);

/// The median time of `does`, nanoseconds.
fn each_ns(does: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    each_after_ns(|| (), does)
}

/// The same, with an untimed step before each repetition.
fn each_after_ns(mut before: impl FnMut(), mut does: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let begin = Instant::now();
    let mut samples = Vec::with_capacity(TIMES);
    while samples.len() < TIMES && begin.elapsed() < TIME {
        before();
        let start = Instant::now();
        does()?;
        samples.push(start.elapsed().as_nanos() as f64);
    }
    median(&samples).ok_or_else(|| "nothing was measured".into())
}

fn figures() -> Outcome<String> {
    // Huge pages, and timers that may be late, would hide any figure.
    nix::sys::prctl::set_thp_disable(true)?;
    nix::sys::prctl::set_timerslack(1)?;
    let far = thread::available_parallelism()?.get() - 1;
    if far == 0 {
        return Err("two CPUs are needed".into());
    }
    // First of all, while there is memory that the guest has not used.
    let (fresh, again) = fault::fresh_and_again()?;
    let figures = [
        ("fault_fresh_ns", fresh),
        ("fault_again_ns", again),
        ("interrupt_far_ns", interrupt::round_trip(0, far)?),
        ("interrupt_near_ns", interrupt::round_trip(0, 1)?),
        ("wake_far_ns", wake::round_trip(0, far)?),
        ("wake_near_ns", wake::round_trip(0, 1)?),
        ("switch_ns", switch::one_cpu(0)?),
        ("late_ns", timer::late(0)?),
        ("arm_ns", timer::arm(0)?),
    ];
    let mut text = String::new();
    for (name, figure) in figures {
        let comma = if text.is_empty() { "{" } else { "," };
        write!(text, "{comma}\"{name}\":{figure}")?;
    }
    Ok(text + "}")
}

fn run() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["figures"] => println!("{}", figures()?),
        ["storm"] => println!("{} interrupts", interrupt::storm(STORM_LIMIT)?),
        [switch::ECHO] => switch::echo()?,
        _ => return Err("bench-span-guest figures|storm".into()),
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-span-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
