//! Random operations on every kind of disk, against a plain array of bytes.

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::{IoQueue, Mode, Operation, Store, Submission};
use super::*;

pub const DISK_BYTES: usize = 1 << 20;
pub const SECTOR: usize = 512;

#[derive(Clone, Debug)]
pub enum Step {
    Read {
        sector: usize,
        sectors: usize,
    },
    Write {
        sector: usize,
        sectors: usize,
        value: u8,
    },
    Zero {
        sector: usize,
        sectors: usize,
        unmap: bool,
    },
    Discard {
        sector: usize,
        sectors: usize,
    },
    Flush,
    Reopen,
}

fn range() -> impl Strategy<Value = (usize, usize)> {
    (0..DISK_BYTES / SECTOR, prop_oneof![1_usize..9, 1_usize..300])
        .prop_map(|(sector, sectors)| (sector, sectors.min(DISK_BYTES / SECTOR - sector)))
}

pub fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => range().prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        6 => (range(), any::<u8>())
            .prop_map(|((sector, sectors), value)| Step::Write { sector, sectors, value }),
        2 => (range(), any::<bool>())
            .prop_map(|((sector, sectors), unmap)| Step::Zero { sector, sectors, unmap }),
        1 => range().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        1 => Just(Step::Flush),
        1 => Just(Step::Reopen),
    ]
}

/// Runs one operation to its end.
fn run(queue: &mut IoQueue, operation: Operation) -> std::io::Result<()> {
    match queue.submit(operation, 7) {
        Submission::Done(result) => result,
        Submission::NoRoom(_, error) => Err(error),
        Submission::Pending => {
            queue.send().unwrap();
            loop {
                if let Some((token, result)) = queue.completed() {
                    assert_eq!(token, 7);
                    return result;
                }
                std::thread::yield_now();
            }
        }
    }
}

/// Plays the steps on the disk that `open` opens, again for each reopening, and compares all bytes at the
/// end. Discarded bytes may read as anything until they are written again.
fn play(steps: &[Step], mut model: Vec<u8>, mut open: impl FnMut() -> Arc<dyn Store>) -> Vec<Option<u8>> {
    let mut known = vec![true; model.len()];
    let mut queue = IoQueue::new(open(), 8);
    assert_eq!(queue.store().size(), model.len() as u64);
    let check = |queue: &mut IoQueue, model: &[u8], known: &[bool], start: usize, bytes: usize| {
        let mut buffer = vec![0xee; bytes];
        let into = segments(&mut buffer, 1536);
        run(
            queue,
            Operation::Read {
                offset: start as u64,
                into,
            },
        )
        .unwrap();
        for (at, byte) in buffer.iter().enumerate() {
            let place = start + at;
            assert!(!known[place] || *byte == model[place], "byte {place}: {byte:#x}");
        }
    };
    for step in steps {
        match *step {
            Step::Read { sector, sectors } => {
                check(&mut queue, &model, &known, sector * SECTOR, sectors * SECTOR);
            }
            Step::Write {
                sector,
                sectors,
                value,
            } => {
                let (start, bytes) = (sector * SECTOR, sectors * SECTOR);
                let mut data: Vec<_> = (0..bytes).map(|at| value ^ (at / SECTOR) as u8).collect();
                model[start..start + bytes].copy_from_slice(&data);
                known[start..start + bytes].fill(true);
                let from = segments(&mut data, 1000);
                run(
                    &mut queue,
                    Operation::Write {
                        offset: start as u64,
                        from,
                    },
                )
                .unwrap();
            }
            Step::Zero {
                sector,
                sectors,
                unmap,
            } => {
                let (start, bytes) = (sector * SECTOR, sectors * SECTOR);
                model[start..start + bytes].fill(0);
                known[start..start + bytes].fill(true);
                let (offset, bytes) = (start as u64, bytes as u64);
                run(&mut queue, Operation::WriteZeroes { offset, bytes, unmap }).unwrap();
            }
            Step::Discard { sector, sectors } => {
                let (start, bytes) = (sector * SECTOR, sectors * SECTOR);
                known[start..start + bytes].fill(false);
                run(
                    &mut queue,
                    Operation::Discard {
                        offset: start as u64,
                        bytes: bytes as u64,
                    },
                )
                .unwrap();
            }
            Step::Flush => run(&mut queue, Operation::Flush).unwrap(),
            Step::Reopen => {
                run(&mut queue, Operation::Flush).unwrap();
                drop(queue);
                queue = IoQueue::new(open(), 8);
            }
        }
    }
    check(&mut queue, &model, &known, 0, model.len());
    run(&mut queue, Operation::Flush).unwrap();
    model
        .iter()
        .zip(&known)
        .map(|(byte, known)| known.then_some(*byte))
        .collect()
}

