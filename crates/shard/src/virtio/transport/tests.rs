mod migration;

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use vmm_sys_util::eventfd::EventFd;

use super::registers::*;
use super::{DEVICE, ISR, NOTIFY, PENDING, TABLE, VirtioPci};
use crate::bus::BusDevice;
use crate::interrupt::{Interrupts, Message, Route, Wiring};
use crate::pci::PciBus;
use crate::virtio::test_driver::memory;
use crate::virtio::{Activation, DeviceError, VirtioDevice, VirtioId};

const START: u64 = 4 << 30;
const CONFIG: u64 = 0x8000;
const COMMAND: u64 = CONFIG + 4;
const BAR: u64 = CONFIG + 0x10;
const FEATURE: u64 = 1 << 3;

/// Mock of KVM that records its calls.
#[derive(Default)]
struct Mock {
    interrupts: Mutex<Vec<(u32, EventFd)>>,
    routes: Mutex<Vec<Route>>,
    doorbells: Mutex<BTreeSet<u64>>,
    refuse_doorbells: AtomicBool,
}

impl Wiring for Mock {
    fn bind_interrupt(&self, fd: &EventFd, gsi: u32) -> io::Result<()> {
        self.interrupts.lock().unwrap().push((gsi, fd.try_clone()?));
        Ok(())
    }
    fn unbind_interrupt(&self, _fd: &EventFd, _gsi: u32) -> io::Result<()> {
        Ok(())
    }
    fn raise(&self, fd: &EventFd, _gsi: u32) {
        fd.write(1).unwrap();
    }
    fn set_routes(&self, routes: &[Route]) -> io::Result<()> {
        *self.routes.lock().unwrap() = routes.to_vec();
        Ok(())
    }
    fn bind_doorbell(&self, _fd: &EventFd, address: u64) -> io::Result<()> {
        if self.refuse_doorbells.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        assert!(self.doorbells.lock().unwrap().insert(address), "bound twice");
        Ok(())
    }
    fn unbind_doorbell(&self, _fd: &EventFd, address: u64) -> io::Result<()> {
        self.doorbells.lock().unwrap().remove(&address);
        Ok(())
    }
}

impl Mock {
    /// Returns how often vector `index` was delivered since the last call.
    fn delivered(&self, index: usize) -> u64 {
        self.interrupts.lock().unwrap()[index].1.read().unwrap_or(0)
    }
}

#[derive(Default)]
struct Seen {
    activation: Mutex<Option<Activation>>,
    resets: Mutex<u32>,
}

/// A device with two queues and one feature.
struct Fake(Arc<Seen>);

impl VirtioDevice for Fake {
    fn id(&self) -> VirtioId {
        VirtioId::Rng
    }
    fn features(&self) -> u64 {
        FEATURE
    }
    fn queue_sizes(&self) -> &[u16] {
        &[64, 16]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill((offset as u8).wrapping_add(0x40));
    }
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let before = self.0.activation.lock().unwrap().replace(activation);
        assert!(before.is_none(), "activated twice");
        Ok(())
    }
    fn reset(&mut self) {
        assert!(self.0.activation.lock().unwrap().take().is_some());
        *self.0.resets.lock().unwrap() += 1;
    }
}

struct Driver {
    bus: PciBus,
    mock: Arc<Mock>,
    seen: Arc<Seen>,
    log: Arc<Mutex<Vec<String>>>,
}

fn driver() -> Driver {
    let (mock, seen) = (Arc::new(Mock::default()), Arc::new(Seen::default()));
    let interrupts = Interrupts::new(mock.clone());
    let bus = PciBus::new(START..START + (1 << 30));
    let log = Arc::new(Mutex::new(Vec::new()));
    let lines = log.clone();
    let logger: super::Log = Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_owned()));
    let device = Box::new(Fake(seen.clone()));
    bus.add(|bar| VirtioPci::new(device, "fake", memory(), &interrupts, logger, bar))
        .unwrap();
    bus.ecam().write(COMMAND, &[2, 0]);
    Driver { bus, mock, seen, log }
}

