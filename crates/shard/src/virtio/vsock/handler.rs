//! Serves the socket device's queues and the host's sockets.

mod from_guest;

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::EpollFlags;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{QueueOwnedT, QueueT};
use vmm_sys_util::timerfd::TimerFd;

use super::connection::Connection;
use super::metrics::{VsockMetrics, add};
use super::packet::{HEADER_BYTES, HOST_CID, Header, PAYLOAD_BYTES_MAX, TYPE_STREAM, op};
use super::peer::{self, Hello};
use crate::memory::GuestRam;
use crate::virtio::device::{Activation, ActiveQueue, DeviceError, Interrupt};
use crate::virtio::segments::{Direction, Segments};
use crate::virtio::worker::{Event, Handler, Sources};

const RX: u16 = 0;
const TX: u16 = 1;
const LISTENER: u32 = u32::MAX;
const TIMER: u32 = u32::MAX - 1;
/// Connections at once, those still opening included.
pub(super) const CONNECTIONS_MAX: usize = 1_023;
/// Resets that wait for the guest to post a buffer; more are not sent.
const RESETS_MAX: usize = 1_024;
/// Packets moved for one event before others get their turn.
const PACKETS_PER_EVENT: usize = 256;
/// How long a client may take for its first line, and the guest for its answer.
const OPEN_LIMIT: Duration = Duration::from_secs(5);
/// The first port of the host's side of connections that the host asks for.
const HOST_PORT_FIRST: u32 = 1 << 30;

/// A connection's ports: the host's and the guest's.
type Ports = (u32, u32);

enum Phase {
    /// A client of the host has yet to say which port it wants.
    Hello {
        line: Vec<u8>,
    },
    Connected {
        ports: Ports,
        connection: Connection,
    },
}

struct Entry {
    stream: UnixStream,
    phase: Phase,
    /// Until when it must be open.
    deadline: Option<Instant>,
    /// The socket may have bytes for the guest.
    readable: bool,
    /// In the list of those with something for the guest.
    queued: bool,
    /// The socket has no more bytes.
    ended: bool,
    gone: bool,
    told_ended: bool,
}

struct Running {
    memory: GuestRam,
    interrupt: Arc<dyn Interrupt>,
    rx: ActiveQueue,
    tx: ActiveQueue,
    /// A receive buffer taken from the ring and not used yet.
    held: Option<u16>,
}

/// The half of the socket device on its thread.
pub struct VsockHandler {
    cid: u64,
    listener: UnixListener,
    ports: Option<PathBuf>,
    metrics: Arc<VsockMetrics>,
    timer: TimerFd,
    timer_set: bool,
    listener_paused: bool,
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    by_ports: HashMap<Ports, usize>,
    ready: VecDeque<usize>,
    resets: VecDeque<Ports>,
    host_port_next: u32,
    held: Segments,
    chain: Segments,
    scratch: Vec<u8>,
    running: Option<Running>,
}

fn host(what: &'static str) -> impl Fn(io::Error) -> DeviceError {
    move |source| DeviceError::Host { what, source }
}

fn protocol(error: virtio_queue::Error) -> DeviceError {
    DeviceError::Protocol(error.to_string())
}

fn signal(active: &mut ActiveQueue, memory: &GuestRam, interrupt: &dyn Interrupt) -> Result<(), DeviceError> {
    if active.queue.needs_notification(&**memory).map_err(protocol)? {
        interrupt.signal_queue(active.index);
    }
    Ok(())
}

