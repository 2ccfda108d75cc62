use std::io;
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

use super::config::{BAR0, COMMAND, COMMAND_MEMORY, CONFIG_BYTES, ConfigSpace, Identity};
use super::{BAR_BYTES, PciBus, PciFunction, SLOTS, Slot};
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

/// Returns its number for every read; a write to its BAR runs `written`.
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
    // Other functions of a device, other buses, and a disabled address.
    for address in [1 << 31 | 1 << 11 | 1 << 8, 1 << 31 | 1 << 16 | 1 << 11, 1 << 11] {
        ports.write(0, &u32::to_le_bytes(address));
        let mut data = [0; 4];
        ports.read(4, &mut data);
        assert_eq!(data, [0xFF; 4], "{address:#x}");
    }
}

#[test]
fn bar_reports_its_size_when_sized() {
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
fn function_that_blocks_does_not_block_others() {
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

#[test]
fn data_ports_access_the_bytes_of_the_selected_register() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    let ports = bus.config_ports();
    let select = |register: u32| ports.write(0, &(1 << 31 | 1 << 11 | register).to_le_bytes());
    let byte = |offset| {
        let mut data = [0];
        ports.read(offset, &mut data);
        data[0]
    };
    select(0);
    assert_eq!([4, 5, 6, 7].map(byte), [0xF4, 0x1A, 0x44, 0x10]);
    select(0x08);
    assert_eq!([4, 5, 6, 7].map(byte), [1, 0, 0, 0xFF], "revision and class");
    let mut address = [0; 4];
    ports.read(0, &mut address);
    assert_eq!(u32::from_le_bytes(address), 1 << 31 | 1 << 11 | 0x08);
    // An access that leaves the data ports, and parts of the address register.
    let mut wide = [0; 4];
    ports.read(6, &mut wide);
    assert_eq!((wide, byte(0)), ([0xFF; 4], 0xFF));
    select(0x3C);
    ports.write(6, &[0x55; 4]);
    ports.write(4, &[0x77]);
    assert_eq!(
        [4, 5].map(byte),
        [0x77, 0],
        "the interrupt line is writable, its pin is not"
    );
    ports.write(0, &[0; 2]);
    assert_eq!(byte(4), 0x77, "the address register takes four bytes only");
}

#[test]
fn ecam_reaches_the_last_register_of_function_0_only() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    let ecam = bus.ecam();
    let read = |offset| {
        let mut data = [0x11; 4];
        ecam.read(offset, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(read(0x8000 + 0xFFC), 0, "extended space without a capability");
    assert_eq!(
        read(0x8000 + 0xFFE),
        u32::MAX,
        "the access crosses into function 1"
    );
    assert_eq!(read(0x8000 + 0x1000), u32::MAX, "function 1");
    ecam.write(0x8000 + 0x1000 + COMMAND as u64, &COMMAND_MEMORY.to_le_bytes());
    assert_eq!(
        self::read(&bus, START),
        0xFF,
        "function 1 has no command register"
    );
}

#[test]
fn window_offsets_count_from_its_own_start() {
    let bus = PciBus::new(START..START + (1 << 30));
    add(&bus, 7, || ()).unwrap();
    enable(&bus, 1);
    let low = bus.window_at(START - 0x1000);
    let mut data = [0];
    low.read(0x1000, &mut data);
    assert_eq!(data, [7]);
    low.read(0xFFF, &mut data);
    assert_eq!(data, [0xFF]);
    bus.window_at(u64::MAX).read(1, &mut data);
    assert_eq!(data, [0xFF], "past the last address");
}

#[test]
fn functions_get_rising_slots_and_report_their_counters_in_that_order() {
    let bus = PciBus::new(START..START + (1 << 30));
    let make = |number| {
        move |bar| {
            let mut config = ConfigSpace::new(IDENTITY);
            config.set_bar(bar, BAR_BYTES);
            Ok(Probe {
                config,
                number,
                written: || (),
            })
        }
    };
    assert_eq!(bus.add(make(5)).unwrap(), Slot(1));
    assert_eq!(bus.add(make(6)).unwrap(), Slot(2));
    assert_eq!(bus.status(), serde_json::json!([5, 6]));
}

#[test]
fn a_restored_bus_has_the_host_bridges_registers_and_no_other_number_of_functions() {
    let bridge_line = 0x3C;
    let (before, after) = (
        PciBus::new(START..START + (1 << 30)),
        PciBus::new(START..START + (1 << 30)),
    );
    before.ecam().write(bridge_line, &[0x5A]);
    let saved = before.save().unwrap();
    after.restore(&saved).unwrap();
    let mut data = [0];
    after.ecam().read(bridge_line, &mut data);
    assert_eq!(data, [0x5A]);
    add(&after, 7, || ()).unwrap();
    assert!(after.restore(&saved).is_err());
}

#[test]
fn the_host_bridge_answers_in_configuration_space_only() {
    let mut bridge = super::host_bridge::HostBridge::new();
    let mut identity = [0; 4];
    bridge.read_config(0, &mut identity);
    assert_eq!(u32::from_le_bytes(identity), 0x0D57_8086);
    bridge.write_config(COMMAND, &COMMAND_MEMORY.to_le_bytes());
    assert_eq!((bridge.decoded(), bridge.status()), (None, Value::Null));
    let mut data = [0];
    bridge.read_bar(0, &mut data);
    assert_eq!(data, [0xFF]);
}

#[test]
fn capabilities_form_a_list_that_ends_with_the_space() {
    let mut space = ConfigSpace::new(IDENTITY);
    let byte = |space: &ConfigSpace, offset: usize| space.u16(offset) as u8;
    assert_eq!(byte(&space, 0x06) & 0x10, 0, "no list yet");
    assert_eq!(space.add_capability(9, &[1, 2, 3], &[]), Some(0x40));
    assert_eq!(space.add_capability(0x11, &[4], &[0x0F]), Some(0x48));
    assert_eq!(byte(&space, 0x06) & 0x10, 0x10);
    assert_eq!(
        (byte(&space, 0x34), byte(&space, 0x41), byte(&space, 0x49)),
        (0x40, 0x48, 0)
    );
    space.write(0x40, &[0xFF; 12]);
    let mut list = [0; 12];
    space.read(0x40, &mut list);
    assert_eq!(list, [9, 0x48, 1, 2, 3, 0, 0, 0, 0x11, 0, 0x0F, 0]);
    assert_eq!(
        space.add_capability(1, &[0], &[0, 0]),
        None,
        "a mask longer than its body"
    );
    // 0x4C to the end, less id and link.
    let rest = vec![0; CONFIG_BYTES - 0x4C - 2];
    assert_eq!(space.add_capability(2, &[&rest[..], &[0]].concat(), &[]), None);
    assert_eq!(space.add_capability(2, &rest, &[]), Some(0x4C));
    assert_eq!(space.add_capability(3, &[], &[]), None);
}

#[test]
fn a_bar_is_decoded_where_it_is_while_memory_is_enabled() {
    let mut space = ConfigSpace::new(IDENTITY);
    space.write(COMMAND, &COMMAND_MEMORY.to_le_bytes());
    assert_eq!(space.decoded(), None, "there is no BAR");
    space.set_bar(START, 0x1000);
    assert_eq!((space.bar(), space.decoded()), (START, Some(START)));
    space.write(BAR0, &[0xFF; 8]);
    assert_eq!(space.decoded(), None, "the BAR would end past the last address");
    space.write(BAR0, &(START + 0x3000).to_le_bytes());
    assert_eq!(space.decoded(), Some(START + 0x3000));
    space.write(COMMAND, &[0, 0]);
    assert_eq!(space.decoded(), None);
    assert_eq!(space.bar(), START + 0x3000);
}
