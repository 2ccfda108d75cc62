//! Moves bytes between a TLS connection and a socket of this host.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustls::Connection;

/// Number of bytes moved at once.
const CHUNK_BYTES: usize = 64 << 10;
/// Time limit for the other side to close as well.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts the thread. It ends with either side, after it has forwarded the received bytes.
pub fn start(tls: Connection, tcp: Arc<TcpStream>, local: UnixStream) -> io::Result<()> {
    tcp.set_nonblocking(true)?;
    local.set_nonblocking(true)?;
    std::thread::Builder::new().name("tls".into()).spawn(move || {
        let mut pump = Forwarder {
            tls,
            tcp,
            local,
            inward: Vec::new(),
            passed: 0,
            far_ended: false,
            near_ended: false,
        };
        // In any case both sides see the end.
        let _ = pump.run();
        let _ = pump.local.shutdown(Shutdown::Both);
        pump.part();
    })?;
    Ok(())
}

struct Forwarder {
    tls: Connection,
    tcp: Arc<TcpStream>,
    local: UnixStream,
    /// Received bytes for this side, and the number already forwarded.
    inward: Vec<u8>,
    passed: usize,
    far_ended: bool,
    near_ended: bool,
}

impl Forwarder {
    fn run(&mut self) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            while self.tls.wants_write() && moved(self.tls.write_tls(&mut &*self.tcp))?.is_some() {}
            self.pass_inward(&mut chunk)?;
            if self.far_ended && self.inward.is_empty() || self.near_ended && !self.tls.wants_write() {
                return Ok(());
            }
            let (network, socket) = self.wait()?;
            if network
                && !self.far_ended
                && let Some(count) = moved(self.tls.read_tls(&mut &*self.tcp))?
            {
                self.far_ended |= count == 0;
                self.tls.process_new_packets().map_err(io::Error::other)?;
            }
            if socket && let Some(count) = moved(self.local.read(&mut chunk))? {
                if count == 0 {
                    self.near_ended = true;
                    self.tls.send_close_notify();
                }
                self.tls.writer().write_all(&chunk[..count])?;
            }
        }
    }

    /// Ends the connection once the other side has, or after a time limit: closed with unread input, it would
    /// lose the sent bytes.
    fn part(&mut self) {
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        let _ = self.tcp.shutdown(Shutdown::Write);
        let _ = self.tcp.set_nonblocking(false);
        let _ = self.tcp.set_read_timeout(Some(CLOSE_TIMEOUT));
        let mut chunk = [0; 4096];
        while Instant::now() < deadline && (&*self.tcp).read(&mut chunk).is_ok_and(|count| count > 0) {}
    }

    /// Forwards decrypted bytes, as far as the socket has room.
    fn pass_inward(&mut self, chunk: &mut [u8]) -> io::Result<()> {
        loop {
            if self.inward.is_empty() {
                match self.tls.reader().read(chunk) {
                    Ok(0) => self.far_ended = true,
                    Ok(count) => self.inward.extend_from_slice(&chunk[..count]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    // The connection was cut without a TLS close.
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => self.far_ended = true,
                    Err(error) => return Err(error),
                }
                if self.inward.is_empty() {
                    return Ok(());
                }
            }
            match moved(self.local.write(&self.inward[self.passed..]))? {
                Some(count) => self.passed += count,
                None => return Ok(()),
            }
            if self.passed == self.inward.len() {
                self.inward.clear();
                self.passed = 0;
            }
        }
    }

    /// Waits until a side is ready. Returns whether the network and the socket have bytes to read.
    fn wait(&self) -> io::Result<(bool, bool)> {
        let mut network = PollFlags::empty();
        // Back-pressure: no reads from one side while the other can't take the bytes.
        network.set(PollFlags::POLLIN, self.inward.is_empty() && !self.far_ended);
        network.set(PollFlags::POLLOUT, self.tls.wants_write());
        let mut socket = PollFlags::empty();
        socket.set(PollFlags::POLLIN, !self.tls.wants_write() && !self.near_ended);
        socket.set(PollFlags::POLLOUT, !self.inward.is_empty());
        // A side without pending work is not polled: its end would wake this thread without need.
        let mut polled: Vec<PollFd> = [(self.tcp.as_fd(), network), (self.local.as_fd(), socket)]
            .into_iter()
            .filter(|(_, wanted)| !wanted.is_empty())
            .map(|(fd, wanted)| PollFd::new(fd, wanted))
            .collect();
        match poll(&mut polled, PollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => return Ok((false, false)),
            result => result?,
        };
        // Reading or writing reports errors.
        let can_read = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
        let mut ready = polled
            .iter()
            .map(|polled| polled.revents().is_none_or(|events| events.intersects(can_read)));
        let mut readable = |wanted: PollFlags| {
            !wanted.is_empty() && ready.next() == Some(true) && wanted.contains(PollFlags::POLLIN)
        };
        let network = readable(network);
        Ok((network, readable(socket)))
    }
}

/// Returns the number of moved bytes; none if the operation would block.
fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
