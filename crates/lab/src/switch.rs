//! The switch of a link between lab hosts: it forwards each Ethernet frame to every other host, with the
//! delay and loss of [`Netem`].
//!
//! QEMU's stream network backend prefixes each frame with its length, 4 bytes, big-endian. A host that does
//! not read loses frames; it never blocks the others.
//!
//! Delay and loss are emulated here and not by `tc` in the hosts: a timer of the hosts waits for the next
//! tick, up to 4 ms (`qemu.rs`), and a card's queue can't select one neighbour on a link of three.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Instant;

use config::lab::Quality;
use locks::IgnorePoison;

use crate::netem::{Forwarding, Netem};

/// Longest frame, bytes: a full offloaded segment and its headers.
const FRAME_BYTES_MAX: usize = 68 << 10;

/// Most frames that wait for one host; more are dropped.
const WAITING_FRAMES_MAX: usize = 256;

type Frame = Arc<Vec<u8>>;

/// The switch of a running link. It ends when all its hosts are gone.
#[derive(Clone)]
pub struct Switch(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Signalled when a frame is due before all others, or the last host is gone.
    sooner: Condvar,
}

struct State {
    netem: Netem<Frame>,
    /// Queue of each host's writer thread; empty when all hosts are gone.
    senders: Vec<SyncSender<Frame>>,
    /// Number of connected hosts.
    hosts: usize,
}

impl State {
    /// A full queue or a gone host loses the frame.
    fn deliver(&self, to: usize, frame: Frame) {
        if let Some(sender) = self.senders.get(to) {
            let _ = sender.try_send(frame);
        }
    }
}

impl Switch {
    /// Connects the hosts behind `ports`.
    pub fn start(ports: Vec<UnixStream>, quality: Quality, seed: u64) -> io::Result<Self> {
        let count = ports.len();
        let mut senders = Vec::new();
        let mut readers = Vec::new();
        for port in ports {
            let (sender, receiver) = sync_channel(WAITING_FRAMES_MAX);
            senders.push(sender);
            readers.push(port.try_clone()?);
            spawn(move || write_all(port, &receiver))?;
        }
        let switch = Self(Arc::new(Shared {
            state: Mutex::new(State {
                netem: Netem::new(count, quality, seed),
                senders,
                hosts: count,
            }),
            sooner: Condvar::new(),
        }));
        for (from, reader) in readers.into_iter().enumerate() {
            let switch = switch.clone();
            spawn(move || switch.read_all(from, count, reader))?;
        }
        let late = switch.clone();
        spawn(move || late.bring())?;
        Ok(switch)
    }

    /// Changes the ways between two ports, both of them.
    pub fn set(&self, one: usize, other: usize, quality: Quality) {
        let mut state = self.lock();
        state.netem.set(one, other, quality);
        state.netem.set(other, one, quality);
    }

    /// How the ways between two ports are.
    pub fn quality(&self, one: usize, other: usize) -> Quality {
        self.lock().netem.quality(one, other)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().ignore_poison()
    }

    /// Forwards the frames that a host writes, until it is gone.
    fn read_all(&self, from: usize, ports: usize, mut port: impl Read) {
        while let Ok(frame) = read_frame(&mut port) {
            let frame = Arc::new(frame);
            let mut state = self.lock();
            let next = state.netem.next_due();
            let now = Instant::now();
            for to in (0..ports).filter(|to| *to != from) {
                if let Forwarding::Deliver(frame) = state.netem.send(from, to, Arc::clone(&frame), now) {
                    state.deliver(to, frame);
                }
            }
            let due = state.netem.next_due();
            if due.is_some_and(|due| next.is_none_or(|next| due < next)) {
                self.0.sooner.notify_one();
            }
        }
        let mut state = self.lock();
        state.hosts -= 1;
        if state.hosts == 0 {
            // Writers and [`Self::bring`] end.
            state.senders.clear();
            self.0.sooner.notify_one();
        }
    }

