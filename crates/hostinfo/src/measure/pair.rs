//! The cost of messages between two CPUs: a thread is kept on each, and both poll rings as the links of cells
//! do.
//!
//! The first thread leads: it sends requests, and the other thread serves them.
//!
//! | request | the other thread |
//! | --- | --- |
//! | `ECHO` | returns the message; half a round trip is the latency, since CPUs share no clock |
//! | `TAKE` | takes the messages that follow, then answers; the sender sends without a pause and is timed |
//! | `GIVE` | sends as many, then the time that this took |
//! | `COPY` | copies a buffer that the first has just written, and sends the time that this took |
//! | `FILL` | writes its buffer and passes it on, to be copied by the first |
//!
//! Rounds of all requests follow one another until the time is over, and medians count. The first round fills
//! the caches.

use std::hint::spin_loop;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use urpc::host::SharedRing;
use urpc::message::PAYLOAD_BYTES;
use urpc::{Message, Receiver, SendError, Sender};

/// Lines of a ring, as for the links between cells.
const LINES: usize = 1024;
/// Round trips of one round.
const TRIPS: u32 = 64;
/// Messages one way in one round.
const FLOW: u32 = 1024;
/// Bytes of one copy; they fit into the writer's cache.
const BULK_BYTES: usize = 256 << 10;
/// Most rounds, and the fewest for a median.
const ROUNDS_MAX: usize = 11;
const ROUNDS_MIN: usize = 3;
/// Polls of a ring between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 256;

const ECHO: u32 = 1;
const TAKE: u32 = 2;
const GIVE: u32 = 3;
const COPY: u32 = 4;
const FILL: u32 = 5;

/// Measurements of a pair.
#[derive(Debug)]
pub(super) struct PairReport {
    /// Time from the send of a message to its receipt.
    pub(super) latency_ns: f64,
    /// First CPU to second CPU.
    pub(super) forward: TransportReport,
    /// Second CPU to first CPU.
    pub(super) reverse: TransportReport,
}

/// Measurements of one direction.
#[derive(Debug)]
pub(super) struct TransportReport {
    /// Sender's cost of a message: time until it can send the next.
    pub(super) send_ns: f64,
    /// Payload throughput of messages that are sent back to back, until the receiver has taken them.
    pub(super) ring_mb_s: f64,
    /// Throughput of bytes that the receiver copies.
    pub(super) copy_mb_s: f64,
}

/// Reason why a pair has no measurement.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum MeasureError {
    /// A thread can't be kept on its CPU, or there is no thread or memory for it.
    Unusable,
    /// The two threads did not run at the same time for long enough.
    Busy,
}

/// Measures for about as long as `time`, and gives up after `patience`.
///
/// # Errors
/// If a CPU can't be used, or is used by others.
pub(super) fn measure(
    one: usize,
    other: usize,
    time: Duration,
    busy_timeout: Duration,
) -> Result<PairReport, MeasureError> {
    let start = Instant::now();
    let give_up = start + busy_timeout;
    let (to_there, from_here) = ring().ok_or(MeasureError::Unusable)?;
    let (to_here, from_there) = ring().ok_or(MeasureError::Unusable)?;
    let (give_there, take_here) = mpsc::channel();
    let (give_here, take_there) = mpsc::channel();
    let lead = Prober::new(to_there, from_there, give_there, take_there, give_up);
    let follow = Prober::new(to_here, from_here, give_here, take_here, give_up);
    thread::scope(|scope| {
        // Neither is the caller's thread, whose CPUs must stay what they are. A thread that ends closes its
        // rings, and the other ends, too.
        let builder = || thread::Builder::new().name("measure".into());
        let following = builder().spawn_scoped(scope, move || {
            keep_on(other)?;
            follow.follow();
            Some(())
        });
        let leading = builder().spawn_scoped(scope, move || {
            keep_on(one)?;
            Some(lead.lead(start + time))
        });
        let measured = leading.ok().and_then(|thread| thread.join().ok()?);
        let followed = following.ok().and_then(|thread| thread.join().ok()?);
        let (Some(measured), Some(())) = (measured, followed) else {
            return Err(MeasureError::Unusable);
        };
        measured.ok_or(MeasureError::Busy)
    })
}

fn ring() -> Option<(Sender<SharedRing>, Receiver<SharedRing>)> {
    let (ring, file) = SharedRing::create(LINES).ok()?;
    let other = SharedRing::attach(&file).ok()?;
    Some((Sender::new(ring), Receiver::new(other)))
}

fn keep_on(cpu: usize) -> Option<()> {
    let mut one = CpuSet::new();
    one.set(cpu).ok()?;
    sched_setaffinity(Pid::from_raw(0), &one).ok()
}

/// One of the two threads.
struct Prober {
    to: Sender<SharedRing>,
    from: Receiver<SharedRing>,
    /// Passes buffers. A message follows each, so the receiver never blocks here.
    give: mpsc::Sender<Vec<u64>>,
    take: mpsc::Receiver<Vec<u64>>,
    /// Buffer that is written and passed on, and buffer that is copied into.
    own: Vec<u64>,
    copy: Vec<u64>,
    give_up: Instant,
}

impl Prober {
    fn new(
        to: Sender<SharedRing>,
        from: Receiver<SharedRing>,
        give: mpsc::Sender<Vec<u64>>,
        take: mpsc::Receiver<Vec<u64>>,
        give_up: Instant,
    ) -> Self {
        Self {
            to,
            from,
            give,
            take,
            own: Vec::new(),
            copy: Vec::new(),
            give_up,
        }
    }

