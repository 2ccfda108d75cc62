use std::io;
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use super::config::{BAR0, COMMAND, COMMAND_MEMORY, ConfigSpace, Identity};
use super::{BAR_BYTES, PciBus, PciFunction, SLOTS};
use crate::bus::BusDevice;

const START: u64 = 4 << 30;
const IDENTITY: Identity = Identity {
    vendor: 0x1AF4,
    device: 0x1044,
    revision: 1,
    class: 0xFF_00_00,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// Answers every read with its number; a write to its BAR runs `written`.
struct Probe<F> {
    config: ConfigSpace,
    number: u8,
    written: F,
}

impl<F: FnMut() + Send> PciFunction for Probe<F> {
    fn read_config(&mut self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
    }
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
    }
    fn decoded(&self) -> Option<u64> {
        self.config.decoded()
    }
    fn read_bar(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(self.number);
    }
    fn write_bar(&mut self, _offset: u64, _data: &[u8]) {
        (self.written)();
    }
    fn status(&self) -> Value {
        Value::from(self.number)
    }
    fn save(&self) -> io::Result<Value> {
        Ok(Value::Null)
    }

    fn restore(&mut self, _state: &Value) -> io::Result<()> {
        Ok(())
    }

    fn stop(&mut self) {}
}

fn add(bus: &PciBus, number: u8, written: impl FnMut() + Send + 'static) -> std::io::Result<()> {
    bus.add(|bar| {
        let mut config = ConfigSpace::new(IDENTITY);
        config.set_bar(bar, BAR_BYTES);
        Ok(Probe {
            config,
            number,
            written,
        })
    })
    .map(drop)
}

fn enable(bus: &PciBus, slot: u64) {
    let at = slot * 0x8000 + COMMAND as u64;
    bus.ecam().write(at, &COMMAND_MEMORY.to_le_bytes());
}

fn read(bus: &PciBus, address: u64) -> u8 {
    let mut data = [0];
    bus.window().read(address - START, &mut data);
    data[0]
}

#[test]
fn a_function_answers_at_its_bar_once_enabled_and_nowhere_else() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    assert_eq!(read(&bus, START), 0xFF);
    enable(&bus, 1);
    assert_eq!((read(&bus, START), read(&bus, START + BAR_BYTES - 1)), (7, 7));
    assert_eq!(read(&bus, START + BAR_BYTES), 0xFF);
}

#[test]
fn a_moved_bar_answers_at_its_new_place_alone() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    enable(&bus, 1);
    let target = START + 16 * BAR_BYTES;
    bus.ecam()
        .write(0x8000 + BAR0 as u64, &(target as u32).to_le_bytes());
    assert_eq!((read(&bus, START), read(&bus, target)), (0xFF, 7));
    bus.ecam().write(0x8000 + COMMAND as u64, &[0, 0]);
    assert_eq!(read(&bus, target), 0xFF);
}

#[test]
fn ports_and_ecam_show_the_same_function_and_absent_ones_as_ones() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    let ports = bus.config_ports();
    for (slot, expected) in [(1u32, 0x1044_1AF4u32), (2, u32::MAX)] {
        ports.write(0, &(1 << 31 | slot << 11).to_le_bytes());
        let (mut by_port, mut by_ecam) = ([0; 4], [0; 4]);
        ports.read(4, &mut by_port);
        bus.ecam().read(u64::from(slot) * 0x8000, &mut by_ecam);
        assert_eq!(
            (u32::from_le_bytes(by_port), u32::from_le_bytes(by_ecam)),
            (expected, expected)
        );
    }
    // Other functions of a device, other buses, and an address that is not enabled.
    for address in [1 << 31 | 1 << 11 | 1 << 8, 1 << 31 | 1 << 16 | 1 << 11, 1 << 11] {
        ports.write(0, &u32::to_le_bytes(address));
        let mut data = [0; 4];
        ports.read(4, &mut data);
        assert_eq!(data, [0xFF; 4], "{address:#x}");
    }
}

#[test]
fn a_sized_bar_tells_its_size() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    bus.ecam().write(0x8000 + BAR0 as u64, &[0xFF; 8]);
    let mut size = [0; 8];
    bus.ecam().read(0x8000 + BAR0 as u64, &mut size);
    assert_eq!(!(u64::from_le_bytes(size) & !0xF) + 1, BAR_BYTES);
}

#[test]
fn the_bus_and_the_window_have_ends() {
    let bus = PciBus::new(START..START + (1 << 30));
    for number in 1..SLOTS {
        add(&bus, number as u8, || ()).unwrap();
    }
    assert!(add(&bus, 0, || ()).is_err());
    let small = PciBus::new(START..START + BAR_BYTES);
    add(&small, 1, || ()).unwrap();
    assert!(add(&small, 2, || ()).is_err());
}

#[test]
fn a_function_that_waits_holds_up_no_other() {
    let bus = PciBus::new(START..START + (1 << 30));
    let (entered, is_entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    add(&bus, 1, move || {
        entered.send(()).unwrap();
        let _ = released.recv();
    })
    .unwrap();
    add(&bus, 2, || ()).unwrap();
    enable(&bus, 1);
    enable(&bus, 2);
    let slow = bus.clone();
    let waiting = std::thread::spawn(move || slow.window().write(0, &[0]));
    is_entered.recv().unwrap();

    let (answer, answered) = mpsc::channel();
    let other = bus.clone();
    std::thread::spawn(move || answer.send(read(&other, START + BAR_BYTES)));
    let value = answered.recv_timeout(Duration::from_secs(5));
    release.send(()).unwrap();
    waiting.join().unwrap();
    assert_eq!(value, Ok(2));
}
