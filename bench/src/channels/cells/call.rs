//! Calls between two cells, plain and by the protocol that executes each once (`protocol::call`).

use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use protocol::call::{Act, Callee, Caller, Reply, Request, WINDOW};
use serde::{Deserialize, Serialize};

use super::link::{Link, PAUSE, Waiting, with_other};

const CALLS: u64 = 20_000;
/// With a pause before each.
const CALLS_BLOCKED: u32 = 100;

/// What is asked: as much as a cell asks about a VM.
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

/// What the callee does.
fn execute(question: &Question) -> Answer {
    Answer {
        cell: question.vcpus as u16,
        memory_left_bytes: u64::MAX - question.memory_bytes - question.name.len() as u64,
    }
}

/// One of the ways to call.
trait Calling {
    /// Begins a call; false if too many are under way.
    fn ask(&mut self, link: &mut Link, question: Question) -> Outcome<bool>;
    /// Waits for the answer of the oldest call.
    fn answer(&mut self, link: &mut Link) -> Outcome<()>;
}

/// The question alone, the answer alone.
struct Plain {
    under_way: usize,
}

impl Calling for Plain {
    fn ask(&mut self, link: &mut Link, question: Question) -> Outcome<bool> {
        if self.under_way == WINDOW {
            return Ok(false);
        }
        self.under_way += 1;
        link.send(&question)?;
        Ok(true)
    }

    fn answer(&mut self, link: &mut Link) -> Outcome<()> {
        link.expect::<Answer>()?;
        self.under_way -= 1;
        Ok(())
    }
}

impl Calling for Caller<Question> {
    fn ask(&mut self, link: &mut Link, question: Question) -> Outcome<bool> {
        let Ok(request) = self.call(question) else {
            return Ok(false);
        };
        link.send(&request)?;
        Ok(true)
    }

    fn answer(&mut self, link: &mut Link) -> Outcome<()> {
        while !self.take(&link.expect::<Reply<Answer>>()?) {}
        Ok(())
    }
}

fn call(calling: &mut impl Calling, link: &mut Link) -> Outcome<()> {
    calling.ask(link, question())?;
    calling.answer(link)
}

fn one_by_one(mut calling: impl Calling, mut link: Link) -> Outcome<f64> {
    // The other side is there when it has answered once.
    call(&mut calling, &mut link)?;
    each_ns(CALLS, |_| call(&mut calling, &mut link))
}

fn window_full(mut calling: impl Calling, mut link: Link) -> Outcome<f64> {
    call(&mut calling, &mut link)?;
    while calling.ask(&mut link, question())? {}
    let measured = per_second(CALLS, || {
        calling.answer(&mut link)?;
        calling.ask(&mut link, question()).map(|_| ())
    })?;
    (0..WINDOW).try_for_each(|_| calling.answer(&mut link))?;
    Ok(measured)
}

fn after_pauses(mut calling: impl Calling, mut link: Link) -> Outcome<f64> {
    call(&mut calling, &mut link)?;
    let mut all = Duration::ZERO;
    for _ in 0..CALLS_BLOCKED {
        thread::sleep(PAUSE);
        let start = Instant::now();
        call(&mut calling, &mut link)?;
        all += start.elapsed();
    }
    Ok(all.as_nanos() as f64 / f64::from(CALLS_BLOCKED))
}

const PLAIN: Plain = Plain { under_way: 0 };

pub fn polling() -> Outcome<f64> {
    with_other("callee", Waiting::Polling, |link| one_by_one(PLAIN, link))
}

pub fn pipelined() -> Outcome<f64> {
    with_other("callee", Waiting::Polling, |link| window_full(PLAIN, link))
}

pub fn blocked() -> Outcome<f64> {
    with_other("callee", Waiting::AsCells, |link| after_pauses(PLAIN, link))
}

pub fn polling_once() -> Outcome<f64> {
    with_other("callee-once", Waiting::Polling, |link| {
        one_by_one(Caller::default(), link)
    })
}

pub fn pipelined_once() -> Outcome<f64> {
    with_other("callee-once", Waiting::Polling, |link| {
        window_full(Caller::default(), link)
    })
}

pub fn blocked_once() -> Outcome<f64> {
    with_other("callee-once", Waiting::AsCells, |link| {
        after_pauses(Caller::default(), link)
    })
}

/// The called process, plain.
pub fn callee_role(words: &[String]) -> Outcome<()> {
    let mut link = Link::of(words)?;
    while let Some(question) = link.receive()? {
        link.send(&execute(&question))?;
    }
    Ok(())
}

/// The called process that executes each call once.
pub fn callee_once_role(words: &[String]) -> Outcome<()> {
    let mut link = Link::of(words)?;
    let mut callee = Callee::default();
    while let Some(request) = link.receive::<Request<Question>>()? {
        let number = request.number;
        let reply = match callee.take(request) {
            Act::Execute(question) => callee.finish(number, execute(&question)),
            Act::Again(reply) => Some(reply),
            Act::Nothing => None,
        };
        if let Some(reply) = reply {
            link.send(&reply)?;
        }
    }
    Ok(())
}