impl Driver {
    fn read(&self, offset: u64, bytes: usize) -> u64 {
        let mut data = [0; 8];
        self.bus.window().read(offset, &mut data[..bytes]);
        u64::from_le_bytes(data)
    }
    fn write(&self, offset: u64, value: u64, bytes: usize) {
        self.bus.window().write(offset, &value.to_le_bytes()[..bytes]);
    }
    fn status(&self) -> u64 {
        self.read(STATUS as u64, 1)
    }
    fn set_status(&self, value: u64) {
        self.write(STATUS as u64, value, 1);
    }
    fn accept(&self, features: u64) {
        for half in 0..2 {
            self.write(DRIVER_FEATURE_SELECT as u64, half, 4);
            self.write(DRIVER_FEATURE as u64, features >> (32 * half) & 0xFFFF_FFFF, 4);
        }
    }
    fn queue(&self, index: u64, size: u64, rings: u64) {
        self.write(QUEUE_SELECT as u64, index, 2);
        self.write(QUEUE_SIZE as u64, size, 2);
        self.write(QUEUE_DESCRIPTORS as u64, rings, 8);
        self.write(QUEUE_DRIVER as u64, rings + 0x2000, 8);
        self.write(QUEUE_DEVICE as u64, rings + 0x4000, 8);
        self.write(QUEUE_ENABLE as u64, 1, 2);
    }
    /// Performs the initialization up to FEATURES_OK.
    fn negotiate(&self) {
        self.set_status(1);
        self.set_status(3);
        self.accept(1 << 32 | FEATURE);
        self.set_status(0xB);
    }
    fn start(&self) {
        self.negotiate();
        self.queue(0, 32, 0x1_0000);
        self.set_status(0xF);
    }
    fn command(&self, value: u16) {
        self.bus.ecam().write(COMMAND, &value.to_le_bytes());
    }
    /// Returns the offset of the capability with this id, and this virtio type if it is a virtio one.
    fn capability(&self, id: u8, kind: Option<u8>) -> u64 {
        let byte = |at: u64| {
            let mut data = [0];
            self.bus.ecam().read(CONFIG + at, &mut data);
            data[0]
        };
        let mut at = u64::from(byte(0x34));
        while byte(at) != id || kind.is_some_and(|kind| byte(at + 3) != kind) {
            at = u64::from(byte(at + 1));
            assert_ne!(at, 0, "no such capability");
        }
        CONFIG + at
    }
    fn msix_control(&self, value: u16) {
        let at = self.capability(0x11, None) + 2;
        self.bus.ecam().write(at, &value.to_le_bytes());
    }
    fn vector(&self, index: u64, data: u64, masked: u64) {
        self.write(TABLE + 16 * index, 0xFEE0_0000, 8);
        self.write(TABLE + 16 * index + 8, data | masked << 32, 8);
    }
    fn interrupt(&self) -> Arc<dyn crate::virtio::Interrupt> {
        self.seen
            .activation
            .lock()
            .unwrap()
            .as_ref()
            .unwrap()
            .interrupt
            .clone()
    }
}

#[test]
fn a_driver_in_order_activates_the_enabled_queues() {
    let driver = driver();
    driver.start();
    assert_eq!(driver.status(), 0xF);
    let seen = driver.seen.activation.lock().unwrap();
    let activation = seen.as_ref().unwrap();
    assert_eq!(activation.features, 1 << 32 | FEATURE);
    let queues: Vec<_> = activation.queues.iter().map(|queue| queue.index).collect();
    assert_eq!(queues, [0]);
    assert_eq!(virtio_queue::QueueT::size(&activation.queues[0].queue), 32);
}

#[test]
fn status_bits_out_of_order_are_not_taken() {
    let driver = driver();
    for (written, read) in [(2, 0), (4, 0), (8, 0), (1, 1), (9, 1), (3, 3), (7, 3)] {
        driver.set_status(written);
        assert_eq!(driver.status(), read, "after writing {written}");
    }
    assert!(driver.seen.activation.lock().unwrap().is_none());
}

#[test]
fn features_not_offered_and_a_legacy_driver_are_refused() {
    for features in [1 << 32 | 1 << 4, FEATURE, 0, 1 << 32 | 1 << 63] {
        let driver = driver();
        driver.set_status(3);
        driver.accept(features);
        driver.set_status(0xB);
        assert_eq!(driver.status(), 3, "{features:#x}");
    }
}

#[test]
fn agreed_features_and_enabled_queues_do_not_change() {
    let driver = driver();
    driver.start();
    driver.accept(0);
    driver.queue(0, 4, 0x2_0000);
    assert_eq!(driver.read(DRIVER_FEATURE as u64, 4), 1);
    assert_eq!(driver.read(QUEUE_SIZE as u64, 2), 32);
    assert_eq!(driver.read(QUEUE_DESCRIPTORS as u64, 8), 0x1_0000);
}

