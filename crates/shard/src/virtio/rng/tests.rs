use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::Rng;
use crate::sandbox::Threads;
use crate::virtio::test_driver::{DriverQueue, Told, memory};
use crate::virtio::{Activation, VirtioDevice};

fn active() -> (Rng, DriverQueue, Arc<Told>, crate::memory::GuestRam) {
    let memory = memory();
    let queue = DriverQueue::new(&memory, 0);
    let told = Arc::new(Told::default());
    let mut rng = Rng::new(&Threads::sealed()).unwrap();
    rng.activate(Activation {
        memory: memory.clone(),
        features: 0,
        queues: vec![queue.active()],
        interrupt: told.clone(),
        resumed: false,
    })
    .unwrap();
    (rng, queue, told, memory)
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
fn a_wild_address_asks_for_a_reset() {
    let (_rng, mut queue, told, _memory) = active();
    queue.add(&[(u64::MAX - 10, 64)], true);
    assert!(!told.failure().is_empty());
}

#[test]
fn a_loop_ends() {
    let (_rng, mut queue, _told, _memory) = active();
    queue.descriptor(0, 0x10_0000, 16, 3, 0);
    queue.offer(0);
    assert!(queue.take_used().unwrap().1 <= 4096);
}