    /// Delivers frames that took their time, until the last host is gone.
    fn bring(&self) {
        let mut state = self.lock();
        while state.hosts > 0 {
            let now = Instant::now();
            while let Some((to, frame)) = state.netem.arrived(now) {
                state.deliver(to, frame);
            }
            state = match state.netem.next_due() {
                None => self.0.sooner.wait(state).ignore_poison(),
                Some(due) => {
                    let left = due.saturating_duration_since(Instant::now());
                    let woken = self.0.sooner.wait_timeout(state, left);
                    woken.ignore_poison().0
                }
            };
        }
    }
}

fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("switch".into()).spawn(run).map(drop)
}

fn write_all(mut port: impl Write, frames: &Receiver<Frame>) {
    while let Ok(frame) = frames.recv() {
        if write_frame(&mut port, &frame).is_err() {
            return;
        }
    }
}

fn read_frame(port: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    port.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > FRAME_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame too long"));
    }
    let mut frame = vec![0; length];
    port.read_exact(&mut frame)?;
    Ok(frame)
}

fn write_frame(port: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    let length = u32::try_from(frame.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(frame);
    port.write_all(&bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A hub, and the hosts' ends.
    fn switch(hosts: usize) -> (Switch, Vec<UnixStream>) {
        let (ends, ports): (Vec<_>, Vec<_>) = (0..hosts).map(|_| UnixStream::pair().unwrap()).unzip();
        for end in &ends {
            end.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        }
        (Switch::start(ports, Quality::default(), 1).unwrap(), ends)
    }

    fn nothing_comes(end: &mut UnixStream) {
        end.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(read_frame(end).is_err());
        end.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    }

    #[test]
    fn frame_is_forwarded_to_every_other_port() {
        let (_hub, mut ends) = switch(3);
        write_frame(&mut ends[0], b"hello").unwrap();
        for end in &mut ends[1..] {
            assert_eq!(read_frame(end).unwrap(), b"hello");
        }
        nothing_comes(&mut ends[0]);
    }

    #[test]
    fn host_that_never_reads_does_not_block_others() {
        let (_hub, mut ends) = switch(3);
        for number in 0..2000u32 {
            write_frame(&mut ends[0], &[number.to_be_bytes()[3]; 1500]).unwrap();
            assert_eq!(read_frame(&mut ends[1]).unwrap()[0], number.to_be_bytes()[3]);
        }
    }

    #[test]
    fn impairment_affects_its_two_hosts_only_until_restored() {
        let (switch, mut ends) = switch(3);
        let delay = Duration::from_millis(30);
        let bad = |delay: &str, loss: &str| Quality {
            delay: delay.parse().unwrap(),
            loss: loss.parse().unwrap(),
        };
        switch.set(0, 1, bad("30ms", "0%"));
        for (from, to) in [(0, 1), (1, 0)] {
            let start = Instant::now();
            for text in [b"first", b"later"] {
                write_frame(&mut ends[from], text).unwrap();
            }
            assert_eq!(read_frame(&mut ends[to]).unwrap(), b"first");
            assert!(start.elapsed() >= delay, "{:?}", start.elapsed());
            assert_eq!(read_frame(&mut ends[to]).unwrap(), b"later");
            for text in [b"first", b"later"] {
                assert_eq!(read_frame(&mut ends[2]).unwrap(), text);
            }
        }
        switch.set(1, 0, bad("0ms", "100%"));
        assert_eq!(switch.quality(0, 1), bad("0ms", "100%"));
        write_frame(&mut ends[0], b"gone").unwrap();
        assert_eq!(read_frame(&mut ends[2]).unwrap(), b"gone");
        nothing_comes(&mut ends[1]);
        switch.set(0, 1, Quality::default());
        write_frame(&mut ends[0], b"back").unwrap();
        assert_eq!(read_frame(&mut ends[1]).unwrap(), b"back");
    }

    #[test]
    fn link_without_hosts_ends_its_threads() {
        let (switch, ends) = switch(2);
        drop(ends);
        let start = Instant::now();
        while Arc::strong_count(&switch.0) > 1 {
            assert!(start.elapsed() < Duration::from_secs(5), "threads are left");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(switch.lock().senders.is_empty());
    }

    #[test]
    fn oversized_frame_length_closes_the_port() {
        assert!(read_frame(&mut &[0xff, 0xff, 0xff, 0xff, 0][..]).is_err());
    }
}
