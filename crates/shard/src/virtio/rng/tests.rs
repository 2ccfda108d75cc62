use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::Rng;
use crate::sandbox::Threads;
use crate::virtio::device::RING_FEATURES;
use crate::virtio::test_driver::{DriverQueue, RecordedSignals, memory, wait};
use crate::virtio::{Activation, VirtioDevice, VirtioId};

fn active() -> (Rng, DriverQueue, Arc<RecordedSignals>, crate::memory::GuestRam) {
    let memory = memory();
    let queue = DriverQueue::new(&memory, 0);
    let signals = Arc::new(RecordedSignals::default());
    let mut rng = Rng::new(&Threads::sealed()).unwrap();
    rng.activate(Activation {
        memory: memory.clone(),
        features: 0,
        queues: vec![queue.active()],
        interrupt: signals.clone(),
        resumed: false,
    })
    .unwrap();
    (rng, queue, signals, memory)
}

#[test]
fn fills_a_buffer() {
    let (_rng, mut queue, _told, memory) = active();
    queue.add(&[(0x10_0000, 64)], true);
    assert_eq!(queue.take_used().unwrap().1, 64);
    let mut bytes = [0; 64];
    memory.read_slice(&mut bytes, GuestAddress(0x10_0000)).unwrap();
    assert_ne!(bytes, [0; 64]);
}

#[test]
fn a_huge_length_gets_a_bounded_amount() {
    let (_rng, mut queue, _told, _memory) = active();
    queue.add(&[(0x10_0000, u32::MAX)], true);
    assert_eq!(queue.take_used().unwrap().1, 4096);
}

#[test]
fn address_outside_memory_requests_a_reset() {
    let (_rng, mut queue, signals, _memory) = active();
    queue.add(&[(u64::MAX - 10, 64)], true);
    assert!(!signals.failure().is_empty());
}

#[test]
fn a_loop_ends() {
    let (_rng, mut queue, _told, _memory) = active();
    queue.descriptor(0, 0x10_0000, 16, 3, 0);
    queue.offer(0);
    assert!(queue.take_used().unwrap().1 <= 4096);
}

#[test]
fn entropy_source_has_one_queue_and_no_configuration() {
    let (rng, ..) = active();
    assert_eq!((rng.id(), rng.queue_sizes()), (VirtioId::Rng, &[64][..]));
    assert_eq!(rng.features(), RING_FEATURES);
    let mut config = [0xFF; 4];
    rng.read_config(0, &mut config);
    assert_eq!(config, [0; 4], "the device has no configuration");
}

#[test]
fn requests_and_their_bytes_are_counted() {
    let (rng, mut queue, ..) = active();
    queue.add(&[(0x10_0000, 64), (0x10_1000, 8)], true);
    assert_eq!(queue.take_used().unwrap().1, 72);
    queue.add(&[(0x10_0000, 16)], true);
    assert_eq!(queue.take_used().unwrap().1, 16);
    let counted = || (rng.status()["bytes"] == 88).then(|| rng.status()["requests"].clone());
    assert_eq!(wait(counted), Some(2.into()));
}

#[test]
fn a_reset_device_leaves_requests_alone() {
    let (mut rng, mut queue, _told, memory) = active();
    rng.reset();
    queue.add(&[(0x10_0000, 64)], true);
    std::thread::sleep(std::time::Duration::from_millis(50));
    let used: u16 = memory.read_obj(GuestAddress(0x4002)).unwrap();
    assert_eq!(used, 0);
}
