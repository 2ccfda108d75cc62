//! What is compared. A round trip is measured over many; both sides poll, but for sockets and where it says so.

use std::hint::spin_loop;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use urpc::host::{Inbox, Outbox, SharedRing, channel, measure_block_ns};
use urpc::{Message, Receiver, RecvError, SendError, Sender};

use crate::Outcome;
use crate::pinned::{both, pin, two_cpus};

const TRIPS: u64 = 100_000;
/// Of what blocks.
const TRIPS_SLOW: u64 = 10_000;
const MESSAGES: u64 = 4_000_000;
/// The length of the queue in the paper's Table 2.
const LINES: usize = 16;

/// One of them.
pub struct Peer {
    pub what: &'static str,
    pub round_trip: fn() -> Outcome<f64>,
    pub one_way: Option<fn() -> Outcome<f64>>,
}

pub const ALL: &[Peer] = &[
    Peer {
        what: "bare cache lines",
        round_trip: bare,
        one_way: None,
    },
    Peer {
        what: "channel, polling",
        round_trip: ring,
        one_way: Some(ring_one_way),
    },
    Peer {
        what: "channel, polling, with prefetch",
        round_trip: ring_prefetched,
        one_way: Some(ring_one_way_prefetched),
    },
    Peer {
        what: "channel that may block, between threads",
        round_trip: blocking,
        one_way: None,
    },
    Peer {
        what: "channel that blocks at once",
        round_trip: asleep,
        one_way: None,
    },
    Peer {
        what: "crossbeam bounded, polling, between threads",
        round_trip: crossbeam,
        one_way: Some(crossbeam_one_way),
    },
    Peer {
        what: "crossbeam bounded, blocking, between threads",
        round_trip: crossbeam_blocking,
        one_way: None,
    },
    Peer {
        what: "unix socket between processes",
        round_trip: socket,
        one_way: None,
    },
];

#[repr(align(64))]
struct Line(AtomicU64);

/// Nanoseconds of one of `trips`.
fn each(start: Instant, trips: u64) -> f64 {
    start.elapsed().as_nanos() as f64 / trips as f64
}

fn message(number: u64) -> Message {
    Message {
        words: [number; 7],
        kind: 1,
    }
}

fn bare() -> Outcome<f64> {
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let wait = |line: &Line, number| {
        while line.0.load(Ordering::Acquire) != number {
            spin_loop();
        }
    };
    both(
        || {
            for number in 1..=TRIPS {
                wait(&there, number);
                back.0.store(number, Ordering::Release);
            }
        },
        || {
            let start = Instant::now();
            for number in 1..=TRIPS {
                there.0.store(number, Ordering::Release);
                wait(&back, number);
            }
            each(start, TRIPS)
        },
    )
}

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

fn take(receiver: &mut Receiver<SharedRing>) -> Option<Message> {
    loop {
        match receiver.take() {
            Ok(Some(message)) => return Some(message),
            Ok(None) => spin_loop(),
            Err(RecvError::Closed) => return None,
        }
    }
}

fn post(sender: &mut Sender<SharedRing>, message: &Message) {
    while sender.post(message) == Err(SendError::Full) {
        spin_loop();
    }
}

fn ring_trips(prefetch: bool) -> Outcome<f64> {
    let (mut to_there, mut from_here) = ends(prefetch)?;
    let (mut to_here, mut from_there) = ends(prefetch)?;
    both(
        move || {
            while let Some(message) = take(&mut from_here) {
                post(&mut to_here, &message);
            }
        },
        move || {
            let start = Instant::now();
            for number in 0..TRIPS {
                post(&mut to_there, &message(number));
                take(&mut from_there);
            }
            each(start, TRIPS)
        },
    )
}

fn ring() -> Outcome<f64> {
    ring_trips(false)
}

fn ring_prefetched() -> Outcome<f64> {
    ring_trips(true)
}

fn ring_flow(prefetch: bool) -> Outcome<f64> {
    let (mut sender, mut receiver) = ends(prefetch)?;
    both(
        move || (0..MESSAGES).for_each(|number| post(&mut sender, &message(number))),
        move || {
            let start = Instant::now();
            while take(&mut receiver).is_some() {}
            MESSAGES as f64 / start.elapsed().as_secs_f64()
        },
    )
}

