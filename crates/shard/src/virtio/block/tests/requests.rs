//! Tests of requests of a well-behaved driver.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use diskstore::disk::{DiskRequest, Mode, assemble, open};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::driver::*;
use crate::launch::DiskLimit;
use crate::virtio::{VirtioDevice, VirtioId};

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
const SECTORS: usize = 4096;

/// Writes, zeroes, discards, flushes and reads back.
fn exercise(driver: &mut Driver) {
    driver.put(DATA, &[0xaa; 8192]);
    assert_eq!(
        driver.request(
            VIRTIO_BLK_T_OUT,
            16,
            &[readable(DATA, 4096), readable(DATA + 4096, 4096)]
        ),
        OK
    );
    assert_eq!(driver.last_filled(0), 1);
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, &[]), OK);
    let range = [
        &20_u64.to_le_bytes()[..],
        &4_u32.to_le_bytes(),
        &0_u32.to_le_bytes(),
    ]
    .concat();
    driver.put(DATA, &range);
    assert_eq!(
        driver.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[readable(DATA, 16)]),
        OK
    );
    let range = [
        &800_u64.to_le_bytes()[..],
        &64_u32.to_le_bytes(),
        &0_u32.to_le_bytes(),
    ]
    .concat();
    driver.put(DATA, &range);
    assert_eq!(driver.request(VIRTIO_BLK_T_DISCARD, 0, &[readable(DATA, 16)]), OK);
    // Into both regions of memory.
    let status = driver.request(
        VIRTIO_BLK_T_IN,
        15,
        &[writable(DATA, 1024), writable(HIGH + 512, 8704)],
    );
    assert_eq!(status, OK);
    assert_eq!(driver.last_filled(0), 1024 + 8704 + 1);
    let bytes = [driver.bytes(DATA, 1024), driver.bytes(HIGH + 512, 8704)].concat();
    for (place, byte) in bytes.iter().enumerate() {
        let expected = match 15 + place / 512 {
            20..24 => 0,
            16..32 => 0xaa,
            sector => sector as u8,
        };
        assert_eq!(*byte, expected, "sector {}", 15 + place / 512);
    }
}

#[test]
fn raw_disk_serves_every_request_kind() {
    for without in [0, NO_EVENT_IDX, NO_FLUSH] {
        let directory = tempfile::tempdir().unwrap();
        let path = numbered(directory.path(), SECTORS);
        let mut driver = Driver::new(raw_store(&path, false), false, 1, without);
        exercise(&mut driver);
        assert_eq!(std::fs::read(&path).unwrap()[16 * 512], 0xaa);
    }
}

#[test]
fn private_disks_serve_every_request_kind() {
    for persistent in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = numbered(directory.path(), SECTORS);
        let disk = open(&DiskRequest {
            path: path.clone(),
            format: None,
            mode: Mode::Private,
            persistent,
            read_only: false,
            overlay_path: Some(directory.path().join("own")),
            scratch_dir: directory.path().to_owned(),
            vm_name: "vm".to_owned(),
            below: None,
        })
        .unwrap();
        let layers = disk
            .layers
            .into_iter()
            .map(|layer| (layer.file, layer.format))
            .collect();
        let mut driver = Driver::new(assemble(layers, false).unwrap(), false, 1, 0);
        exercise(&mut driver);
        assert_eq!(
            std::fs::read(&path).unwrap()[16 * 512],
            16,
            "the base was written"
        );
    }
}