#[test]
fn a_queue_size_too_large_or_no_power_of_two_is_ignored() {
    let driver = driver();
    for size in [0, 3, 128, 0xFFFF] {
        driver.write(QUEUE_SIZE as u64, size, 2);
        assert_eq!(driver.read(QUEUE_SIZE as u64, 2), 64, "{size}");
    }
    driver.write(QUEUE_SELECT as u64, 2, 2);
    assert_eq!(
        driver.read(QUEUE_SIZE as u64, 2),
        0,
        "a queue that does not exist"
    );
}

#[test]
fn rings_outside_memory_request_a_reset_which_recovers() {
    let driver = driver();
    driver.negotiate();
    driver.queue(0, 32, 1 << 40);
    driver.set_status(0xF);
    assert_eq!(driver.status(), 0x4F);
    assert!(driver.log.lock().unwrap()[0].contains("queue 0"));
    driver.set_status(0);
    assert_eq!((driver.status(), *driver.seen.resets.lock().unwrap()), (0, 0));
    driver.start();
    assert_eq!(driver.status(), 0xF);
}

#[test]
fn reset_takes_the_queues_back_and_clears_all_state() {
    let driver = driver();
    driver.start();
    driver.write(CONFIG_VECTOR as u64, 1, 2);
    driver.set_status(0);
    assert_eq!(*driver.seen.resets.lock().unwrap(), 1);
    assert_eq!(driver.read(QUEUE_ENABLE as u64, 2), 0);
    assert_eq!(driver.read(QUEUE_SIZE as u64, 2), 64);
    assert_eq!(driver.read(CONFIG_VECTOR as u64, 2), u64::from(NO_VECTOR));
    assert_eq!(driver.read(DRIVER_FEATURE as u64, 4), 0);
}

#[test]
fn doorbells_follow_the_bar() {
    let driver = driver();
    let bound = |start: u64| {
        driver
            .mock
            .doorbells
            .lock()
            .unwrap()
            .iter()
            .copied()
            .eq([start + NOTIFY, start + NOTIFY + 4])
    };
    assert!(bound(START));
    driver.command(0);
    assert!(driver.mock.doorbells.lock().unwrap().is_empty());
    driver
        .bus
        .ecam()
        .write(BAR, &(START as u32 + 0x8_0000).to_le_bytes());
    driver.command(2);
    assert!(bound(START + 0x8_0000));
}

#[test]
fn a_refused_doorbell_takes_the_slow_path() {
    let driver = driver();
    driver.command(0);
    driver.mock.refuse_doorbells.store(true, Ordering::SeqCst);
    driver.command(2);
    driver.start();
    driver.write(NOTIFY, 0, 2);
    driver.write(NOTIFY + 4 * 2, 2, 2);
    let seen = driver.seen.activation.lock().unwrap();
    assert_eq!(seen.as_ref().unwrap().queues[0].notify.read().unwrap(), 1);
    assert!(driver.log.lock().unwrap()[0].contains("slow path"));
}

#[test]
fn a_masked_vector_is_pending_until_unmasked() {
    let driver = driver();
    driver.start();
    driver.msix_control(1 << 15);
    driver.write(QUEUE_VECTOR as u64, 1, 2);
    driver.vector(1, 0x41, 1);
    driver.interrupt().signal_queue(0);
    assert_eq!((driver.mock.delivered(1), driver.read(PENDING, 1)), (0, 2));
    driver.vector(1, 0x42, 0);
    assert_eq!((driver.mock.delivered(1), driver.read(PENDING, 1)), (1, 0));
    let gsi = driver.mock.interrupts.lock().unwrap()[1].0;
    let message = Message {
        address: 0xFEE0_0000,
        data: 0x42,
    };
    assert!(
        driver
            .mock
            .routes
            .lock()
            .unwrap()
            .contains(&Route::Message { gsi, message })
    );
}

#[test]
fn a_masked_function_holds_every_vector_back() {
    let driver = driver();
    driver.start();
    driver.write(QUEUE_VECTOR as u64, 1, 2);
    driver.vector(1, 0x41, 0);
    for control in [0, 1 << 15 | 1 << 14] {
        driver.msix_control(control);
        driver.interrupt().signal_queue(0);
        assert_eq!(driver.mock.delivered(1), 0, "{control:#x}");
    }
    driver.msix_control(1 << 15);
    assert_eq!(driver.mock.delivered(1), 1);
}

#[test]
fn a_vector_that_does_not_exist_reads_back_as_none() {
    let driver = driver();
    driver.write(CONFIG_VECTOR as u64, 3, 2);
    assert_eq!(driver.read(CONFIG_VECTOR as u64, 2), u64::from(NO_VECTOR));
    driver.write(QUEUE_VECTOR as u64, 2, 2);
    assert_eq!(driver.read(QUEUE_VECTOR as u64, 2), 2);
}

