//! Cost of a receiver of a channel with few messages: the CPU time of its thread.

use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use bench::Outcome;
use bench::tables::{Column, Row, Table};
use nix::time::{ClockId, clock_gettime};
use urpc::host::{Block, BlockingReceiver, BlockingSender, measure_block_ns};

use crate::messages::waiting::ends_of;
use crate::messages::{LINES, message};
use crate::patience::soon;
use crate::pinned::one;
use crate::process::{Other, ring};

pub const TABLE: Table = Table {
    title: "a receiver in another process, which may block",
    columns: &[Column::Percent("% of its CPU")],
    compared: false,
    rows: &[
        Row::new("nothing comes", &[Some(nothing_comes)]),
        Row::new("a message comes every millisecond", &[Some(little_comes)]),
    ],
};

const TIME: Duration = Duration::from_millis(500);

/// The share of a CPU that the receiver takes while `here` sends.
fn share(here: impl FnOnce(&mut BlockingSender) -> Outcome<()> + Send) -> Outcome<f64> {
    let block_ns = measure_block_ns();
    let (there, _file, there_word) = ring(LINES)?;
    let (back, _file_back, back_word) = ring(LINES)?;
    let other = Other::start(
        "idler",
        &[there_word, back_word, block_ns.to_string()],
        Stdio::null(),
    )?;
    let mut outbox = BlockingSender::new(there, Block::Futex, block_ns);
    let mut inbox = BlockingReceiver::new(back, Block::Futex, block_ns);
    let measured = one(|| {
        let before = used_ns(&mut outbox, &mut inbox)?;
        let start = Instant::now();
        here(&mut outbox)?;
        let wall = start.elapsed();
        let used = used_ns(&mut outbox, &mut inbox)? - before;
        Ok(used as f64 / wall.as_nanos() as f64 * 100.0)
    })?;
    // The receiver ends with the channel.
    drop(outbox);
    other.finish()?;
    Ok(measured)
}

/// CPU time that the receiver has used so far.
fn used_ns(outbox: &mut BlockingSender, inbox: &mut BlockingReceiver) -> Outcome<u64> {
    outbox.send(&message(ASK), soon())?;
    Ok(inbox.recv(soon())?.ok_or("no answer comes")?.words[0])
}

fn nothing_comes() -> Outcome<f64> {
    share(|_| {
        thread::sleep(TIME);
        Ok(())
    })
}

fn little_comes() -> Outcome<f64> {
    share(|outbox| {
        let end = Instant::now() + TIME;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
            outbox.send(&message(0), soon())?;
        }
        Ok(())
    })
}

/// A message that requests the used CPU time.
const ASK: u64 = 1;

/// Runs the receiver.
pub fn role(words: &[String]) -> Outcome<()> {
    let (mut inbox, mut outbox) = ends_of(words)?;
    // Without a limit, as cells wait: a timer would cost, too. The measuring process ends this one.
    while let Ok(Some(got)) = inbox.recv(None) {
        if got.words[0] == ASK {
            let used = Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?);
            outbox.send(&message(used.as_nanos() as u64), soon())?;
        }
    }
    Ok(())
}