impl VsockHandler {
    /// A handler that waits for its first activation.
    pub fn new(
        cid: u64,
        listener: UnixListener,
        ports: Option<PathBuf>,
        metrics: Arc<VsockMetrics>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            cid,
            listener,
            ports,
            metrics,
            timer: TimerFd::new()?,
            timer_set: false,
            listener_paused: false,
            entries: Vec::new(),
            free: Vec::new(),
            by_ports: HashMap::new(),
            ready: VecDeque::new(),
            resets: VecDeque::new(),
            host_port_next: HOST_PORT_FIRST,
            held: Segments::default(),
            chain: Segments::default(),
            scratch: vec![0; PAYLOAD_BYTES_MAX],
            running: None,
        })
    }

    fn insert(
        &mut self,
        stream: UnixStream,
        phase: Phase,
        sources: &Sources,
    ) -> Result<Option<usize>, DeviceError> {
        if self.entries.len() - self.free.len() >= CONNECTIONS_MAX {
            return Ok(None);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        sources
            .add(&stream, index as u32, EpollFlags::EPOLLONESHOT)
            .map_err(host("waiting for a socket"))?;
        let deadline = Some(Instant::now() + OPEN_LIMIT);
        if let Phase::Connected { ports, .. } = &phase {
            self.by_ports.insert(*ports, index);
        }
        self.entries[index] = Some(Entry {
            stream,
            phase,
            deadline,
            readable: false,
            queued: false,
            ended: false,
            gone: false,
            told_ended: false,
        });
        self.set_timer()?;
        Ok(Some(index))
    }

    fn set_timer(&mut self) -> Result<(), DeviceError> {
        if !self.timer_set {
            let after = Duration::from_secs(1);
            self.timer
                .reset(after, None)
                .map_err(|error| host("setting a timer")(error.into()))?;
            self.timer_set = true;
        }
        Ok(())
    }

    fn remove(&mut self, index: usize) {
        if let Some(entry) = self.entries[index].take() {
            if let Phase::Connected { ports, .. } = entry.phase {
                self.by_ports.remove(&ports);
            }
            if entry.queued {
                // Else a guest that opens and resets, and posts no buffers, would make the list grow.
                self.ready.retain(|queued| *queued != index);
            }
            self.free.push(index);
        }
    }

    /// Gives up a connection; the guest is told.
    fn refuse(&mut self, index: usize) {
        if let Some(Entry {
            phase: Phase::Connected { ports, .. },
            ..
        }) = &self.entries[index]
        {
            let ports = *ports;
            self.reset(ports);
        }
        self.remove(index);
    }

    fn reset(&mut self, ports: Ports) {
        add(&self.metrics.refused, 1);
        if self.resets.len() < RESETS_MAX {
            self.resets.push_back(ports);
        }
    }

    /// Drops what did not open in time; accepts clients again.
    fn sweep(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let now = Instant::now();
        let mut pending = false;
        for index in 0..self.entries.len() {
            match self.entries[index].as_ref().and_then(|entry| entry.deadline) {
                Some(deadline) if deadline <= now => self.refuse(index),
                Some(_) => pending = true,
                None => {}
            }
        }
        self.timer_set = false;
        if std::mem::take(&mut self.listener_paused) {
            sources
                .modify(&self.listener, LISTENER, EpollFlags::EPOLLIN)
                .map_err(host("waiting for clients"))?;
        }
        if pending { self.set_timer() } else { Ok(()) }
    }

    fn accept(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        // Bounded by the listener's backlog; more are reported again.
        for _ in 0..PACKETS_PER_EVENT {
            let stream = match peer::accept(&self.listener) {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                // This process has no file left. The listener stays ready, so look again a second later.
                Err(_) => {
                    sources
                        .modify(&self.listener, LISTENER, EpollFlags::empty())
                        .map_err(host("waiting for clients"))?;
                    self.listener_paused = true;
                    return self.set_timer();
                }
            };
            // Without room the client is refused by closing its socket.
            if let Some(index) = self.insert(stream, Phase::Hello { line: Vec::new() }, sources)? {
                self.service(index, sources)?;
            }
        }
        Ok(())
    }

    /// Does what can be done for a connection without a receive buffer, and waits for what it needs next.
    fn service(&mut self, index: usize, sources: &Sources) -> Result<(), DeviceError> {
        let Some(entry) = self.entries.get_mut(index).and_then(Option::as_mut) else {
            return Ok(());
        };
        if let Phase::Hello { line } = &mut entry.phase {
            match peer::hello(&entry.stream, line) {
                Hello::Partial => {
                    let interest = EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT;
                    return sources
                        .modify(&entry.stream, index as u32, interest)
                        .map_err(host("waiting for a socket"));
                }
                Hello::Wrong => {
                    add(&self.metrics.refused, 1);
                    self.remove(index);
                    return Ok(());
                }
                Hello::Port(guest_port) => {
                    let mut host_port = self.host_port_next;
                    // Ends: there are far fewer connections than ports.
                    while self.by_ports.contains_key(&(host_port, guest_port)) {
                        host_port = HOST_PORT_FIRST | host_port.wrapping_add(1) & (HOST_PORT_FIRST - 1);
                    }
                    self.host_port_next = HOST_PORT_FIRST | host_port.wrapping_add(1) & (HOST_PORT_FIRST - 1);
                    let ports = (host_port, guest_port);
                    entry.phase = Phase::Connected {
                        ports,
                        connection: Connection::request(),
                    };
                    self.by_ports.insert(ports, index);
                }
            }
        }
        let Phase::Connected { connection, .. } = &mut entry.phase else {
            return Ok(());
        };
        let mut blocked = false;
        while !connection.waiting().is_empty() {
            match peer::send(&entry.stream, connection.waiting()) {
                Ok(count) => connection.forwarded(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    blocked = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    let lost = connection.waiting().len();
                    connection.forwarded(lost);
                    entry.gone = true;
                    entry.ended = true;
                    connection.host_ended(true);
                }
            }
        }
        if connection.guest_sent_all() && !entry.told_ended {
            entry.told_ended = true;
            // An error means that the other end is gone: its hang-up tells.
            let _ = entry.stream.shutdown(Shutdown::Write);
        }
        if entry.ended && !entry.gone && peer::is_gone(&entry.stream) {
            entry.gone = true;
            connection.host_ended(true);
        }
        if connection.is_over() {
            self.remove(index);
            return Ok(());
        }
        let has_data = entry.readable && !entry.ended && connection.room() > 0;
        if (connection.has_control() || has_data) && !entry.queued {
            entry.queued = true;
            self.ready.push_back(index);
        }
        let mut interest = EpollFlags::EPOLLONESHOT;
        if blocked {
            interest |= EpollFlags::EPOLLOUT;
        }
        if !entry.readable && !entry.ended && connection.is_open() {
            interest |= EpollFlags::EPOLLIN;
        }
        // Once ended, only the hang-up is waited for; before that, a socket with unread bytes is left alone.
        if !entry.gone && (interest != EpollFlags::EPOLLONESHOT || entry.ended) {
            sources
                .modify(&entry.stream, index as u32, interest)
                .map_err(host("waiting for a socket"))?;
        }
        Ok(())
    }

    /// Sends the guest what waits for it, as far as it has posted buffers.
    fn fill(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let mut packets = 0;
        if let Some(running) = &mut self.running {
            running
                .rx
                .queue
                .disable_notification(&*running.memory)
                .map_err(protocol)?;
        }
        while !(self.resets.is_empty() && self.ready.is_empty()) {
            let Some(running) = &mut self.running else {
                return Ok(());
            };
            if packets >= PACKETS_PER_EVENT {
                running
                    .rx
                    .notify
                    .write(1)
                    .map_err(host("waking the device's thread"))?;
                break;
            }
            if !running.hold(&mut self.held)? {
                break;
            }
            let room = self.held.bytes() - HEADER_BYTES;
            let mut header = Header {
                src_cid: HOST_CID,
                dst_cid: self.cid,
                kind: TYPE_STREAM,
                ..Header::default()
            };
            if let Some((host_port, guest_port)) = self.resets.pop_front() {
                header.op = op::RST;
                (header.src_port, header.dst_port) = (host_port, guest_port);
                running.send(&self.held, header)?;
                packets += 1;
                continue;
            }
            let Some(index) = self.ready.pop_front() else {
                break;
            };
            let Some(entry) = self.entries[index].as_mut() else {
                continue;
            };
            entry.queued = false;
            let Phase::Connected { ports, connection } = &mut entry.phase else {
                continue;
            };
            (header.src_port, header.dst_port) = *ports;
            if let Some((operation, flags)) = connection.next_control() {
                (header.op, header.flags) = (operation, flags);
            } else if entry.readable && !entry.ended && connection.room() > 0 && room > 0 {
                let most = connection.room().min(room).min(self.scratch.len());
                match (&entry.stream).read(&mut self.scratch[..most]) {
                    Ok(0) => {
                        entry.ended = true;
                        entry.gone = peer::is_gone(&entry.stream);
                        connection.host_ended(entry.gone);
                    }
                    Ok(count) => {
                        connection.sent(count);
                        self.held.write_at(HEADER_BYTES, &self.scratch[..count]);
                        add(&self.metrics.rx_bytes, count);
                        header.op = op::RW;
                        // At most PAYLOAD_BYTES_MAX.
                        header.len = count as u32;
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => entry.readable = false,
                    Err(_) => {
                        entry.ended = true;
                        entry.gone = true;
                        connection.host_ended(true);
                    }
                }
            }
            if header.op != 0 {
                (header.buf_alloc, header.fwd_cnt) = connection.credit();
                running.send(&self.held, header)?;
                packets += 1;
            }
            self.service(index, sources)?;
        }
        if let Some(running) = &mut self.running
            && packets > 0
        {
            signal(&mut running.rx, &running.memory, &*running.interrupt)?;
        }
        Ok(())
    }
}

impl Running {
    /// Makes `held` a receive buffer; false when the guest has posted none. It will notify when it does.
    fn hold(&mut self, held: &mut Segments) -> Result<bool, DeviceError> {
        if self.held.is_some() {
            return Ok(true);
        }
        let memory = &*self.memory;
        loop {
            if let Some(chain) = self.rx.queue.iter(memory).map_err(protocol)?.next() {
                let head = chain.head_index();
                held.clear();
                held.append(memory, chain, Direction::ToDriver)?;
                if held.bytes() <= HEADER_BYTES {
                    return Err(DeviceError::Protocol(
                        "a receive buffer without room for more than a header".to_owned(),
                    ));
                }
                self.held = Some(head);
                return Ok(true);
            }
            if !self.rx.queue.enable_notification(memory).map_err(protocol)? {
                return Ok(false);
            }
        }
    }

    /// Gives the held buffer to the guest with `header` before its payload.
    fn send(&mut self, held: &Segments, header: Header) -> Result<(), DeviceError> {
        held.write_at(0, &header.bytes());
        let Some(head) = self.held.take() else {
            return Ok(());
        };
        let bytes = HEADER_BYTES as u32 + header.len;
        self.rx
            .queue
            .add_used(&*self.memory, head, bytes)
            .map_err(protocol)
    }
}

impl Handler for VsockHandler {
    fn start(&mut self, activation: Activation, sources: &Sources) -> Result<(), DeviceError> {
        let event_idx = activation.features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let (mut rx, mut tx) = (None, None);
        for mut active in activation.queues {
            active.queue.set_event_idx(event_idx);
            match active.index {
                RX => rx = Some(active),
                TX => tx = Some(active),
                // The event queue: no event is ever sent, as the guest's id never changes while it runs.
                _ => {}
            }
        }
        let (Some(rx), Some(tx)) = (rx, tx) else {
            return Err(DeviceError::Protocol(
                "the receive or transmit queue is not enabled".to_owned(),
            ));
        };
        self.running = Some(Running {
            memory: activation.memory,
            interrupt: activation.interrupt,
            rx,
            tx,
            held: None,
        });
        sources
            .add(&self.listener, LISTENER, EpollFlags::EPOLLIN)
            .map_err(host("waiting for clients"))?;
        // SAFETY: the timer's file is open for as long as this handler lives.
        let timer =
            unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&self.timer)) };
        sources
            .add(timer, TIMER, EpollFlags::EPOLLIN)
            .map_err(host("waiting for a timer"))?;
        self.drain(sources)?;
        self.fill(sources)
    }

    fn handle(&mut self, event: Event, sources: &Sources) -> Result<(), DeviceError> {
        match event {
            Event::Queue(RX) => {}
            Event::Queue(TX) => self.drain(sources)?,
            Event::Queue(_) => return Ok(()),
            Event::Source(LISTENER) => self.accept(sources)?,
            Event::Source(TIMER) => {
                let _ = self.timer.wait();
                self.sweep(sources)?;
            }
            Event::Source(token) => {
                let index = token as usize;
                if let Some(Some(entry)) = self.entries.get_mut(index) {
                    entry.readable = !matches!(entry.phase, Phase::Hello { .. }) && !entry.ended;
                }
                self.service(index, sources)?;
            }
        }
        self.fill(sources)
    }

    fn stop(&mut self, sources: &Sources) {
        // What was not registered, because `start` failed, is not there to be removed.
        let _ = sources.remove(&self.listener);
        // SAFETY: as in `start`.
        let timer =
            unsafe { std::os::fd::BorrowedFd::borrow_raw(std::os::fd::AsRawFd::as_raw_fd(&self.timer)) };
        let _ = sources.remove(timer);
        self.entries.clear();
        self.free.clear();
        self.by_ports.clear();
        self.ready.clear();
        self.resets.clear();
        self.held.clear();
        self.running = None;
    }
}