/// Reads the disk with qemu-img and compares with the model.
fn qemu_reads_the_same(disk: &Path, format: &str, expected: &[Option<u8>]) {
    let copy = disk.with_extension("copy");
    qemu_img(&["convert", "-f", format, "-O", "raw", text(disk), text(&copy)]);
    let bytes = std::fs::read(&copy).unwrap();
    for (place, byte) in expected.iter().enumerate() {
        assert!(
            byte.is_none_or(|byte| byte == bytes[place]),
            "qemu-img reads byte {place} differently"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn raw_disk_keeps_every_byte(steps in prop::collection::vec(step(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let path = patterned(directory.path(), "disk", DISK_BYTES);
        let mut wanted = request(&path, "a");
        (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
        let expected = play(&steps, pattern(DISK_BYTES), || store(&wanted));
        qemu_reads_the_same(&path, "raw", &expected);
    }

    #[test]
    fn scratch_overlay_keeps_every_byte_and_its_base(steps in prop::collection::vec(step(), 1..60)) {
        let directory = tempfile::tempdir().unwrap();
        let path = patterned(directory.path(), "disk", DISK_BYTES);
        let disk = super::super::open(&request(&path, "a")).unwrap();
        // The files stay, as in a monitor that restarts a shard.
        play(&steps, pattern(DISK_BYTES), || {
            let files = disk.layers.iter().map(|layer| (layer.file.try_clone().unwrap(), layer.format));
            super::super::assemble(files.collect(), false).unwrap()
        });
        prop_assert!(std::fs::read(&path).unwrap() == pattern(DISK_BYTES));
        prop_assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn qcow2_keeps_every_byte_at_every_cluster_size(
        steps in prop::collection::vec(step(), 1..60),
        cluster_bits in 9_u32..18,
        version in prop_oneof![Just("0.10"), Just("1.1")],
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.qcow2");
        let options = format!("cluster_size={},compat={version}", 1 << cluster_bits);
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, text(&path), &DISK_BYTES.to_string()]);
        let mut wanted = request(&path, "a");
        (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
        let expected = play(&steps, vec![0; DISK_BYTES], || store(&wanted));
        qemu_img(&["check", "-f", "qcow2", text(&path)]);
        qemu_reads_the_same(&path, "qcow2", &expected);
    }

    #[test]
    fn qcow2_keeps_every_byte_over_a_shorter_base(
        steps in prop::collection::vec(step(), 1..60),
        cluster_bits in 9_u32..18,
        base_sectors in 1_usize..DISK_BYTES / SECTOR,
        base_format in prop_oneof![Just("raw"), Just("qcow2")],
    ) {
        let directory = tempfile::tempdir().unwrap();
        let bytes = base_sectors * SECTOR;
        let raw = patterned(directory.path(), "base.raw", bytes);
        let base = directory.path().join("base");
        qemu_img(&["convert", "-f", "raw", "-O", base_format, text(&raw), text(&base)]);
        let before = std::fs::read(&base).unwrap();
        let path = directory.path().join("disk.qcow2");
        let options = format!("cluster_size={}", 1 << cluster_bits);
        let size = DISK_BYTES.to_string();
        let base_options = ["-F", base_format, "-b", "base"];
        let create = ["create", "-q", "-f", "qcow2", "-o", &options];
        qemu_img(&[&create[..], &base_options, &[text(&path), &size]].concat());
        let mut wanted = request(&path, "a");
        (wanted.mode, wanted.persistent, wanted.format) = (Mode::Exclusive, true, Some(Format::Qcow2));
        let mut model = pattern(bytes);
        model.resize(DISK_BYTES, 0);
        let expected = play(&steps, model, || store(&wanted));
        qemu_img(&["check", "-f", "qcow2", text(&path)]);
        qemu_reads_the_same(&path, "qcow2", &expected);
        prop_assert!(std::fs::read(&base).unwrap() == before);
    }

    #[test]
    fn persistent_overlay_keeps_every_byte_and_its_base(
        steps in prop::collection::vec(step(), 1..60),
        base_format in prop_oneof![Just("raw"), Just("qcow2")],
    ) {
        let directory = tempfile::tempdir().unwrap();
        let raw = patterned(directory.path(), "base.raw", DISK_BYTES);
        let base = directory.path().join("base");
        qemu_img(&["convert", "-f", "raw", "-O", base_format, text(&raw), text(&base)]);
        let before = std::fs::read(&base).unwrap();
        let overlay = directory.path().join("own.qcow2");
        let mut wanted = request(&base, "a");
        (wanted.persistent, wanted.overlay_path) = (true, Some(overlay.clone()));
        let expected = play(&steps, pattern(DISK_BYTES), || store(&wanted));
        qemu_img(&["check", "-f", "qcow2", text(&overlay)]);
        qemu_reads_the_same(&overlay, "qcow2", &expected);
        prop_assert!(std::fs::read(&base).unwrap() == before);
    }
}

/// Concurrent writes of two queues to neighbouring sectors of one block both survive.
#[test]
fn neighbouring_writes_of_two_queues_both_last() {
    for format in FORMATS {
        let directory = tempfile::tempdir().unwrap();
        let base = patterned(directory.path(), "base", DISK_BYTES);
        let mut wanted = request(&base, "a");
        if format == Format::Qcow2 {
            (wanted.persistent, wanted.overlay_path) = (true, Some(directory.path().join("own")));
        }
        let store = store(&wanted);
        std::thread::scope(|scope| {
            for queue in 0..4_usize {
                let store = &store;
                scope.spawn(move || {
                    for sector in (queue..DISK_BYTES / SECTOR).step_by(4) {
                        write(&**store, (sector * SECTOR) as u64, &[queue as u8; SECTOR]);
                    }
                });
            }
        });
        let bytes = read(&*store, 0, DISK_BYTES);
        for (place, byte) in bytes.iter().enumerate() {
            assert_eq!(
                usize::from(*byte),
                place / SECTOR % 4,
                "byte {place} with {format:?}"
            );
        }
    }
}

#[test]
fn compressed_clusters_are_read_and_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let raw = patterned(directory.path(), "base.raw", DISK_BYTES);
    let path = directory.path().join("disk.qcow2");
    qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&raw),
        text(&path),
    ]);
    let mut wanted = request(&path, "a");
    (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
    let disk = store(&wanted);
    write(&*disk, 70_000 / 512 * 512, &[9; 512]);
    let mut model = pattern(DISK_BYTES);
    model[70_000 / 512 * 512..][..512].fill(9);
    assert!(read(&*disk, 0, DISK_BYTES) == model);
    disk.write_back().unwrap();
    drop(disk);
    qemu_img(&["check", text(&path)]);
}