#[test]
fn configuration_change_interrupts_the_driver_and_is_numbered() {
    let driver = driver();
    driver.start();
    let before = driver.read(GENERATION as u64, 1);
    driver.interrupt().signal_config();
    assert_ne!(driver.read(GENERATION as u64, 1), before);
    assert_eq!((driver.read(ISR, 1), driver.read(ISR, 1)), (2, 0));
}

#[test]
fn the_bar_is_reached_through_configuration_space() {
    let driver = driver();
    let at = driver.capability(9, Some(5));
    let ecam = driver.bus.ecam();
    ecam.write(at + 8, &(DEVICE as u32 + 2).to_le_bytes());
    ecam.write(at + 12, &1u32.to_le_bytes());
    let mut data = [0];
    ecam.read(at + 16, &mut data);
    assert_eq!(data, [0x42]);
    ecam.write(at + 8, &(STATUS as u32).to_le_bytes());
    ecam.write(at + 16, &[1]);
    assert_eq!(driver.status(), 1);
}

/// Returns a started driver with interrupts: configuration changes by vector 0, queue 0 by vector 1.
fn started_with_interrupts() -> Driver {
    let driver = driver();
    driver.start();
    driver.msix_control(1 << 15);
    driver.write(CONFIG_VECTOR as u64, 0, 2);
    driver.write(QUEUE_VECTOR as u64, 1, 2);
    driver.vector(0, 0x41, 0);
    driver.vector(1, 0x42, 0);
    driver
}

#[test]
fn requested_reset_is_logged_with_its_cause() {
    let driver = started_with_interrupts();
    let error = DeviceError::Host {
        what: "cannot do it",
        source: io::Error::other("no room"),
    };
    driver.interrupt().needs_reset(&error);
    assert_eq!(driver.mock.delivered(0), 1, "the driver receives an interrupt");
    let log = driver.log.lock().unwrap();
    assert_eq!(
        log[..],
        ["fake: stopped until the guest resets it: cannot do it: no room"]
    );
}

#[test]
fn entries_of_the_vector_table_keep_their_message_and_mask_only() {
    let driver = driver();
    driver.msix_control(1 << 15);
    driver.write(TABLE, 0x1234_5678_FEE0_1000, 8);
    driver.write(TABLE + 8, 0xFFFF_FFFE_0000_0041, 8);
    assert_eq!(driver.read(TABLE, 8), 0x1234_5678_FEE0_1000);
    assert_eq!(
        driver.read(TABLE + 8, 8),
        0x41,
        "unmasked; the rest of the word is reserved"
    );
    let gsi = driver.mock.interrupts.lock().unwrap()[0].0;
    let message = Message {
        address: 0x1234_5678_FEE0_1000,
        data: 0x41,
    };
    let expected = Route::Message { gsi, message };
    assert!(driver.mock.routes.lock().unwrap().contains(&expected));
    // Two queues and configuration changes: three vectors, and nothing after them.
    assert_eq!(driver.read(TABLE + 2 * 16 + 12, 4), 1);
    assert_eq!(driver.read(TABLE + 3 * 16 + 12, 4), 0);
    driver.write(TABLE + 3 * 16, u64::MAX, 8);
    assert_eq!(driver.read(TABLE + 3 * 16, 8), 0);
}

/// Target of an access.
#[derive(Clone, Debug)]
struct Access {
    way: u8,
    offset: u64,
    bytes: usize,
    write: Option<u64>,
}

fn access() -> impl Strategy<Value = Access> {
    let near = prop_oneof![
        0u64..0x100,
        0x8000u64..0x8110,
        0u64..0x7000,
        Just(0xFFF),
        Just(0x4FFC),
        any::<u64>()
    ];
    (0u8..3, near, 1usize..=8, any::<Option<u64>>()).prop_map(|(way, offset, bytes, write)| Access {
        way,
        offset,
        bytes,
        write,
    })
}

proptest! {
    #[test]
    fn no_access_panics_or_reaches_past_its_buffer(accesses in prop::collection::vec(access(), 1..200)) {
        let driver = driver();
        let ways: [Box<dyn BusDevice>; 3] = [
            Box::new(driver.bus.config_ports()),
            Box::new(driver.bus.ecam()),
            Box::new(driver.bus.window()),
        ];
        for access in accesses {
            let way = &ways[usize::from(access.way)];
            match access.write {
                Some(value) => way.write(access.offset, &value.to_le_bytes()[..access.bytes]),
                None => way.read(access.offset, &mut [0; 8][..access.bytes]),
            }
        }
    }
}
