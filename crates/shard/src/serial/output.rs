//! The ring between the guest's writes and the monitor's socket.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_sys_util::eventfd::EventFd;

use super::ConsoleCounters;
use super::panic_text::PanicText;
use crate::ending::EndSignal;

/// Size of the ring, bytes: some screens of kernel messages.
const RING_BYTES: usize = 64 << 10;

/// The ring, into which the UART writes.
pub struct Output {
    ring: VecDeque<u8>,
    ready: EventFd,
    counters: Arc<ConsoleCounters>,
    panic_text: PanicText,
    end: Arc<EndSignal>,
}

impl Output {
    pub fn new(ready: EventFd, counters: Arc<ConsoleCounters>, end: Arc<EndSignal>) -> Self {
        Self {
            ring: VecDeque::new(),
            ready,
            counters,
            panic_text: PanicText::default(),
            end,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// Returns the oldest contiguous bytes.
    pub fn front(&self) -> &[u8] {
        self.ring.as_slices().0
    }

    pub fn consume(&mut self, bytes: usize) {
        self.ring.drain(..bytes.min(self.ring.len()));
    }
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.counters
            .written
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        for &byte in bytes {
            if self.panic_text.push(byte) {
                self.end.panicked();
            }
            if self.ring.len() == RING_BYTES {
                self.counters.dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            if self.ring.is_empty() {
                self.ready.write(1)?;
            }
            self.ring.push_back(byte);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
