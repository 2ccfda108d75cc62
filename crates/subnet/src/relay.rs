//! The relay between a card and its passt, which drops frames that the guest may not send.
//!
//! Two threads of the monitor move frames, each after its length, as passt's stream has them; they block, and each has a
//! buffer for two frames of the largest size. The end of either side ends both.

use std::collections::HashSet;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::filter::{Barred, Peers, Resolvers, admits};
use crate::host;

const LENGTH_BYTES: usize = 4;
/// Bytes of the largest frame, as the card has it.
const FRAME_BYTES_MAX: usize = 65_553;
const BUFFER_BYTES: usize = 2 * (LENGTH_BYTES + FRAME_BYTES_MAX);
/// How old the list of barred addresses may be.
const BARRED_AGE_MAX: Duration = Duration::from_secs(1);

/// The egress policy of a VM's cards: they reach neither the host nor the cluster.
#[derive(Clone)]
pub struct Egress {
    /// Lists the cluster's addresses as they are now. Asked about once a second while a guest sends.
    pub cluster: Arc<dyn Fn() -> HashSet<IpAddr> + Send + Sync>,
    /// Counts frames that were dropped.
    pub filtered: Arc<AtomicU64>,
}

impl fmt::Debug for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Egress");
        shown.field("filtered", &self.filtered).finish_non_exhaustive()
    }
}

impl Egress {
    fn barred(&self) -> io::Result<Barred> {
        Ok(Barred {
            own: host::addresses()?,
            cluster: (self.cluster)(),
        })
    }
}

/// A running relay. Dropping it ends both connections.
#[derive(Debug)]
pub struct Relay {
    ends: Ends,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Moves frames between the card's socket and passt's. `udp_ports` of the guest are forwarded.
    ///
    /// # Errors
    /// If the host has no more threads or files, or does not list its addresses.
    pub fn start(
        card: UnixStream,
        passt: UnixStream,
        egress: Egress,
        resolvers: Resolvers,
        udp_ports: Vec<u16>,
    ) -> io::Result<Self> {
        let barred = egress.barred()?;
        let peers = Arc::new(Mutex::new(Peers::new(udp_ports)));
        let mut relay = Self {
            ends: Ends([card.try_clone()?, passt.try_clone()?]),
            threads: Vec::new(),
        };
        let mut gate = Gate {
            egress,
            resolvers,
            peers: peers.clone(),
            barred,
            listed: Instant::now(),
        };
        let (from, to) = (card.try_clone()?, passt.try_clone()?);
        relay.spawn("card-out", move || out(&from, &to, &mut gate))?;
        relay.spawn("card-in", move || into(&passt, &card, &peers))?;
        Ok(relay)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
        let ends = Ends([self.ends.0[0].try_clone()?, self.ends.0[1].try_clone()?]);
        let thread = std::thread::Builder::new().name(name.into());
        self.threads.push(thread.spawn(move || {
            let _ends = ends;
            // An error is the end of a stream, and has no receiver for a report.
            let _ = run();
        })?);
        Ok(())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ends.close();
        for thread in self.threads.drain(..) {
            // One that panicked has closed the connections.
            let _ = thread.join();
        }
    }
}

/// The two connections. Dropping this closes them, however a thread ends, so that the card and passt see the stream's end.
#[derive(Debug)]
struct Ends([UnixStream; 2]);

impl Ends {
    fn close(&self) {
        for end in &self.0 {
            // The other side may have closed it before.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.close();
    }
}

/// The filter of one direction, with its state.
struct Gate {
    egress: Egress,
    resolvers: Resolvers,
    peers: Arc<Mutex<Peers>>,
    barred: Barred,
    /// When `barred` was listed.
    listed: Instant,
}

impl Gate {
    fn refresh(&mut self, now: Instant) {
        if now.saturating_duration_since(self.listed) <= BARRED_AGE_MAX {
            return;
        }
        self.listed = now;
        // A host that is out of files for a moment keeps the last list, rather than the guest losing its network.
        if let Ok(barred) = self.egress.barred() {
            self.barred = barred;
        }
    }

    fn admits(&self, frame: &[u8], now: Instant) -> bool {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let admitted = admits(frame, &self.barred, &self.resolvers, &peers, now);
        if !admitted {
            self.egress.filtered.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }
}

/// Moves frames from the card to passt, one with each call: passt loses its place when it finds a part of a frame.
fn out(card: &UnixStream, passt: &UnixStream, gate: &mut Gate) -> io::Result<()> {
    let mut frames = Frames::new();
    loop {
        frames.receive(card)?;
        let now = Instant::now();
        gate.refresh(now);
        while let Some(message) = frames.next_message()? {
            if gate.admits(&message[LENGTH_BYTES..], now) {
                (&*passt).write_all(message)?;
            }
        }
    }
}

/// Moves frames from passt to the card, and notes those that come in at forwarded UDP ports.
fn into(passt: &UnixStream, card: &UnixStream, peers: &Mutex<Peers>) -> io::Result<()> {
    let locked = || peers.lock().unwrap_or_else(PoisonError::into_inner);
    let notes = locked().are_possible();
    let mut frames = Frames::new();
    loop {
        frames.receive(passt)?;
        let now = Instant::now();
        let first = frames.start;
        while let Some(message) = frames.next_message()? {
            if notes {
                locked().note(&message[LENGTH_BYTES..], now);
            }
        }
        (&*card).write_all(&frames.buffer[first..frames.start])?;
    }
}

/// A buffer that cuts a stream into messages: each a length and a frame.
struct Frames {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Frames {
    fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
        }
    }

    /// Waits for bytes. An end of the stream is an error.
    fn receive(&mut self, mut from: &UnixStream) -> io::Result<()> {
        // The remaining bytes are less than a message, so there is room for the rest of it.
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        loop {
            match from.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.end += count;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next whole message, if it has arrived. A length that no frame has is an error: the stream's places are lost.
    fn next_message(&mut self) -> io::Result<Option<&[u8]>> {
        let rest = &self.buffer[self.start..self.end];
        let Some(length) = rest.first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if !(1..=FRAME_BYTES_MAX).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let message = rest.get(..LENGTH_BYTES + length);
        self.start += message.map_or(0, <[u8]>::len);
        Ok(message)
    }
}

#[cfg(test)]
mod tests;
