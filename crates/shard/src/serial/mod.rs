//! The serial console: a 16550A on COM1 ([`Console`]), whose bytes are moved over a socket of the monitor
//! ([`pump`]).
//!
//! Output passes through a ring, so that a vCPU never waits for the monitor. Bytes that do not fit are
//! dropped and counted. Input stays in the socket until the guest has room for it, so none is lost.

mod output;
mod panic_text;
mod pump;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use locks::IgnorePoison;
use serde::{Deserialize, Serialize};
use vm_superio::serial::{SerialEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bus::BusDevice;
use crate::ending::EndSignal;
use output::Output;
pub use pump::pump;

/// Number of COM1's ports.
pub const SERIAL_PORTS: u64 = 8;

/// Bytes that passed or were lost at the console; relaxed, read by any thread.
#[derive(Debug, Default)]
pub struct ConsoleCounters {
    /// Bytes that the guest wrote.
    pub written: AtomicU64,
    /// Bytes dropped because the monitor did not read them.
    pub dropped: AtomicU64,
    /// Bytes that the guest received.
    pub received: AtomicU64,
}

/// Registers of the chip, and input that the guest has not read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UartState {
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line: [u8; 2],
    modem: [u8; 2],
    scratch: u8,
    input: Vec<u8>,
}

/// The console device, shared by the vCPUs and the pump.
pub struct Console {
    uart: Mutex<Serial<Line, Room, Output>>,
    interrupt: EventFd,
    room: EventFd,
    ready: EventFd,
    counters: Arc<ConsoleCounters>,
}

/// COM1's interrupt line.
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Wakes the pump when the guest has emptied its input buffer.
struct Room(EventFd);

impl SerialEvents for Room {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        let _ = self.0.write(1);
    }
}

impl Console {
    /// Creates an empty console. `end` receives a signal when the guest's kernel prints a panic.
    pub fn new(end: Arc<EndSignal>) -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK);
        let (interrupt, room, ready) = (event()?, event()?, event()?);
        let counters = Arc::new(ConsoleCounters::default());
        let output = Output::new(ready.try_clone()?, counters.clone(), end);
        let uart = Serial::with_events(Line(interrupt.try_clone()?), Room(room.try_clone()?), output);
        Ok(Self {
            uart: Mutex::new(uart),
            interrupt,
            room,
            ready,
            counters,
        })
    }

    /// Returns the chip's registers. The VM is paused.
    pub fn save(&self) -> UartState {
        let state = self.uart().state();
        UartState {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line: [state.line_control, state.line_status],
            modem: [state.modem_control, state.modem_status],
            scratch: state.scratch,
            input: state.in_buffer,
        }
    }

    /// Restores the chip's state from another VM's; nothing runs yet.
    pub fn restore(&self, saved: &UartState, end: Arc<EndSignal>) -> io::Result<()> {
        let state = SerialState {
            baud_divisor_low: saved.divisor[0],
            baud_divisor_high: saved.divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line[0],
            line_status: saved.line[1],
            modem_control: saved.modem[0],
            modem_status: saved.modem[1],
            scratch: saved.scratch,
            in_buffer: saved.input.clone(),
        };
        let output = Output::new(self.ready.try_clone()?, self.counters.clone(), end);
        let (line, room) = (Line(self.interrupt.try_clone()?), Room(self.room.try_clone()?));
        let uart = Serial::from_state(&state, line, room, output).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "the saved console holds too much input",
            )
        })?;
        *self.uart() = uart;
        Ok(())
    }

    /// Returns the event file to register as irqfd.
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Returns the counters.
    pub fn counters(&self) -> &ConsoleCounters {
        &self.counters
    }

    fn uart(&self) -> MutexGuard<'_, Serial<Line, Room, Output>> {
        // A panic elsewhere can't break an invariant of the device.
        self.uart.lock().ignore_poison()
    }

    /// Returns the free room of the guest's input buffer, bytes.
    fn input_room(&self) -> usize {
        self.uart().fifo_capacity()
    }

    /// Puts input into the guest's buffer and returns the number of accepted bytes.
    fn input(&self, bytes: &[u8]) -> usize {
        // An error is a full buffer, or an interrupt that is pending already.
        let taken = self.uart().enqueue_raw_bytes(bytes).unwrap_or(0);
        self.counters.received.fetch_add(taken as u64, Ordering::Relaxed);
        taken
    }
}

impl BusDevice for Console {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let [byte] = data {
            *byte = self.uart().read(offset as u8);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let &[byte] = data {
            // Output never fails; an interrupt that can't be raised is pending already.
            let _ = self.uart().write(offset as u8, byte);
        }
    }
}
