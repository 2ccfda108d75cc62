//! Channels as cells use them: a receiver that finds nothing polls for a while, then blocks.

use std::process::Stdio;

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use urpc::host::{Block, BlockingReceiver, BlockingSender, channel, measure_block_ns};

use super::{LINES, MESSAGES, TRIPS, TRIPS_SLOW, message};
use crate::patience::soon;
use crate::pinned::{both, one};
use crate::process::{Other, ring, ring_of};

/// Sends each message back until the channel ends.
fn echo(mut from: BlockingReceiver, mut to: BlockingSender) -> Outcome<()> {
    // One limit for all, since a look at the clock costs as much as a message.
    let end = soon();
    while let Ok(message) = from.recv(end) {
        to.send(&message.ok_or("nothing comes")?, end)?;
    }
    Ok(())
}

fn trips(mut to: BlockingSender, mut from: BlockingReceiver, trips: u64) -> Outcome<f64> {
    let end = soon();
    let mut trip = |number| {
        to.send(&message(number), end)?;
        from.recv(end)?.ok_or("no answer comes")?;
        Ok(())
    };
    // The other side runs when it has replied once.
    trip(0)?;
    each_ns(trips, trip)
}

fn trips_of_threads(block_ns: u64, count: u64) -> Outcome<f64> {
    let (to_there, from_here) = channel(LINES, block_ns)?;
    let (to_here, from_there) = channel(LINES, block_ns)?;
    both(|| echo(from_here, to_here), || trips(to_there, from_there, count))
}

pub fn round_trip() -> Outcome<f64> {
    trips_of_threads(measure_block_ns(), TRIPS)
}

pub fn round_trip_asleep() -> Outcome<f64> {
    trips_of_threads(0, TRIPS_SLOW)
}

pub fn one_way() -> Outcome<f64> {
    let (mut sender, mut receiver) = channel(LINES, measure_block_ns())?;
    both(
        move || {
            let end = soon();
            (0..MESSAGES).try_for_each(|number| Ok(sender.send(&message(number), end)?))
        },
        move || {
            let end = soon();
            receiver.recv(end)?;
            per_second(MESSAGES - 1, || {
                Ok(_ = receiver.recv(end)?.ok_or("nothing comes")?)
            })
        },
    )
}

pub fn round_trip_processes() -> Outcome<f64> {
    let block_ns = measure_block_ns();
    let (there, _file, there_word) = ring(LINES)?;
    let (back, _file_back, back_word) = ring(LINES)?;
    let words = [there_word, back_word, block_ns.to_string()];
    let other = Other::start("waiting-echo", &words, Stdio::null())?;
    let (to, from) = (
        BlockingSender::new(there, Block::Futex, block_ns),
        BlockingReceiver::new(back, Block::Futex, block_ns),
    );
    let measured = one(|| trips(to, from, TRIPS))?;
    other.finish()?;
    Ok(measured)
}

/// Both ends of the other process, by the words of its rings and of the cost of blocking.
pub fn ends_of(words: &[String]) -> Outcome<(BlockingReceiver, BlockingSender)> {
    let [there, back, block_ns] = words else {
        return Err("two rings and the cost of blocking are wanted".into());
    };
    let block_ns = block_ns.parse()?;
    Ok((
        BlockingReceiver::new(ring_of(there)?, Block::Futex, block_ns),
        BlockingSender::new(ring_of(back)?, Block::Futex, block_ns),
    ))
}

/// The other process of [`round_trip_processes`].
pub fn echo_role(words: &[String]) -> Outcome<()> {
    let (from, to) = ends_of(words)?;
    echo(from, to)
}
