//! The ring by itself: both sides poll.

use std::process::Stdio;

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use urpc::host::SharedRing;
use urpc::{Message, Receiver, RecvError, SendError, Sender};

use super::{LINES, MESSAGES, TRIPS, message};
use crate::patience::poll;
use crate::pinned::{both, one};
use crate::process::{Other, ring, ring_of};

type Ends = (Sender<SharedRing>, Receiver<SharedRing>);

fn ends(prefetch: bool) -> Outcome<Ends> {
    let (ring, file) = SharedRing::create(LINES)?;
    let (sender, receiver) = (Sender::new(ring), Receiver::new(SharedRing::attach(&file)?));
    Ok(if prefetch {
        (sender.with_prefetch(), receiver.with_prefetch())
    } else {
        (sender, receiver)
    })
}

/// The next message; none at the end.
fn take(receiver: &mut Receiver<SharedRing>) -> Outcome<Option<Message>> {
    poll(|| match receiver.take() {
        Ok(Some(message)) => Some(Some(message)),
        Ok(None) => None,
        Err(RecvError::Closed) => Some(None),
    })
}

fn post(sender: &mut Sender<SharedRing>, message: &Message) -> Outcome<()> {
    poll(|| match sender.post(message) {
        Err(SendError::Full) => None,
        other => Some(other),
    })?
    .map_err(Into::into)
}

fn echo(mut from: Receiver<SharedRing>, mut to: Sender<SharedRing>) -> Outcome<()> {
    while let Some(message) = take(&mut from)? {
        post(&mut to, &message)?;
    }
    Ok(())
}

fn trips(mut to: Sender<SharedRing>, mut from: Receiver<SharedRing>) -> Outcome<f64> {
    // The other side runs when it has replied once.
    post(&mut to, &message(0))?;
    take(&mut from)?;
    each_ns(TRIPS, |number| {
        post(&mut to, &message(number))?;
        take(&mut from).map(|_| ())
    })
}

fn flood(mut to: Sender<SharedRing>) -> Outcome<()> {
    (0..MESSAGES).try_for_each(|number| post(&mut to, &message(number)))
}

fn drain(mut from: Receiver<SharedRing>) -> Outcome<f64> {
    take(&mut from)?;
    per_second(MESSAGES - 1, || take(&mut from).map(|_| ()))
}

fn trips_of_threads(prefetch: bool) -> Outcome<f64> {
    let (to_there, from_here) = ends(prefetch)?;
    let (to_here, from_there) = ends(prefetch)?;
    both(|| echo(from_here, to_here), || trips(to_there, from_there))
}

fn flow_of_threads(prefetch: bool) -> Outcome<f64> {
    let (sender, receiver) = ends(prefetch)?;
    both(|| flood(sender), || drain(receiver))
}

pub fn round_trip() -> Outcome<f64> {
    trips_of_threads(false)
}

pub fn round_trip_prefetched() -> Outcome<f64> {
    trips_of_threads(true)
}

pub fn one_way() -> Outcome<f64> {
    flow_of_threads(false)
}

pub fn one_way_prefetched() -> Outcome<f64> {
    flow_of_threads(true)
}

pub fn round_trip_processes() -> Outcome<f64> {
    let (there, _file, there_word) = ring(LINES)?;
    let (back, _file_back, back_word) = ring(LINES)?;
    let other = Other::start("ring-echo", &[there_word, back_word], Stdio::null())?;
    let measured = one(|| trips(Sender::new(there), Receiver::new(back)))?;
    other.finish()?;
    Ok(measured)
}

pub fn one_way_processes() -> Outcome<f64> {
    let (back, _file, word) = ring(LINES)?;
    let other = Other::start("ring-flood", &[word], Stdio::null())?;
    let measured = one(|| drain(Receiver::new(back)))?;
    other.finish()?;
    Ok(measured)
}

/// The other process of [`round_trip_processes`].
pub fn echo_role(words: &[String]) -> Outcome<()> {
    let [there, back] = words else {
        return Err("two rings are wanted".into());
    };
    echo(Receiver::new(ring_of(there)?), Sender::new(ring_of(back)?))
}

/// The other process of [`one_way_processes`].
pub fn flood_role(words: &[String]) -> Outcome<()> {
    let [word] = words else {
        return Err("a ring is wanted".into());
    };
    flood(Sender::new(ring_of(word)?))
}
