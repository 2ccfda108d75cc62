//! Tests of requests of a malicious driver.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::driver::*;
use crate::virtio::VirtioDevice;

const IOERR: u8 = 1;

fn driver() -> (tempfile::TempDir, Driver) {
    let directory = tempfile::tempdir().unwrap();
    let path = numbered(directory.path(), 64);
    (directory, Driver::new(raw_store(&path, false), false, 1, 0))
}

/// Checks that the device requested a reset and works again after it.
fn assert_reset(driver: &mut Driver, why: &str) {
    let start = std::time::Instant::now();
    let reason = loop {
        if let Some(reason) = driver.line.needs_reset.lock().unwrap().take() {
            break reason;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "no request for a reset");
        std::thread::yield_now();
    };
    assert!(reason.contains(why), "{reason}");
    driver.block.reset();
    driver.activate(1, 0);
    driver.assert_works();
}

#[test]
fn loop_of_descriptors_requests_a_reset() {
    let (_directory, mut driver) = driver();
    driver.descriptor(rings(0), 0, writable(DATA, 512), 3, 1);
    driver.descriptor(rings(0), 1, writable(DATA, 512), 3, 0);
    driver.avail(0, 0, 0);
    driver.notify(0);
    assert_reset(&mut driver, "loop");
}

#[test]
fn next_descriptor_outside_the_table_requests_a_reset() {
    let (_directory, mut driver) = driver();
    driver.descriptor(rings(0), 0, writable(DATA, 512), 3, 0xffff);
    driver.avail(0, 0, 0);
    driver.notify(0);
    assert_reset(&mut driver, "leaves its table");
}

#[test]
fn invalid_indirect_table_requests_a_reset() {
    let (_directory, mut driver) = driver();
    for (address, length) in [(u64::MAX - 15, 64), (0x5000, 17), (1 << 40, 1 << 20)] {
        driver.descriptor(rings(0), 0, readable(address, length), 4, 0);
        driver.avail(0, driver.available(0), 0);
        driver.notify(0);
        assert_reset(&mut driver, "leaves its table");
    }
}

#[test]
fn chain_without_a_status_requests_a_reset() {
    let (_directory, mut driver) = driver();
    driver.header(HEADER, 0, 0);
    driver.offer(0, &[readable(HEADER, 16), readable(DATA, 512)]);
    driver.notify(0);
    assert_reset(&mut driver, "status");
}

#[test]
fn readable_after_writable_requests_a_reset() {
    let (_directory, mut driver) = driver();
    driver.header(HEADER, 0, 0);
    driver.offer(
        0,
        &[
            readable(HEADER, 16),
            writable(DATA, 512),
            readable(DATA, 512),
            writable(STATUS, 1),
        ],
    );
    driver.notify(0);
    assert_reset(&mut driver, "follows");
}

#[test]
fn available_index_out_of_range_requests_a_reset() {
    let (_directory, mut driver) = driver();
    driver
        .memory
        .write_obj(5000_u16, GuestAddress(rings(0) + 0x4002))
        .unwrap();
    driver.notify(0);
    assert_reset(&mut driver, "");
}

#[test]
fn addresses_outside_memory_fail_alone() {
    let (_directory, mut driver) = driver();
    for address in [
        MEMORY_BYTES as u64,
        MEMORY_BYTES as u64 - 100,
        HIGH - 512,
        u64::MAX - 511,
        u64::MAX - 3,
    ] {
        assert_eq!(driver.request(0, 0, &[writable(address, 512)]), IOERR);
        assert_eq!(driver.request(1, 0, &[readable(address, 512)]), IOERR);
        assert_eq!(driver.request(8, 0, &[writable(address, 512)]), IOERR);
        driver.assert_works();
    }
}

#[test]
fn header_short_or_outside_memory_fails_alone() {
    let (_directory, mut driver) = driver();
    for header in [
        readable(HEADER, 15),
        readable(HEADER, 0),
        readable(u64::MAX - 7, 16),
        readable(1 << 50, 16),
    ] {
        driver.put(STATUS, &[0xff]);
        driver.offer(0, &[header, writable(STATUS, 1)]);
        driver.notify(0);
        assert!(driver.wait(0));
        assert_eq!(driver.bytes(STATUS, 1), [IOERR]);
        driver.assert_works();
    }
}

#[test]
fn status_outside_memory_is_ignored() {
    let (_directory, mut driver) = driver();
    driver.header(HEADER, 0, 0);
    driver.offer(
        0,
        &[readable(HEADER, 16), writable(DATA, 512), writable(1 << 50, 1)],
    );
    driver.notify(0);
    assert!(driver.wait(0));
    driver.assert_works();
}

#[test]
fn thousands_of_buffers_fail_without_being_kept() {
    let (_directory, mut driver) = driver();
    driver.header(HEADER, 0, 0);
    let table = DATA;
    let count = 60_000_u16;
    driver.descriptor(table, 0, readable(HEADER, 16), 1, 1);
    for index in 1..count {
        driver.descriptor(table, index, writable(0x3000, 1), 3, index + 1);
    }
    driver.descriptor(table, count, writable(STATUS, 1), 2, 0);
    driver.descriptor(rings(0), 0, readable(table, (u32::from(count) + 1) * 16), 4, 0);
    driver.put(STATUS, &[0xff]);
    driver.avail(0, 0, 0);
    driver.notify(0);
    assert!(driver.wait(0));
    assert_eq!(driver.bytes(STATUS, 1), [IOERR]);
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..MEMORY_BYTES as u64,
        2 => Just(HEADER),
        1 => (MEMORY_BYTES as u64 - 64)..MEMORY_BYTES as u64 + 64,
        1 => rings(0)..rings(0) + 0x9000,
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn random_descriptors_never_stop_the_process_or_the_reset(
        descriptors in prop::collection::vec(
            (address(), prop_oneof![0_u32..2000, any::<u32>()], 0_u16..8, 0_u16..20),
            1..16,
        ),
        heads in prop::collection::vec(prop_oneof![9 => 0_u16..16, 1 => any::<u16>()], 1..20),
        kind in prop_oneof![0_u32..14, any::<u32>()],
        sector in prop_oneof![0_u64..70, any::<u64>()],
    ) {
        let (_directory, mut driver) = driver();
        driver.header(HEADER, kind, sector);
        for (index, (address, length, flags, next)) in descriptors.iter().enumerate() {
            let buffer = readable(*address, *length);
            driver.descriptor(rings(0), index as u16, buffer, *flags, *next);
        }
        for head in &heads {
            driver.avail(0, driver.available(0), *head);
        }
        driver.notify(0);
        std::thread::sleep(std::time::Duration::from_millis(2));
        driver.block.reset();
        // The disk may have been written; the device must work.
        driver.activate(1, 0);
        prop_assert_eq!(driver.request(0, 5, &[writable(DATA, 512)]), 0);
    }
}