fn ring_one_way() -> Outcome<f64> {
    ring_flow(false)
}

fn ring_one_way_prefetched() -> Outcome<f64> {
    ring_flow(true)
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(10))
}

fn channel_trips(block_ns: u64, trips: u64) -> Outcome<f64> {
    let (mut to_there, mut from_here): (Outbox, Inbox) = channel(LINES, block_ns)?;
    let (mut to_here, mut from_there) = channel(LINES, block_ns)?;
    both(
        move || {
            while let Ok(Some(message)) = from_here.recv(soon()) {
                if to_here.send(&message, soon()).is_err() {
                    return;
                }
            }
        },
        move || {
            let start = Instant::now();
            for number in 0..trips {
                let sent = to_there.send(&message(number), soon());
                if sent.is_err() || !matches!(from_there.recv(soon()), Ok(Some(_))) {
                    return f64::NAN;
                }
            }
            each(start, trips)
        },
    )
}

fn blocking() -> Outcome<f64> {
    channel_trips(measure_block_ns(), TRIPS)
}

fn asleep() -> Outcome<f64> {
    channel_trips(0, TRIPS_SLOW)
}

fn crossbeam() -> Outcome<f64> {
    let (to_there, from_here) = crossbeam_channel::bounded::<Message>(LINES);
    let (to_here, from_there) = crossbeam_channel::bounded::<Message>(LINES);
    let take = |from: &crossbeam_channel::Receiver<Message>| loop {
        match from.try_recv() {
            Ok(message) => return Some(message),
            Err(crossbeam_channel::TryRecvError::Empty) => spin_loop(),
            Err(crossbeam_channel::TryRecvError::Disconnected) => return None,
        }
    };
    both(
        move || {
            while let Some(message) = take(&from_here) {
                let _ = to_here.send(message);
            }
        },
        move || {
            let start = Instant::now();
            for number in 0..TRIPS {
                let _ = to_there.send(message(number));
                take(&from_there);
            }
            each(start, TRIPS)
        },
    )
}

fn crossbeam_blocking() -> Outcome<f64> {
    let (to_there, from_here) = crossbeam_channel::bounded::<Message>(LINES);
    let (to_here, from_there) = crossbeam_channel::bounded::<Message>(LINES);
    both(
        move || {
            while let Ok(message) = from_here.recv() {
                let _ = to_here.send(message);
            }
        },
        move || {
            let start = Instant::now();
            for number in 0..TRIPS {
                let _ = to_there.send(message(number));
                let _ = from_there.recv();
            }
            each(start, TRIPS)
        },
    )
}

fn crossbeam_one_way() -> Outcome<f64> {
    let (sender, receiver) = crossbeam_channel::bounded::<Message>(LINES);
    both(
        move || {
            (0..MESSAGES).for_each(|number| {
                let _ = sender.send(message(number));
            });
        },
        move || {
            let start = Instant::now();
            loop {
                match receiver.try_recv() {
                    Ok(_) => {}
                    Err(crossbeam_channel::TryRecvError::Empty) => spin_loop(),
                    Err(crossbeam_channel::TryRecvError::Disconnected) => break,
                }
            }
            MESSAGES as f64 / start.elapsed().as_secs_f64()
        },
    )
}

fn socket() -> Outcome<f64> {
    let [first, _] = two_cpus()?;
    let (mut here, there) = UnixStream::pair()?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg("echo")
        .stdin(Stdio::from(OwnedFd::from(there)))
        .spawn()?;
    let measured = std::thread::spawn(move || -> std::io::Result<f64> {
        // Should it fail, the figure is only less certain.
        let _ = pin(first);
        let mut line = [7_u8; 64];
        let start = Instant::now();
        for _ in 0..TRIPS_SLOW {
            here.write_all(&line)?;
            here.read_exact(&mut line)?;
        }
        Ok(each(start, TRIPS_SLOW))
    });
    let measured = measured.join().map_err(|_| "a thread panicked")?;
    child.wait()?;
    Ok(measured?)
}

/// The other process of [`socket`].
pub fn echo() -> Outcome<()> {
    let [_, second] = two_cpus()?;
    pin(second)?;
    let mut stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = [0_u8; 64];
    while stream.read_exact(&mut line).is_ok() {
        stream.write_all(&line)?;
    }
    Ok(())
}