/// Both queues have one limit: of 30 requests 10 come at once, and each further one earns the next.
#[test]
fn queues_of_a_limited_disk_wait_and_every_request_is_served() {
    const REQUESTS: u32 = 15;
    let directory = tempfile::tempdir().unwrap();
    let path = numbered(directory.path(), SECTORS);
    let mut driver = Driver::new(raw_store(&path, false), false, 2, 0);
    let limiter = driver.block.limiter().unwrap();
    limiter.set(DiskLimit {
        bytes: None,
        requests: Some(100),
    });
    let start = Instant::now();
    driver.header(HEADER, VIRTIO_BLK_T_IN, 7);
    for queue in 0..2 {
        let into = DATA + u64::from(queue) * 512;
        for _ in 0..REQUESTS {
            let chain = [readable(HEADER, 16), writable(into, 512), writable(STATUS, 1)];
            driver.offer(queue, &chain);
        }
        driver.notify(queue);
    }
    assert!(driver.wait(0) && driver.wait(1));
    // 10 at once, one by the last token, and the rest earned; more is a busy machine's.
    assert!(
        start.elapsed() >= Duration::from_millis(190),
        "{:?}",
        start.elapsed()
    );
    assert!(limiter.waits() > 0);
    assert_eq!(driver.bytes(DATA, 1024), [7; 1024]);
    // Without the limit, and after a reset at the limit, the disk serves on.
    driver.offer(
        0,
        &[readable(HEADER, 16), writable(DATA, 512), writable(STATUS, 1)],
    );
    limiter.set(DiskLimit {
        bytes: Some(1),
        requests: None,
    });
    driver.notify(0);
    driver.block.reset();
    limiter.set(DiskLimit::default());
    driver.activate(2, 0);
    let waits = limiter.waits();
    driver.assert_works();
    assert_eq!(limiter.waits(), waits);
}

#[test]
fn name_is_the_serial() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(raw_store(&numbered(directory.path(), 8), false), false, 1, 0);
    assert_eq!(driver.request(VIRTIO_BLK_T_GET_ID, 0, &[writable(DATA, 20)]), OK);
    assert_eq!(driver.bytes(DATA, 20), b"serial-number\0\0\0\0\0\0\0");
    assert_eq!(driver.last_filled(0), 21);
}

#[test]
fn framing_is_the_drivers_choice() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(raw_store(&numbered(directory.path(), 64), false), false, 1, 0);
    // The header in three pieces; the data and the status in one buffer.
    driver.header(HEADER, VIRTIO_BLK_T_IN, 7);
    let header = [
        readable(HEADER, 3),
        readable(HEADER + 3, 0),
        readable(HEADER + 3, 9),
        readable(HEADER + 12, 4),
    ];
    driver.offer(0, &[&header[..], &[writable(DATA, 513)]].concat());
    driver.notify(0);
    assert!(driver.wait(0));
    assert_eq!(driver.bytes(DATA, 513), [&[7; 512][..], &[OK]].concat());
    // The header and the data in one buffer.
    driver.header(DATA, VIRTIO_BLK_T_OUT, 3);
    driver.put(DATA + 16, &[0x55; 512]);
    driver.offer(0, &[readable(DATA, 528), writable(STATUS, 1)]);
    driver.notify(0);
    assert!(driver.wait(0));
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 3, &[writable(DATA, 512)]), OK);
    assert_eq!(driver.bytes(DATA, 512), [0x55; 512]);
}

#[test]
fn indirect_descriptors_are_followed() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(raw_store(&numbered(directory.path(), 64), false), false, 1, 0);
    driver.header(HEADER, VIRTIO_BLK_T_IN, 9);
    let table = 0x5000;
    driver.descriptor(table, 0, readable(HEADER, 16), 1, 1);
    driver.descriptor(table, 1, writable(DATA, 512), 3, 2);
    driver.descriptor(table, 2, writable(STATUS, 1), 2, 0);
    driver.descriptor(rings(0), 0, readable(table, 48), 4, 0);
    driver.avail(0, 0, 0);
    driver.notify(0);
    assert!(driver.wait(0));
    assert_eq!(driver.bytes(DATA, 512), [9; 512]);
}

#[test]
fn read_only_disk_refuses_writes_and_announces_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(raw_store(&numbered(directory.path(), 64), true), true, 1, 0);
    assert_eq!(driver.block.features() >> 5 & 1, 1);
    for kind in [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        assert_eq!(driver.request(kind, 0, &[readable(DATA, 512)]), IOERR);
    }
    driver.assert_works();
}

