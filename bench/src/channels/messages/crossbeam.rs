//! `crossbeam-channel`, bounded, between threads.

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};
use urpc::Message;

use super::{LINES, MESSAGES, TRIPS, TRIPS_SLOW, message};
use crate::patience::{LIMIT, poll};
use crate::pinned::both;

/// The next message; none at the end.
fn take(from: &Receiver<Message>) -> Outcome<Option<Message>> {
    poll(|| match from.try_recv() {
        Ok(message) => Some(Some(message)),
        Err(TryRecvError::Empty) => None,
        Err(TryRecvError::Disconnected) => Some(None),
    })
}

fn post(to: &Sender<Message>, message: Message) -> Outcome<()> {
    poll(|| match to.try_send(message) {
        Ok(()) => Some(Ok(())),
        Err(TrySendError::Full(_)) => None,
        Err(error) => Some(Err(error)),
    })?
    .map_err(Into::into)
}

pub fn round_trip() -> Outcome<f64> {
    let (to_there, from_here) = bounded(LINES);
    let (to_here, from_there) = bounded(LINES);
    both(
        move || {
            while let Some(message) = take(&from_here)? {
                post(&to_here, message)?;
            }
            Ok(())
        },
        move || {
            each_ns(TRIPS, |number| {
                post(&to_there, message(number))?;
                take(&from_there).map(|_| ())
            })
        },
    )
}

pub fn round_trip_blocking() -> Outcome<f64> {
    let (to_there, from_here) = bounded(LINES);
    let (to_here, from_there) = bounded::<Message>(LINES);
    both(
        move || {
            while let Ok(message) = from_here.recv() {
                to_here.send(message)?;
            }
            Ok(())
        },
        move || {
            each_ns(TRIPS_SLOW, |number| {
                to_there.send(message(number))?;
                Ok(_ = from_there.recv_timeout(LIMIT)?)
            })
        },
    )
}

pub fn one_way() -> Outcome<f64> {
    let (sender, receiver) = bounded(LINES);
    both(
        move || (0..MESSAGES).try_for_each(|number| post(&sender, message(number))),
        move || {
            take(&receiver)?;
            per_second(MESSAGES - 1, || take(&receiver).map(|_| ()))
        },
    )
}
