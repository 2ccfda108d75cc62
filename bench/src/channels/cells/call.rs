//! Calls between two cells: a request and its reply.

use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use serde::{Deserialize, Serialize};

use super::link::{Link, PAUSE, Waiting, with_other};

const CALLS: u64 = 20_000;
/// Calls with a pause before each.
const CALLS_BLOCKED: u32 = 100;
/// Most calls in progress.
const WINDOW: usize = 64;

/// A request, as large as a cell's request about a VM.
#[derive(Clone, Serialize, Deserialize)]
struct Question {
    name: String,
    vcpus: u32,
    memory_bytes: u64,
}

#[derive(Clone, Serialize, Deserialize)]
struct Answer {
    cell: u16,
    memory_left_bytes: u64,
}

fn question() -> Question {
    Question {
        name: "build-server-17".to_owned(),
        vcpus: 4,
        memory_bytes: 8 << 30,
    }
}

/// The callee's work.
fn execute(question: &Question) -> Answer {
    Answer {
        cell: question.vcpus as u16,
        memory_left_bytes: u64::MAX - question.memory_bytes - question.name.len() as u64,
    }
}

fn ask(link: &mut Link) -> Outcome<()> {
    link.send(&question())
}

/// Waits for the reply to the oldest call.
fn answer(link: &mut Link) -> Outcome<()> {
    link.expect::<Answer>().map(drop)
}

fn call(link: &mut Link) -> Outcome<()> {
    ask(link)?;
    answer(link)
}

fn one_by_one(mut link: Link) -> Outcome<f64> {
    // The other side runs when it has replied once.
    call(&mut link)?;
    each_ns(CALLS, |_| call(&mut link))
}

fn window_full(mut link: Link) -> Outcome<f64> {
    call(&mut link)?;
    (0..WINDOW).try_for_each(|_| ask(&mut link))?;
    let measured = per_second(CALLS, || {
        answer(&mut link)?;
        ask(&mut link)
    })?;
    (0..WINDOW).try_for_each(|_| answer(&mut link))?;
    Ok(measured)
}

fn after_pauses(mut link: Link) -> Outcome<f64> {
    call(&mut link)?;
    let mut all = Duration::ZERO;
    for _ in 0..CALLS_BLOCKED {
        thread::sleep(PAUSE);
        let start = Instant::now();
        call(&mut link)?;
        all += start.elapsed();
    }
    Ok(all.as_nanos() as f64 / f64::from(CALLS_BLOCKED))
}

pub fn polling() -> Outcome<f64> {
    with_other("callee", Waiting::Polling, one_by_one)
}

pub fn pipelined() -> Outcome<f64> {
    with_other("callee", Waiting::Polling, window_full)
}

pub fn blocked() -> Outcome<f64> {
    with_other("callee", Waiting::AsCells, after_pauses)
}

/// Runs the called process.
pub fn callee_role(words: &[String]) -> Outcome<()> {
    let mut link = Link::of(words)?;
    while let Some(question) = link.receive()? {
        link.send(&execute(&question))?;
    }
    Ok(())
}
