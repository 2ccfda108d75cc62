//! Serves a card's queues: moves frames between the guest and the backend.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use nix::sys::epoll::EpollFlags;
use subnet::offload::Accepted;
use virtio_bindings::virtio_net as spec;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{QueueOwnedT, QueueT};

use super::control;
use super::header::{ETHERNET_BYTES, FRAME_BYTES_MAX, FRAME_BYTES_PLAIN, HEADER_BYTES};
use super::metrics::{NetMetrics, add};
use super::posted::Posted;
use super::receiver::{Pause, Receiver};
use super::stream::{Stream, TransferResult};
use super::tap::Tap;
use crate::memory::GuestRam;
use crate::virtio::device::{Activation, ActiveQueue, DeviceError, Interrupt};
use crate::virtio::segments::{Direction, Segments};
use crate::virtio::worker::{Event, Handler, Sources};

/// Greatest number of frames moved for one event, after which other events are served.
pub(super) const FRAMES_PER_EVENT: usize = 256;
/// Number of frames between two checks whether the guest requests a notification.
pub(super) const FRAMES_PER_SIGNAL: usize = 64;

/// Host side of a card.
pub enum Link {
    /// A TAP device.
    Tap(Tap),
    /// A socket to passt, or to the gateway of a subnet.
    Stream(Box<Stream>),
}

struct Pair {
    rx: Option<ActiveQueue>,
    tx: Option<ActiveQueue>,
    posted: Posted,
    /// Events of the backend's file that the thread waits for; empty if it is not registered.
    interest: EpollFlags,
}

struct Running {
    memory: GuestRam,
    interrupt: Arc<dyn Interrupt>,
    pairs: Vec<Pair>,
    control: Option<ActiveQueue>,
    /// Greatest size of a frame with its header, bytes.
    largest: usize,
}

/// The half of a card that runs on its thread.
pub struct NetHandler {
    link: Link,
    metrics: Arc<NetMetrics>,
    status: Arc<AtomicU16>,
    chain: Segments,
    running: Option<Running>,
}

fn host(what: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |source| DeviceError::Host { what, source }
}

pub(super) fn protocol(error: virtio_queue::Error) -> DeviceError {
    DeviceError::Protocol(error.to_string())
}

/// Notifies the guest of used buffers if it requests that.
pub(super) fn signal(
    active: &mut ActiveQueue,
    memory: &GuestRam,
    interrupt: &dyn Interrupt,
) -> Result<(), DeviceError> {
    if active.queue.needs_notification(&**memory).map_err(protocol)? {
        interrupt.signal_queue(active.index);
    }
    Ok(())
}

/// Returns the work on frames that a guest with these features does itself.
fn accepted(features: u64) -> Accepted {
    let has = |bit: u32| features & (1 << bit) != 0;
    let checksums = has(spec::VIRTIO_NET_F_GUEST_CSUM);
    Accepted {
        checksums,
        tcp_v4: checksums && has(spec::VIRTIO_NET_F_GUEST_TSO4),
        tcp_v6: checksums && has(spec::VIRTIO_NET_F_GUEST_TSO6),
        ecn: has(spec::VIRTIO_NET_F_GUEST_ECN),
    }
}

impl NetHandler {
    /// Creates a handler that waits for its first activation.
    pub fn new(link: Link, metrics: Arc<NetMetrics>, status: Arc<AtomicU16>) -> Self {
        Self {
            link,
            metrics,
            status,
            chain: Segments::default(),
            running: None,
        }
    }

    /// Registers the backend's file of `pair` for the events of `interest`, or removes it.
    fn listen(&mut self, pair: usize, interest: EpollFlags, sources: &Sources) -> Result<(), DeviceError> {
        let Some(state) = self
            .running
            .as_mut()
            .and_then(|running| running.pairs.get_mut(pair))
        else {
            return Ok(());
        };
        if state.interest == interest {
            return Ok(());
        }
        let file = match &self.link {
            Link::Tap(tap) => tap.file(pair),
            Link::Stream(stream) => stream.socket(),
        };
        let done = if interest.is_empty() {
            sources.remove(file)
        } else if state.interest.is_empty() {
            sources.add(file, pair as u32, interest)
        } else {
            sources.modify(file, pair as u32, interest)
        };
        done.map_err(host("waiting for the network"))?;
        state.interest = interest;
        Ok(())
    }