#[test]
fn requests_outside_the_disk_fail_alone() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(raw_store(&numbered(directory.path(), 64), false), false, 1, 0);
    for (sector, bytes) in [
        (64, 512),
        (63, 1024),
        (u64::MAX, 512),
        (1 << 55, 512),
        (0, 0),
        (0, 100),
        (0, 513),
    ] {
        assert_eq!(
            driver.request(VIRTIO_BLK_T_IN, sector, &[writable(DATA, bytes)]),
            IOERR
        );
        assert_eq!(
            driver.request(VIRTIO_BLK_T_OUT, sector, &[readable(DATA, bytes)]),
            IOERR
        );
        driver.assert_works();
    }
    for (sector, sectors, flags, expected) in [
        (0_u64, 65_u32, 0_u32, IOERR),
        (64, 1, 0, IOERR),
        (u64::MAX, 1, 0, IOERR),
        (0, 0, 0, IOERR),
        (0, u32::MAX, 0, IOERR),
        (0, 1, 2, UNSUPP),
    ] {
        let range = [
            &sector.to_le_bytes()[..],
            &sectors.to_le_bytes(),
            &flags.to_le_bytes(),
        ]
        .concat();
        driver.put(DATA, &range);
        assert_eq!(
            driver.request(VIRTIO_BLK_T_DISCARD, 0, &[readable(DATA, 16)]),
            expected
        );
        driver.put(DATA, &range);
        assert_eq!(
            driver.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[readable(DATA, 16)]),
            expected
        );
    }
    assert_eq!(
        driver.request(VIRTIO_BLK_T_DISCARD, 0, &[readable(DATA, 15)]),
        IOERR
    );
    assert_eq!(
        driver.request(VIRTIO_BLK_T_DISCARD, 0, &[readable(DATA, 32)]),
        IOERR
    );
    assert_eq!(driver.request(77, 0, &[writable(DATA, 512)]), UNSUPP);
    driver.assert_works();
}

#[test]
fn full_batch_is_answered_with_few_interrupts() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(
        raw_store(&numbered(directory.path(), SECTORS), false),
        false,
        1,
        0,
    );
    driver.assert_works();
    let before = driver.line.interrupts.load(Ordering::SeqCst);
    for place in 0..80_u64 {
        driver.header(HEADER + place * 16, VIRTIO_BLK_T_IN, place);
        let data = writable(DATA + place * 512, 512);
        driver.offer(
            0,
            &[
                readable(HEADER + place * 16, 16),
                data,
                writable(STATUS + place, 1),
            ],
        );
    }
    driver.notify(0);
    assert!(driver.wait(0));
    for place in 0..80_u64 {
        assert_eq!(driver.bytes(DATA + place * 512, 512), [place as u8; 512]);
        assert_eq!(driver.bytes(STATUS + place, 1), [OK]);
    }
    let interrupts = driver.line.interrupts.load(Ordering::SeqCst) - before;
    assert!(interrupts <= 8, "{interrupts} interrupts for 80 requests");
    assert_eq!(driver.block.metrics().snapshot().reads, 81);
}

#[test]
fn every_queue_serves_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(
        raw_store(&numbered(directory.path(), SECTORS), false),
        false,
        4,
        0,
    );
    for round in 0..200_u64 {
        for queue in 0..4_u16 {
            let place = u64::from(queue);
            driver.header(HEADER + place * 16, VIRTIO_BLK_T_IN, round * 4 + place);
            let data = writable(DATA + place * 512, 512);
            driver.offer(
                queue,
                &[
                    readable(HEADER + place * 16, 16),
                    data,
                    writable(STATUS + place, 1),
                ],
            );
            driver.notify(queue);
        }
        for queue in 0..4_u16 {
            assert!(driver.wait(queue));
            let place = u64::from(queue);
            assert_eq!(
                driver.bytes(DATA + place * 512, 512),
                [(round * 4 + place) as u8; 512]
            );
        }
    }
}

#[test]
fn configuration_describes_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let driver = Driver::new(raw_store(&numbered(directory.path(), 100), false), false, 3, 0);
    let mut config = [0xff; 64];
    driver.block.read_config(0, &mut config);
    assert_eq!(config[..8], 100_u64.to_le_bytes());
    assert_eq!(config[20..24], 512_u32.to_le_bytes());
    assert_eq!(config[34..36], 3_u16.to_le_bytes());
    assert_eq!(config[60..], [0; 4]);
    let mut past = [0xff; 4];
    driver.block.read_config(u64::MAX, &mut past);
    assert_eq!(past, [0; 4]);
}