    /// The first CPU's part, until `end`.
    fn lead(mut self, end: Instant) -> Option<PairReport> {
        self.touch();
        let mut rounds: [Vec<f64>; 7] = Default::default();
        for round in 0..=ROUNDS_MAX {
            if round > ROUNDS_MIN && Instant::now() > end {
                break;
            }
            let measured = self.round()?;
            if round > 0 {
                rounds
                    .iter_mut()
                    .zip(measured)
                    .for_each(|(all, one)| all.push(one));
            }
        }
        let [latency_ns, forward @ .., back_send, back_taken, back_copy] = rounds.map(median);
        let way = |[send_ns, taken_ns, copy_ns]: [f64; 3]| TransportReport {
            send_ns,
            ring_mb_s: PAYLOAD_BYTES as f64 * 1000.0 / taken_ns,
            copy_mb_s: BULK_BYTES as f64 * 1000.0 / copy_ns,
        };
        Some(PairReport {
            latency_ns,
            forward: way(forward),
            reverse: way([back_send, back_taken, back_copy]),
        })
    }

    /// Returns nanoseconds: the latency; in one direction the costs of sending one message, of sending one of
    /// many until it is taken, and of copying; the same in the other direction.
    fn round(&mut self) -> Option<[f64; 7]> {
        let start = Instant::now();
        for _ in 0..TRIPS {
            self.send(ECHO, 0)?;
            self.receive()?;
        }
        let latency_ns = nanos(start) / f64::from(TRIPS) / 2.0;
        self.send(TAKE, 0)?;
        let start = Instant::now();
        let send_there = self.flow()? / f64::from(FLOW);
        self.receive()?;
        let taken_there = nanos(start) / f64::from(FLOW);
        let start = Instant::now();
        self.send(GIVE, 0)?;
        for _ in 0..FLOW {
            self.receive()?;
        }
        let taken_back = nanos(start) / f64::from(FLOW);
        let send_back = self.time()? / f64::from(FLOW);
        self.hand_over(COPY)?;
        let copy_there = self.time()?;
        self.own = self.take.try_recv().ok()?;
        self.send(FILL, 0)?;
        self.receive()?;
        let copy_back = self.copy()?;
        Some([
            latency_ns,
            send_there,
            taken_there,
            copy_there,
            send_back,
            taken_back,
            copy_back,
        ])
    }

    /// The second CPU's part, until the first has ended.
    fn follow(mut self) -> Option<()> {
        self.touch();
        loop {
            let message = self.receive()?;
            match message.kind {
                ECHO => self.send(ECHO, 0)?,
                TAKE => {
                    for _ in 0..FLOW {
                        self.receive()?;
                    }
                    self.send(TAKE, 0)?;
                }
                GIVE => {
                    let flow_ns = self.flow()?;
                    self.send(GIVE, flow_ns as u64)?;
                }
                COPY => {
                    let copy_ns = self.copy()?;
                    self.send(COPY, copy_ns as u64)?;
                }
                FILL => {
                    self.hand_over(FILL)?;
                    // The buffer returns without a message, at the latest with the next round's.
                    self.own = self
                        .take
                        .recv_timeout(self.give_up.saturating_duration_since(Instant::now()))
                        .ok()?;
                }
                _ => return None,
            }
        }
    }

    /// Touches the buffers, so that the kernel allocates them near this CPU.
    fn touch(&mut self) {
        self.own = vec![1; BULK_BYTES / size_of::<u64>()];
        self.copy = vec![1; BULK_BYTES / size_of::<u64>()];
    }

    /// Sends messages back to back. Returns the duration, nanoseconds.
    fn flow(&mut self) -> Option<f64> {
        let start = Instant::now();
        for _ in 0..FLOW {
            self.send(TAKE, 0)?;
        }
        Some(nanos(start))
    }

    /// Writes the own buffer, which puts it into this CPU's cache, and passes it on.
    fn hand_over(&mut self, kind: u32) -> Option<()> {
        let mut own = std::mem::take(&mut self.own);
        let next = own[0].wrapping_add(1);
        own.fill(next);
        self.give.send(own).ok()?;
        self.send(kind, 0)
    }

    /// Copies the received buffer and returns it to its owner. Returns the duration of the copy, nanoseconds.
    fn copy(&mut self) -> Option<f64> {
        let given = self.take.try_recv().ok()?;
        let start = Instant::now();
        self.copy.copy_from_slice(&given);
        let took = nanos(start);
        // Keeps the compiler from dropping the copy.
        std::hint::black_box(&self.copy);
        self.give.send(given).ok()?;
        Some(took)
    }

    /// Receives a duration from the other thread, nanoseconds.
    fn time(&mut self) -> Option<f64> {
        Some(self.receive()?.words[0] as f64)
    }

    fn send(&mut self, kind: u32, word: u64) -> Option<()> {
        let mut message = Message {
            kind,
            ..Message::default()
        };
        message.words[0] = word;
        let mut polls = 0;
        loop {
            match self.to.post(&message) {
                Ok(()) => return Some(()),
                Err(SendError::Full) => self.wait(&mut polls)?,
                Err(_) => return None,
            }
        }
    }

    fn receive(&mut self) -> Option<Message> {
        let mut polls = 0;
        loop {
            if let Some(message) = self.from.take().ok()? {
                return Some(message);
            }
            self.wait(&mut polls)?;
        }
    }

    /// Waits between two polls of a ring. Returns `None` after the deadline.
    fn wait(&self, polls: &mut u32) -> Option<()> {
        spin_loop();
        *polls += 1;
        (!polls.is_multiple_of(POLLS_PER_CLOCK_READ) || Instant::now() < self.give_up).then_some(())
    }
}

/// At least one: a clock may be coarse.
fn nanos(start: Instant) -> f64 {
    (start.elapsed().as_nanos() as f64).max(1.0)
}

/// Of at least one.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_unstable_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::MAX)
}
