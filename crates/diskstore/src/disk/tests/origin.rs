//! The reported origin of bytes is right: the named file has at the named offset the bytes that a read
//! returns.

use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::super::Origin;
use super::model::{DISK_BYTES, SECTOR, Step, step};
use super::*;

/// Largest copy unit of the overlays in these tests.
const CLUSTER: usize = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Top {
    ReadOnly,
    Scratch,
    Overlay,
    InPlace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bottom {
    Raw,
    /// Ends before the disk does, and in the middle of a sector.
    OddRaw,
    Qcow2,
    Compressed,
    /// A qcow2 file with some clusters of its own over a raw one.
    Chain,
}

fn top() -> impl Strategy<Value = Top> {
    prop_oneof![
        Just(Top::ReadOnly),
        Just(Top::Scratch),
        Just(Top::Overlay),
        Just(Top::InPlace)
    ]
}

fn bottom() -> impl Strategy<Value = Bottom> {
    prop_oneof![
        Just(Bottom::Raw),
        Just(Bottom::OddRaw),
        Just(Bottom::Qcow2),
        Just(Bottom::Compressed),
        Just(Bottom::Chain)
    ]
}

fn make_bottom(directory: &Path, bottom: Bottom) -> PathBuf {
    let raw = patterned(directory, "base.raw", DISK_BYTES);
    let base = directory.join("base");
    match bottom {
        Bottom::Raw => return raw,
        Bottom::OddRaw => {
            open_rw(&raw).set_len(DISK_BYTES as u64 - 300_100).unwrap();
            let size = DISK_BYTES.to_string();
            let backing = ["-F", "raw", "-b", "base.raw"];
            qemu_img(
                &[
                    &["create", "-q", "-f", "qcow2"],
                    &backing[..],
                    &[text(&base), &size],
                ]
                .concat(),
            );
        }
        Bottom::Qcow2 => {
            qemu_img(&["convert", "-O", "qcow2", "-f", "raw", text(&raw), text(&base)]);
        }
        Bottom::Compressed => {
            qemu_img(&[
                "convert",
                "-c",
                "-O",
                "qcow2",
                "-f",
                "raw",
                text(&raw),
                text(&base),
            ]);
        }
        Bottom::Chain => {
            let backing = ["-F", "raw", "-b", "base.raw", "-o", "cluster_size=4096"];
            qemu_img(&[&["create", "-q", "-f", "qcow2"], &backing[..], &[text(&base)]].concat());
            let mut wanted = request(&base, "maker");
            (wanted.mode, wanted.persistent, wanted.format) = (Mode::Exclusive, true, Some(Format::Qcow2));
            let own = store(&wanted);
            write(&*own, 5 << 12, &[0x5a; 3 << 12]);
            write(&*own, 100 << 12, &[0x5b; 512]);
            own.write_zeroes(40 << 12, 8 << 12, true).unwrap();
            own.write_back().unwrap();
        }
    }
    base
}

fn do_step(disk: &dyn Store, step: &Step, touched: &mut [bool]) {
    let (Step::Read { sector, sectors }
    | Step::Write { sector, sectors, .. }
    | Step::Zero { sector, sectors, .. }
    | Step::Discard { sector, sectors }) = *step
    else {
        disk.write_back().unwrap();
        return;
    };
    let (start, bytes) = (sector * SECTOR, sectors * SECTOR);
    match *step {
        Step::Write { value, .. } => write(disk, start as u64, &vec![value; bytes]),
        Step::Zero { unmap, .. } => disk.write_zeroes(start as u64, bytes as u64, unmap).unwrap(),
        Step::Discard { .. } => disk.discard(start as u64, bytes as u64).unwrap(),
        _ => {
            walk(disk, start, bytes);
            return;
        }
    }
    touched[start / CLUSTER..(start + bytes).div_ceil(CLUSTER)].fill(true);
}

/// Follows the origins of a range, compares each with a read, and returns which bytes come from a base.
fn walk(disk: &dyn Store, start: usize, bytes: usize) -> Vec<bool> {
    let (files, bases) = (disk.files(), disk.bases());
    let shown = read(disk, start as u64, bytes);
    let mut from_base = Vec::new();
    while from_base.len() < bytes {
        let done = from_base.len();
        let origin = disk.origin((start + done) as u64, (bytes - done) as u64);
        let here = origin.bytes() as usize;
        assert!(
            (1..=bytes - done).contains(&here),
            "{origin:?} of {} bytes",
            bytes - done
        );
        if let Origin::Base { file, offset, .. } = origin {
            assert!(bases.contains(&file), "{origin:?} is not of a base: {bases:?}");
            let mut there = vec![0; here];
            let file = File::from(files[file].try_clone_to_owned().unwrap());
            file.read_exact_at(&mut there, offset).unwrap();
            assert!(
                there == shown[done..done + here],
                "{origin:?} at {}",
                start + done
            );
        }
        from_base.resize(done + here, matches!(origin, Origin::Base { .. }));
    }
    from_base
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_named_origin_has_the_bytes_that_a_read_returns(
        top in top(),
        bottom in bottom(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let base = make_bottom(directory.path(), bottom);
        let mut wanted = request(&base, "a");
        wanted.format = (bottom != Bottom::Raw).then_some(Format::Qcow2);
        match top {
            Top::ReadOnly => wanted.read_only = true,
            Top::Scratch => {}
            Top::Overlay => {
                (wanted.persistent, wanted.overlay_path) = (true, Some(directory.path().join("own")));
            }
            Top::InPlace => (wanted.mode, wanted.persistent) = (Mode::Exclusive, true),
        }
        let disk = store(&wanted);
        let bytes = disk.size() as usize;
        let mut touched = vec![false; bytes.div_ceil(CLUSTER)];
        if top != Top::ReadOnly {
            steps.iter().for_each(|step| do_step(&*disk, step, &mut touched));
        }
        let from_base = walk(&*disk, 0, bytes);
        // Bytes that were never written are the base's, wherever the base stores them unchanged.
        let base_has_it = match (bottom, top) {
            (Bottom::Raw, Top::InPlace) | (Bottom::Qcow2, Top::InPlace) | (Bottom::Compressed, _) => 0,
            (Bottom::OddRaw, _) => DISK_BYTES - 300_100,
            (Bottom::Chain, _) => 5 << 12,
            _ => bytes,
        };
        for (place, from_base) in from_base.iter().enumerate() {
            if touched[place / CLUSTER] {
                continue;
            }
            let behind = bottom == Bottom::OddRaw && place >= base_has_it;
            prop_assert!(*from_base || place >= base_has_it, "byte {place}");
            prop_assert!(!*from_base || !behind, "byte {place} is behind the end of the base");
            prop_assert!(!*from_base || bottom != Bottom::Compressed, "byte {place} is compressed");
        }
        if top == Top::InPlace && matches!(bottom, Bottom::Raw | Bottom::Qcow2) {
            prop_assert!(!from_base.contains(&true) && disk.bases().is_empty());
        }
    }
}

/// In a temporary overlay over a raw disk, own and base bytes are distinguished by block.
#[test]
fn origin_of_each_block_of_a_temporary_overlay_is_right() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base.raw", DISK_BYTES);
    let disk = store(&request(&base, "a"));
    write(&*disk, 3 * 4096 + 512, &[1; 512]);
    let whole = |at| disk.origin(at, DISK_BYTES as u64 - at);
    let base = |offset, bytes| Origin::Base {
        file: 1,
        offset,
        bytes,
    };
    assert_eq!(whole(0), base(0, 3 * 4096));
    assert_eq!(whole(512), base(512, 3 * 4096 - 512));
    assert_eq!(whole(3 * 4096), Origin::Other { bytes: 4096 });
    assert_eq!(whole(4 * 4096), base(4 * 4096, DISK_BYTES as u64 - 4 * 4096));
    assert_eq!(disk.origin(4 * 4096 + 100, 7), base(4 * 4096 + 100, 7));
    assert_eq!(disk.bases(), [1]);
}

/// A cluster that its file no longer holds whole reads as zeroes, and must not be mapped from the file.
#[test]
fn bytes_behind_the_end_of_a_truncated_file_have_no_origin_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let raw = patterned(directory.path(), "base.raw", DISK_BYTES);
    let base = directory.path().join("base");
    qemu_img(&["convert", "-O", "qcow2", "-f", "raw", text(&raw), text(&base)]);
    let file = open_rw(&base);
    file.set_len(file.metadata().unwrap().len() - 100_000).unwrap();
    let disk = store(&request(&base, "a"));
    let from_base = walk(&*disk, 0, DISK_BYTES);
    assert_eq!(from_base.iter().filter(|from_base| !**from_base).count(), 100_000);
}
