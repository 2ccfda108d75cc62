//! All connections of the device: its clients, the sockets that the guest has requested, their deadlines.
//!
//! All sizes are bounded: peers by the table, waiting bytes by each connection's credit, resets in
//! [`packets`].

mod packets;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::EpollFlags;
use vmm_sys_util::timerfd::TimerFd;

use super::metrics::{VsockMetrics, add};
use super::open_request::OpenRequests;
use super::packet::Ports;
use super::peer::{Peer, Phase};
use super::socket::{self, FirstLine};
use super::table::Table;
use crate::ports;
use crate::virtio::device::DeviceError;
use crate::virtio::worker::Sources;

const LISTENER: u32 = u32::MAX;
const TIMER: u32 = u32::MAX - 1;
const ANSWERS: u32 = u32::MAX - 2;
/// Greatest number of clients accepted for one event; further ones cause another event.
const CLIENTS_PER_EVENT: usize = 256;
/// Interval of the checks of deadlines, while there are any.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The connections, and the sources of new ones.
pub struct Connections {
    cid: u64,
    listener: UnixListener,
    listener_paused: bool,
    /// Connects to the host's sockets that the guest may request.
    ports: Option<ports::Ports>,
    /// Requests of the guest to which the monitor has not replied.
    open_requests: OpenRequests,
    metrics: Arc<VsockMetrics>,
    timer: TimerFd,
    timer_set: bool,
    table: Table,
    resets: VecDeque<Ports>,
}

impl Connections {
    /// Creates the state without connections.
    pub fn new(
        cid: u64,
        listener: UnixListener,
        ports: Option<ports::Ports>,
        metrics: Arc<VsockMetrics>,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            cid,
            listener,
            listener_paused: false,
            ports,
            open_requests: OpenRequests::default(),
            metrics,
            timer: TimerFd::new()?,
            timer_set: false,
            table: Table::new(),
            resets: VecDeque::new(),
        })
    }

    /// Starts to wait for clients.
    pub fn start(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        sources
            .add(&self.listener, LISTENER, EpollFlags::EPOLLIN)
            .map_err(DeviceError::host("waiting for clients"))?;
        if let Some(ports) = &self.ports {
            sources
                .add(ports, ANSWERS, EpollFlags::EPOLLIN)
                .map_err(DeviceError::host("waiting for the monitor"))?;
        }
        sources
            .add(self.timer_file(), TIMER, EpollFlags::EPOLLIN)
            .map_err(DeviceError::host("waiting for a timer"))
    }

    /// Drops all connections.
    pub fn stop(&mut self, sources: &Sources) {
        // Files that were not registered, because `start` failed, can't be removed.
        let _ = sources.remove(&self.listener);
        let _ = sources.remove(self.timer_file());
        if let Some(ports) = &self.ports {
            let _ = sources.remove(ports);
        }
        self.open_requests.forget_all();
        self.table.clear();
        self.resets.clear();
    }

    /// Serves the file that was registered with `token` and is ready.
    pub fn ready(&mut self, token: u32, sources: &Sources) -> Result<(), DeviceError> {
        match token {
            LISTENER => self.accept(sources),
            ANSWERS => self.take_answers(sources),
            TIMER => {
                let _ = self.timer.wait();
                self.sweep(sources)
            }
            _ => {
                let index = token as usize;
                if let Some(peer) = self.table.get(index) {
                    peer.ready();
                }
                self.service(index, sources)
            }
        }
    }

    fn accept(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        for _ in 0..CLIENTS_PER_EVENT {
            let stream = match socket::accept(&self.listener) {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                // This process has no free descriptor. The listener stays ready, so accepting is retried a
                // second later.
                Err(_) => {
                    sources
                        .modify(&self.listener, LISTENER, EpollFlags::empty())
                        .map_err(DeviceError::host("waiting for clients"))?;
                    self.listener_paused = true;
                    return self.set_timer();
                }
            };
            // Without room the client is refused by closing its socket.
            if let Some(index) = self.insert(Peer::client(stream), sources)? {
                self.service(index, sources)?;
            }
        }
        Ok(())
    }

    fn insert(&mut self, peer: Peer, sources: &Sources) -> Result<Option<usize>, DeviceError> {
        let Some((index, peer)) = self.table.insert(peer) else {
            return Ok(None);
        };
        sources
            .add(&peer.stream, index as u32, EpollFlags::EPOLLONESHOT)
            .map_err(DeviceError::host("waiting for a socket"))?;
        self.set_timer()?;
        Ok(Some(index))
    }

    /// Does the work for a peer that needs no receive buffer, and registers the next event that it waits for.
    fn service(&mut self, index: usize, sources: &Sources) -> Result<(), DeviceError> {
        let Some(peer) = self.table.get(index) else {
            return Ok(());
        };
        if let Phase::Handshake { line } = &mut peer.phase {
            match socket::read_first_line(&peer.stream, line) {
                FirstLine::Partial => {}
                FirstLine::Wrong => {
                    add(&self.metrics.refused, 1);
                    self.table.remove(index);
                }
                FirstLine::Connect(guest_port) => self.table.connect(index, guest_port),
            }
        }
        let Some(peer) = self.table.get(index) else {
            return Ok(());
        };
        let blocked = peer.forward();
        if peer.is_over() {
            self.table.remove(index);
            return Ok(());
        }
        if let Some(interest) = peer.interest(blocked) {
            sources
                .modify(&peer.stream, index as u32, interest)
                .map_err(DeviceError::host("waiting for a socket"))?;
        }
        if peer.has_packet() {
            self.table.queue(index);
        }
        Ok(())
    }

    /// Drops connections that did not open in time; accepts clients again.
    fn sweep(&mut self, sources: &Sources) -> Result<(), DeviceError> {
        let now = Instant::now();
        let mut pending = false;
        for (index, deadline) in self.table.deadlines() {
            if deadline <= now {
                self.refuse(index);
            } else {
                pending = true;
            }
        }
        self.timer_set = false;
        if std::mem::take(&mut self.listener_paused) {
            sources
                .modify(&self.listener, LISTENER, EpollFlags::EPOLLIN)
                .map_err(DeviceError::host("waiting for clients"))?;
        }
        if pending { self.set_timer() } else { Ok(()) }
    }

    fn set_timer(&mut self) -> Result<(), DeviceError> {
        if !self.timer_set {
            self.timer
                .reset(SWEEP_INTERVAL, None)
                .map_err(|error| DeviceError::host("setting a timer")(error.into()))?;
            self.timer_set = true;
        }
        Ok(())
    }

    fn timer_file(&self) -> BorrowedFd<'_> {
        // SAFETY: the file is the timer's, open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.timer.as_raw_fd()) }
    }
}