    /// Moves frames to the guest until it has no buffers or the backend has no frames. The file remains
    /// registered only if the guest has room.
    fn receive(&mut self, pair: usize, sources: &Sources) -> Result<(), DeviceError> {
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        let Some(state) = running.pairs.get_mut(pair) else {
            return Ok(());
        };
        let Some(rx) = &mut state.rx else { return Ok(()) };
        let receiver = Receiver {
            link: &mut self.link,
            metrics: &self.metrics,
            memory: &running.memory,
            interrupt: &*running.interrupt,
            rx,
            posted: &mut state.posted,
            pair,
            largest: running.largest,
        };
        let pause = receiver.run()?;
        let mut interest = state.interest & EpollFlags::EPOLLOUT;
        match pause {
            Pause::Idle => {
                interest |= EpollFlags::EPOLLIN;
                // epoll does not report frames that were already read from the socket: wake this thread for
                // them.
                if let Link::Stream(stream) = &mut self.link
                    && stream.frame().is_some()
                {
                    rx.notify.write(1).map_err(host("waking the card's thread"))?;
                }
            }
            Pause::NoBuffers => add(&self.metrics.rx_stalls, 1),
            // A dead file would be reported forever.
            Pause::Unreadable => interest = EpollFlags::empty(),
        }
        self.listen(pair, interest, sources)?;
        if pause == Pause::Unreadable {
            self.check_link();
        }
        Ok(())
    }

