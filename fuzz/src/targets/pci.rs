//! PCI configuration space, MSI-X and the virtio transport, before a device that checks what the transport
//! promises.

use std::io;
use std::sync::Arc;

use crate::guest::Guest;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use shard::bus::BusDevice;
use shard::interrupt::{Interrupts, Route, Wiring};
use shard::memory::GuestRam;
use shard::pci::PciBus;
use shard::virtio::transport::VirtioPci;
use shard::virtio::{Activation, DeviceError, VirtioDevice, VirtioId};
use virtio_queue::QueueT;
use vm_memory::GuestMemoryBackend;
use vmm_sys_util::eventfd::EventFd;

const WINDOW: u64 = 1 << 40;
const WINDOW_LOW: u64 = 0xC000_0000;
const WINDOW_BYTES: u64 = 1 << 20;
const FEATURES: u64 = 1 << 28 | 1 << 29 | 0x55;
const QUEUE_SIZES: [u16; 3] = [256, 64, 16];

/// Accepts every event file.
struct Board;

impl Wiring for Board {
    fn bind_interrupt(&self, _: &EventFd, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn unbind_interrupt(&self, _: &EventFd, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn raise(&self, fd: &EventFd, _: u32) {
        // A full counter is a raised interrupt, too.
        let _ = fd.write(1);
    }
    fn set_routes(&self, _: &[Route]) -> io::Result<()> {
        Ok(())
    }
    fn bind_doorbell(&self, _: &EventFd, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn unbind_doorbell(&self, _: &EventFd, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Checks that the transport keeps its contract.
#[derive(Default)]
struct Witness {
    running: Option<Activation>,
    memory: Option<GuestRam>,
}

impl VirtioDevice for Witness {
    fn id(&self) -> VirtioId {
        VirtioId::Block
    }
    fn features(&self) -> u64 {
        FEATURES
    }
    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(offset as u8);
    }
    fn activate(&mut self, activation: Activation) -> std::result::Result<(), DeviceError> {
        assert!(self.running.is_none(), "activated twice");
        assert_eq!(
            activation.features & !(FEATURES | 1 << 32),
            0,
            "features that were not offered"
        );
        assert!(activation.features & 1 << 32 != 0, "a driver of another version");
        for active in &activation.queues {
            assert!(
                active.queue.is_valid(&*activation.memory),
                "a queue that is not valid"
            );
            assert!(
                active.queue.size() <= QUEUE_SIZES[usize::from(active.index)],
                "a queue too large"
            );
        }
        assert!(activation.memory.num_regions() > 0);
        self.memory = Some(activation.memory.clone());
        activation.interrupt.signal_queue(0);
        activation.interrupt.signal_queue(u16::MAX);
        activation.interrupt.signal_config();
        self.running = Some(activation);
        Ok(())
    }
    fn reset(&mut self) {
        assert!(self.running.take().is_some(), "reset twice");
    }
}

/// An access: mostly of a register's size and inside the transport's regions.
fn access(u: &mut Unstructured, ways: &[Box<dyn BusDevice>]) -> Result<()> {
    let choice = u.arbitrary::<u8>()?;
    let way = &ways[usize::from(choice & 3)];
    let length = [1, 2, 4, 8, 1, 2, 4, 3][usize::from(choice >> 2 & 7)];
    let offset = match choice & 3 {
        // Configuration ports
        0 => u64::from(u.arbitrary::<u8>()? & 7),
        // ECAM, slot 1
        1 => 0x8000 * u64::from(u.arbitrary::<u8>()? % 3) + u64::from(u.arbitrary::<u16>()?) % 0x120,
        // The BAR's regions
        _ => {
            let region = u64::from(u.arbitrary::<u8>()? % 7);
            0x1000 * region + u64::from(u.arbitrary::<u8>()?) % 0x60
        }
    };
    if choice & 0x80 != 0 {
        way.write(offset, u.bytes(length)?);
    } else {
        way.read(offset, &mut [0; 8][..length]);
    }
    Ok(())
}

fn script(u: &mut Unstructured, ways: &[Box<dyn BusDevice>]) -> Result<()> {
    let bar = 0x0;
    let (window, ecam) = (&ways[2], &ways[1]);
    // Memory decoding and bus mastering on.
    ecam.write(0x8004, &6_u16.to_le_bytes());
    if u.ratio(1, 2)? {
        // A driver's start, from which the fuzzer goes on.
        window.write(bar + 0x14, &[1]);
        window.write(bar + 0x14, &[3]);
        window.write(bar + 0x08, &1_u32.to_le_bytes());
        window.write(bar + 0x0C, &1_u32.to_le_bytes());
        window.write(bar + 0x14, &[11]);
        for queue in 0..3_u16 {
            window.write(bar + 0x16, &queue.to_le_bytes());
            for (register, address) in [(0x20, 0_u64), (0x28, 0x1000), (0x30, 0x2000)] {
                let address = u64::from(queue) * 0x4000 + address;
                window.write(bar + register, &address.to_le_bytes());
            }
            window.write(bar + 0x1C, &1_u16.to_le_bytes());
        }
    }
    while !u.is_empty() {
        match u.arbitrary::<u8>()? {
            0 => window.write(bar + 0x14, &[15]),
            1 => window.write(bar + 0x14, &[0]),
            2 => ways[0].write(0, &(0x8000_0000 | u32::from(u.arbitrary::<u16>()?)).to_le_bytes()),
            _ => access(u, ways)?,
        }
    }
    Ok(())
}

pub fn fuzz(data: &[u8]) {
    let guest = Guest::new(0);
    let bus = PciBus::new(WINDOW..WINDOW + WINDOW_BYTES);
    let interrupts = Interrupts::new(Arc::new(Board));
    bus.add(|bar| {
        let device = Box::<Witness>::default();
        VirtioPci::new(
            device,
            "fuzz",
            guest.memory.clone(),
            &interrupts,
            Arc::new(|_: &str| {}),
            bar,
        )
    })
    .expect("room for a device");
    let ways: [Box<dyn BusDevice>; 4] = [
        Box::new(bus.config_ports()),
        Box::new(bus.ecam()),
        Box::new(bus.window()),
        Box::new(bus.window_at(WINDOW_LOW)),
    ];
    // The one error is that the bytes have ended.
    let _ = script(&mut Unstructured::new(data), &ways);
    let _ = bus.status();
    bus.stop();
}
