//! The console's thread: moves bytes between the UART and the monitor's socket until it is stopped.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmm_sys_util::eventfd::EventFd;

use super::Console;

/// Time limit for the last output to reach the monitor after the end of the VM.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// Runs until `stop` is written. Then sends the remaining output, as far as the monitor reads it.
///
/// `socket` must be nonblocking. If the monitor closes its end, output is dropped and counted.
pub fn pump(console: &Console, socket: File, stop: &EventFd) {
    Pump {
        console,
        socket,
        connected: true,
    }
    .run(stop);
}

struct Pump<'a> {
    console: &'a Console,
    socket: File,
    connected: bool,
}

fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor belongs to `event`, which outlives the borrow.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

impl Pump<'_> {
    fn run(mut self, stop: &EventFd) {
        loop {
            let mut interest = PollFlags::empty();
            interest.set(PollFlags::POLLIN, self.console.input_room() > 0);
            interest.set(PollFlags::POLLOUT, !self.console.uart().writer().is_empty());
            let mut files = vec![
                PollFd::new(borrow(stop), PollFlags::POLLIN),
                PollFd::new(borrow(&self.console.ready), PollFlags::POLLIN),
                PollFd::new(borrow(&self.console.room), PollFlags::POLLIN),
            ];
            if self.connected {
                files.push(PollFd::new(self.socket.as_fd(), interest));
            }
            match poll(&mut files, PollTimeout::NONE) {
                Ok(_) | Err(nix::Error::EINTR) => (),
                // Poll fails only for lack of memory: the console stops, and the VM continues.
                Err(_) => return,
            }
            let ready = |index: usize| files.get(index).and_then(|file| file.any()).unwrap_or(false);
            let (stopped, socket) = (ready(0), ready(3));
            let gone = PollFlags::POLLHUP | PollFlags::POLLERR;
            let gone = files
                .get(3)
                .and_then(|file| file.revents())
                .is_some_and(|told| told.intersects(gone));
            let _ = self.console.ready.read();
            let _ = self.console.room.read();
            if gone && self.console.input_room() == 0 {
                // No further input can be accepted, and waiting for room in the guest's buffer would spin.
                self.connected = false;
            } else if socket {
                self.receive();
            }
            self.send();
            if stopped {
                self.drain();
                return;
            }
        }
    }

    fn receive(&mut self) {
        let room = self.console.input_room();
        let mut buffer = [0; 64];
        let take = room.min(buffer.len());
        if take == 0 {
            return;
        }
        match self.socket.read(&mut buffer[..take]) {
            Ok(0) => self.connected = false,
            // Only this thread adds input, so the room can only have grown. In loopback mode the UART accepts
            // none, like an unplugged cable.
            Ok(bytes) => _ = self.console.input(&buffer[..bytes]),
            Err(error) if retry(&error) => (),
            Err(_) => self.connected = false,
        }
    }

    /// Writes as many bytes as the socket accepts without blocking.
    fn send(&mut self) {
        let mut chunk = [0; 4096];
        loop {
            let bytes = {
                let uart = self.console.uart();
                let front = uart.writer().front();
                let bytes = front.len().min(chunk.len());
                chunk[..bytes].copy_from_slice(&front[..bytes]);
                bytes
            };
            if bytes == 0 {
                return;
            }
            // The vCPUs only append, so the front still has the copied bytes.
            let done = if self.connected {
                self.socket.write(&chunk[..bytes])
            } else {
                Ok(bytes)
            };
            match done {
                Ok(done) => {
                    self.console.uart().writer_mut().consume(done);
                    if !self.connected {
                        let dropped = &self.console.counters.dropped;
                        dropped.fetch_add(done as u64, Ordering::Relaxed);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.connected = false,
            }
        }
    }

    fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while self.connected && !self.console.uart().writer().is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let mut files = [PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT)];
            let _ = poll(
                &mut files,
                PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO),
            );
            self.send();
        }
    }
}

fn retry(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
    )
}