#[test]
fn reset_leaves_no_io_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = numbered(directory.path(), 32 << 10);
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    for _ in 0..10 {
        // SAFETY: touches no memory; drops the page cache so that the reads go through the ring.
        unsafe {
            libc::posix_fadvise(
                std::os::fd::AsRawFd::as_raw_fd(&file),
                0,
                0,
                libc::POSIX_FADV_DONTNEED,
            );
        }
        let mut driver = Driver::new(raw_store(&path, false), false, 1, 0);
        for place in 0..60_u64 {
            driver.header(HEADER + place * 16, VIRTIO_BLK_T_IN, place * 500);
            let data = writable(DATA + place * 65536, 65536);
            driver.offer(
                0,
                &[
                    readable(HEADER + place * 16, 16),
                    data,
                    writable(STATUS + place, 1),
                ],
            );
        }
        driver.notify(0);
        std::thread::sleep(std::time::Duration::from_micros(300));
        driver.block.reset();
        let poison = vec![0x77; 60 * 65536];
        driver.put(DATA, &poison);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(driver.bytes(DATA, poison.len()) == poison, "I/O after the reset");
        driver.activate(1, 0);
        driver.assert_works();
    }
}

#[test]
fn disk_offers_the_features_of_its_kind() {
    let directory = tempfile::tempdir().unwrap();
    let path = numbered(directory.path(), 100);
    // Segment limit, block size, flush, topology, several queues; indirect tables and event indices.
    let common = 1 << 2 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 28 | 1 << 29;
    for (read_only, own) in [(false, 1 << 13 | 1 << 14), (true, 1 << 5)] {
        let driver = Driver::new(raw_store(&path, read_only), read_only, 2, 0);
        assert_eq!(driver.block.id(), VirtioId::Block);
        assert_eq!(driver.block.features(), common | own);
        assert_eq!(driver.block.queue_sizes().len(), 2);
    }
}

#[test]
fn configuration_has_the_limits_of_requests() {
    let directory = tempfile::tempdir().unwrap();
    let driver = Driver::new(raw_store(&numbered(directory.path(), 100), false), false, 1, 0);
    let word = |offset| {
        let mut bytes = [0; 4];
        driver.block.read_config(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    };
    let entries = u32::from(driver.block.queue_sizes()[0]);
    assert_eq!(
        word(12),
        entries - 2,
        "a request's header and status need a descriptor each"
    );
    assert_eq!(
        word(24),
        8 << 16 | 3,
        "a physical block and the least I/O are a page"
    );
    assert_eq!(word(32) & 0xFF, 1, "write-back");
    // Discard and write-zeroes: 512 MiB in one range each.
    assert_eq!((word(36), word(40), word(44)), (1 << 20, 1, 8));
    assert_eq!((word(48), word(52), word(56)), (1 << 20, 1, 1));
}

#[test]
fn each_counter_of_a_disk_is_reported_under_its_name() {
    let metrics = crate::virtio::block::metrics::Metrics::default();
    let counters = [
        ("reads", &metrics.reads),
        ("read_bytes", &metrics.read_bytes),
        ("writes", &metrics.writes),
        ("written_bytes", &metrics.written_bytes),
        ("flushes", &metrics.flushes),
        ("discards", &metrics.discards),
        ("zeroed", &metrics.zeroed),
        ("failed", &metrics.failed),
        ("unsupported", &metrics.unsupported),
        ("in_background", &metrics.in_background),
        ("notifications", &metrics.notifications),
        ("interrupts", &metrics.interrupts),
    ];
    for (value, (_, counter)) in (1..).zip(&counters) {
        crate::virtio::block::metrics::add(counter, value);
    }
    let reported = serde_json::to_value(metrics.snapshot()).unwrap();
    for (value, (name, _)) in (1..).zip(&counters) {
        assert_eq!(reported[*name], value, "{name}");
    }
}