    /// Moves frames from the guest to the backend until the guest has none or the backend is full.
    fn transmit(&mut self, pair: usize, sources: &Sources) -> Result<(), DeviceError> {
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        let Some(state) = running.pairs.get_mut(pair) else {
            return Ok(());
        };
        let Some(tx) = &mut state.tx else { return Ok(()) };
        let memory = &*running.memory;
        let mut blocked = false;
        let mut frames = 0;
        tx.queue.disable_notification(memory).map_err(protocol)?;
        loop {
            if let Link::Stream(stream) = &mut self.link
                && stream.is_full()
                && stream.flush() == TransferResult::Blocked
            {
                blocked = true;
                break;
            }
            if frames >= FRAMES_PER_EVENT {
                tx.notify.write(1).map_err(host("waking the card's thread"))?;
                break;
            }
            let Some(chain) = tx.queue.iter(memory).map_err(protocol)?.next() else {
                if tx.queue.enable_notification(memory).map_err(protocol)? {
                    tx.queue.disable_notification(memory).map_err(protocol)?;
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            self.chain.clear();
            self.chain.append(memory, chain, Direction::FromDriver)?;
            let bytes = self.chain.bytes();
            if !(HEADER_BYTES..=HEADER_BYTES + FRAME_BYTES_MAX).contains(&bytes) {
                return Err(DeviceError::Protocol(format!(
                    "a frame of {bytes} bytes with its header"
                )));
            }
            let frame = bytes - HEADER_BYTES;
            let sent = match &mut self.link {
                _ if frame < ETHERNET_BYTES => false,
                // A full queue of the host, a device that is down or a header the kernel refuses: the frame
                // is lost, as on a wire.
                Link::Tap(tap) => tap.write(pair, self.chain.pieces()).is_ok(),
                Link::Stream(stream) if stream.is_open() => {
                    let chain = &self.chain;
                    let skipped = stream.framing().absent_header_bytes();
                    stream.push(bytes - skipped, |room| {
                        chain.read_at(skipped, room);
                    });
                    true
                }
                Link::Stream(_) => false,
            };
            if sent {
                add(&self.metrics.tx_frames, 1);
                add(&self.metrics.tx_bytes, frame);
            } else {
                add(&self.metrics.tx_dropped, 1);
            }
            tx.queue.add_used(memory, head, 0).map_err(protocol)?;
            frames += 1;
            if frames % FRAMES_PER_SIGNAL == 0 {
                signal(tx, &running.memory, &*running.interrupt)?;
            }
        }
        if frames > 0 {
            signal(tx, &running.memory, &*running.interrupt)?;
        }
        if let Link::Stream(stream) = &mut self.link {
            blocked |= stream.flush() == TransferResult::Blocked;
            let mut interest = state.interest & EpollFlags::EPOLLIN;
            if blocked {
                interest |= EpollFlags::EPOLLOUT;
            }
            if !stream.is_open() {
                interest = EpollFlags::empty();
            }
            self.listen(pair, interest, sources)?;
            self.check_link();
        }
        Ok(())
    }

    /// Takes the link down if the peer is gone.
    fn check_link(&self) {
        let down = matches!(&self.link, Link::Stream(stream) if !stream.is_open());
        if down
            && self.status.swap(0, Ordering::AcqRel) != 0
            && let Some(running) = &self.running
        {
            running.interrupt.signal_config();
        }
    }

    fn set_pairs(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        let Some(control) = &mut running.control else {
            return Ok(());
        };
        let Link::Tap(tap) = &mut self.link else {
            return Ok(());
        };
        let mut asked = None;
        loop {
            let served = control::serve(&running.memory, &mut control.queue, |count| {
                let possible = count >= 1 && usize::from(count) <= running.pairs.len();
                if possible {
                    asked = Some(usize::from(count));
                }
                possible
            })?;
            if served {
                signal(control, &running.memory, &*running.interrupt)?;
            } else if !control
                .queue
                .enable_notification(&*running.memory)
                .map_err(protocol)?
            {
                break;
            }
        }
        let Some(count) = asked else { return Ok(()) };
        tap.attach(count)
            .map_err(host("changing the number of TAP queues"))?;
        let pairs = running.pairs.len();
        for pair in 0..pairs {
            // A detached TAP file is always in error, so waiting for it would spin.
            let interest = if pair < count {
                EpollFlags::EPOLLIN
            } else {
                EpollFlags::empty()
            };
            self.listen(pair, interest, sources)?;
        }
        Ok(())
    }
}

impl Handler for NetHandler {
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError> {
        let has = |bit: u32| activation.features & (1 << bit) != 0;
        let segmented = [spec::VIRTIO_NET_F_GUEST_TSO4, spec::VIRTIO_NET_F_GUEST_TSO6]
            .into_iter()
            .any(has);
        let multiqueue = has(spec::VIRTIO_NET_F_MQ);
        let mergeable = has(spec::VIRTIO_NET_F_MRG_RXBUF);
        let event_idx = has(VIRTIO_RING_F_EVENT_IDX);
        let available = match &mut self.link {
            Link::Tap(tap) => {
                tap.set_offloads(activation.features)
                    .map_err(host("setting the TAP device's offloads"))?;
                tap.attach(1).map_err(host("changing the number of TAP queues"))?;
                if multiqueue { tap.pairs() } else { 1 }
            }
            Link::Stream(stream) => {
                stream.set_offloads(accepted(activation.features), has(spec::VIRTIO_NET_F_CSUM));
                1
            }
        };
        let new_pair = || Pair {
            rx: None,
            tx: None,
            posted: Posted::new(mergeable),
            interest: EpollFlags::empty(),
        };
        let mut pairs: Vec<_> = (0..available).map(|_| new_pair()).collect();
        let mut control = None;
        for mut active in activation.queues {
            active.queue.set_event_idx(event_idx);
            let index = usize::from(active.index);
            match pairs.get_mut(index / 2) {
                Some(pair) if index % 2 == 0 => pair.rx = Some(active),
                Some(pair) => pair.tx = Some(active),
                None if index == 2 * available && has(spec::VIRTIO_NET_F_CTRL_VQ) => control = Some(active),
                None => {}
            }
        }
        // Large TAPs (jumbo frames) may need more than this; frames that are cut off are dropped and counted.
        let largest = HEADER_BYTES
            + if segmented {
                FRAME_BYTES_MAX
            } else {
                FRAME_BYTES_PLAIN
            };
        self.running = Some(Running {
            memory: activation.memory,
            interrupt: activation.interrupt,
            pairs,
            control,
            largest,
        });
        if !matches!(&self.link, Link::Stream(stream) if !stream.is_open()) {
            self.listen(0, EpollFlags::EPOLLIN, sources)?;
        }
        for pair in 0..available {
            self.transmit(pair, sources)?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event, sources: &Sources) -> Result<(), DeviceError> {
        match event {
            Event::Source(token) => {
                let pair = token as usize;
                // By the interest, not by the outgoing bytes: these may have been sent since, while frames
                // still wait in the queue, for which the guest does not notify again.
                let waits = self.running.as_ref().and_then(|running| running.pairs.get(pair));
                if waits.is_some_and(|pair| pair.interest.contains(EpollFlags::EPOLLOUT)) {
                    self.transmit(pair, sources)?;
                }
                self.receive(pair, sources)
            }
            Event::Queue(index) => {
                let (pair, transmits) = (usize::from(index / 2), index % 2 == 1);
                let known = self.running.as_ref().map_or(0, |running| running.pairs.len());
                let attached = match &self.link {
                    Link::Tap(tap) => tap.attached(),
                    Link::Stream(_) => 1,
                };
                match (pair < known, transmits) {
                    (true, true) => self.transmit(pair, sources),
                    (true, false) if pair < attached => self.receive(pair, sources),
                    (true, false) => Ok(()),
                    (false, _) => self.set_pairs(sources),
                }
            }
        }
    }

    fn stop(&mut self, sources: &Sources) {
        let pairs = self.running.as_ref().map_or(0, |running| running.pairs.len());
        for pair in 0..pairs {
            // A file that cannot be removed was not registered.
            let _ = self.listen(pair, EpollFlags::empty(), sources);
        }
        self.running = None;
    }
}
