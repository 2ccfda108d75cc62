//! The IOAPIC of a VM that spans cells, on the home's bus.

use std::sync::{Arc, Mutex, MutexGuard};

use apic::{Interrupt, IoApic, Shorthand};
use locks::IgnorePoison;

use super::router::Router;
use crate::bus::BusDevice;

/// IOAPIC as a device of the bus.
pub struct IoApicDevice {
    chip: Mutex<IoApic>,
    router: Arc<Router>,
}

impl IoApicDevice {
    /// Creates an IOAPIC that sends its interrupts through `router`.
    pub fn new(router: Arc<Router>) -> Self {
        Self {
            chip: Mutex::new(IoApic::new()),
            router,
        }
    }

    /// Signals an edge on a pin. All lines of devices here are edge-triggered, as the ACPI tables state, so
    /// no line stays asserted.
    pub fn pulse(&self, pin: u8) {
        self.set_line(pin, true);
        self.set_line(pin, false);
    }

    /// Asserts or deasserts the line of a pin.
    fn set_line(&self, pin: u8, is_high: bool) {
        let sent = self.chip().set_line(pin, is_high);
        self.send(sent);
    }

    pub(super) fn end_of_interrupt(&self, vector: u8) {
        let sent = self.chip().end_of_interrupt(vector);
        self.send(sent);
    }

    fn send(&self, interrupts: impl IntoIterator<Item = Interrupt>) {
        for interrupt in interrupts {
            self.router.interrupt(&interrupt, Shorthand::None, None);
        }
    }

    fn chip(&self) -> MutexGuard<'_, IoApic> {
        self.chip.lock().ignore_poison()
    }
}

impl BusDevice for IoApicDevice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = self.chip().read(offset).to_le_bytes();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Ok(data) = <[u8; 4]>::try_from(data) {
            let sent = self.chip().write(offset, u32::from_le_bytes(data));
            self.send(sent);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::super::device_proxy_server::{IO_REQUESTS_MAX, IoRequest};
    use super::*;

    const PIN: u8 = 5;
    const VECTOR: u8 = 0x40;
    const LEVEL: u32 = 1 << 15;
    const MASKED: u32 = 1 << 16;

    struct Home {
        ioapic: Arc<IoApicDevice>,
        router: Arc<Router>,
        io_requests: mpsc::Receiver<IoRequest>,
    }

    impl Home {
        fn new() -> Self {
            let (submitter, io_requests) = mpsc::sync_channel(IO_REQUESTS_MAX);
            let router = Arc::new(Router::new(0, &[0], vec![None], Some(submitter)));
            let ioapic = Arc::new(IoApicDevice::new(router.clone()));
            Self {
                ioapic,
                router,
                io_requests,
            }
        }

        /// Writes the lower half of the pin's redirection entry, as the guest does.
        fn set_entry(&self, bits: u32) {
            self.ioapic
                .write(0x00, &(0x10 + 2 * u32::from(PIN)).to_le_bytes());
            self.ioapic.write(0x10, &(u32::from(VECTOR) | bits).to_le_bytes());
        }

        /// Takes the pending interrupts of the vCPU: their vectors, and whether they are level-triggered.
        fn taken(&self) -> Vec<(u8, bool)> {
            let mut taken = Vec::new();
            let events = self.router.event_slot(0).expect("the vCPU's").take();
            events
                .signals
                .interrupts(|vector, level| taken.push((vector, level)));
            taken
        }

        /// Ends the interrupt of the vCPU, and performs the resulting request as the device proxy server
        /// does.
        fn end_of_interrupt(&self) {
            self.router.end_of_interrupt(VECTOR);
            while let Ok(request) = self.io_requests.try_recv() {
                let IoRequest::EndOfInterrupt { vector } = request else {
                    panic!("{request:?}");
                };
                self.ioapic.end_of_interrupt(vector);
            }
        }
    }

    #[test]
    fn asserted_level_line_is_redelivered_after_unmask_and_eoi() {
        let home = Home::new();
        home.set_entry(LEVEL | MASKED);
        home.ioapic.set_line(PIN, true);
        assert!(home.taken().is_empty());
        home.set_entry(LEVEL);
        assert_eq!(home.taken(), [(VECTOR, true)], "it waited for the unmask");
        home.ioapic.set_line(PIN, true);
        assert!(home.taken().is_empty(), "it is in service");
        for _ in 0..2 {
            home.end_of_interrupt();
            assert_eq!(home.taken(), [(VECTOR, true)], "the line is still held");
        }
        home.ioapic.set_line(PIN, false);
        home.end_of_interrupt();
        assert!(home.taken().is_empty());
        home.ioapic.set_line(PIN, true);
        assert_eq!(home.taken(), [(VECTOR, true)]);
    }

    #[test]
    fn pulse_delivers_exactly_one_interrupt_edge_or_level() {
        for (bits, is_level) in [(0, false), (LEVEL, true)] {
            let home = Home::new();
            home.set_entry(bits);
            for _ in 0..2 {
                home.ioapic.pulse(PIN);
                assert_eq!(home.taken(), [(VECTOR, is_level)]);
                if is_level {
                    home.end_of_interrupt();
                    assert!(home.taken().is_empty());
                }
            }
        }
    }
}
