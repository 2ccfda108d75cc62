//! Tests of a device's state that is restored in the same device of another VM.

use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::test_driver::DriverQueue;

#[test]
fn restored_device_continues_as_its_driver_left_it() {
    let (before, after) = (started_with_interrupts(), driver());
    let target = START + 8 * crate::pci::BAR_BYTES;
    before.bus.ecam().write(BAR, &(target as u32).to_le_bytes());
    after.bus.restore(&before.bus.save().unwrap()).unwrap();
    let read = |register: usize| {
        let mut data = [0; 2];
        after
            .bus
            .window()
            .read(target - START + register as u64, &mut data);
        u16::from_le_bytes(data)
    };
    assert_eq!(read(STATUS) & 0xFF, 0xF);
    assert_eq!(
        (read(QUEUE_SIZE), read(QUEUE_ENABLE), read(QUEUE_VECTOR)),
        (32, 1, 1)
    );
    assert_eq!(read(CONFIG_VECTOR), 0);
    {
        let seen = after.seen.activation.lock().unwrap();
        let activation = seen.as_ref().unwrap();
        assert!(activation.resumed);
        assert_eq!(activation.features, 1 << 32 | FEATURE);
        let [active] = &activation.queues[..] else {
            panic!("one queue is enabled");
        };
        assert_eq!((active.index, active.queue.size()), (0, 32));
        // No state contains notifications in flight: both sides check again.
        assert_eq!(active.notify.read().unwrap(), 1);
    }
    assert_eq!((after.mock.delivered(0), after.mock.delivered(1)), (0, 1));
    after.interrupt().signal_config();
    assert_eq!(after.mock.delivered(0), 1);
    assert!(after.mock.doorbells.lock().unwrap().contains(&(target + NOTIFY)));
}

#[test]
fn restored_device_that_had_not_started_waits_for_its_driver() {
    let (before, after) = (driver(), driver());
    before.negotiate();
    before.queue(1, 8, 0x1_0000);
    after.bus.restore(&before.bus.save().unwrap()).unwrap();
    assert!(after.seen.activation.lock().unwrap().is_none());
    assert_eq!(after.read(QUEUE_SELECT as u64, 2), 1);
    assert_eq!(after.read(QUEUE_SIZE as u64, 2), 8);
    after.set_status(0xF);
    let seen = after.seen.activation.lock().unwrap();
    let activation = seen.as_ref().unwrap();
    assert!(!activation.resumed);
    assert_eq!(activation.queues[0].index, 1);
}

#[test]
fn restored_device_that_requested_a_reset_still_requests_it() {
    let (before, after) = (started_with_interrupts(), driver());
    before
        .interrupt()
        .needs_reset(&DeviceError::Protocol("test".to_owned()));
    assert_eq!(before.status(), 0x4F);
    after.bus.restore(&before.bus.save().unwrap()).unwrap();
    assert!(after.seen.activation.lock().unwrap().is_none());
}

#[test]
fn a_state_of_another_device_is_refused() {
    let refused = |spoil: fn(&mut serde_json::Value)| {
        let (before, after) = (started_with_interrupts(), driver());
        let mut states = before.bus.save().unwrap();
        spoil(&mut states[1]);
        let refused = after.bus.restore(&states).is_err();
        assert!(!refused || after.seen.activation.lock().unwrap().is_none());
        refused
    };
    assert!(!refused(|_| ()));
    assert!(refused(|state| state["accepted"] = (1_u64 << 40).into()));
    assert!(refused(|state| _ = state["queues"].as_array_mut().unwrap().pop()));
    for size in [0, 3, 128] {
        let refused = match size {
            0 => refused(|state| state["queues"][0]["size"] = 0.into()),
            3 => refused(|state| state["queues"][0]["size"] = 3.into()),
            _ => refused(|state| state["queues"][0]["size"] = 128.into()),
        };
        assert!(refused, "{size}");
    }
    assert!(refused(|state| *state = serde_json::Value::Null));
}

#[test]
fn queue_continues_after_the_last_completed_request() {
    let memory = memory();
    let mut active = DriverQueue::new(&memory, 0).active();
    memory.write_obj(5_u16, GuestAddress(0x4002)).unwrap();
    super::super::state::resume_queue(&mut active, 0x4000, &memory).unwrap();
    assert_eq!((active.queue.next_avail(), active.queue.next_used()), (5, 5));
    assert!(super::super::state::resume_queue(&mut active, 8 << 20, &memory).is_err());
}
