//! Damaged and crafted qcow2 files cause errors: no panic, no hang, no large allocation.

use proptest::prelude::*;

use super::super::{assemble, maintenance};
use super::*;

/// A small image with allocated, zero and compressed clusters.
fn valid() -> &'static [u8] {
    static VALID: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    VALID.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let raw = patterned(directory.path(), "raw", 256 << 10);
        let path = directory.path().join("disk.qcow2");
        let options = [
            "convert",
            "-c",
            "-f",
            "raw",
            "-O",
            "qcow2",
            "-o",
            "cluster_size=4096",
        ];
        qemu_img(&[&options[..], &[text(&raw), text(&path)]].concat());
        let mut wanted = request(&path, "vm");
        (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
        let disk = store(&wanted);
        write(&*disk, 0, &[3; 20 << 10]);
        disk.write_zeroes(64 << 10, 16 << 10, false).unwrap();
        disk.write_back().unwrap();
        drop(disk);
        std::fs::read(&path).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn mutated_qcow2_never_panics_or_hangs(
        changes in prop::collection::vec((prop_oneof![0_usize..112, 0_usize..1 << 16], any::<u8>()), 1..12),
        cut in prop_oneof![9 => Just(usize::MAX), 1 => 0_usize..1 << 16],
    ) {
        let mut bytes = valid().to_vec();
        for (place, value) in changes {
            let length = bytes.len();
            bytes[place % length] = value;
        }
        bytes.truncate(cut);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::write(&path, &bytes).unwrap();
        let _ = maintenance::check(&path, Some(Format::Qcow2), &mut |_, _| {});
        let Ok(disk) = assemble(vec![(open_rw(&path), Format::Qcow2)], false) else { return Ok(()) };
        let size = disk.size();
        let mut buffer = vec![0; 128 << 10];
        for offset in [0, 4096, 60 << 10, 100 << 10, size.saturating_sub(4096) / 512 * 512] {
            let bytes = size.saturating_sub(offset).min(128 << 10) as usize / 512 * 512;
            let piece = segments(&mut buffer[..bytes], 8192);
            if bytes > 0 {
                let _ = disk.read(&piece, offset);
                let _ = disk.write(&piece, offset);
                let _ = disk.write_zeroes(offset, bytes as u64, true);
                let _ = disk.discard(offset, bytes as u64);
            }
        }
        let _ = disk.write_back();
    }
}

#[test]
fn header_that_asks_for_a_huge_table_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    for (at, name) in [(36, "L1"), (56, "refcount")] {
        let mut bytes = valid().to_vec();
        bytes[at..at + 4].copy_from_slice(&0x003f_ffff_u32.to_be_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let error = super::super::open(&request(&path, "vm")).unwrap_err().to_string();
        assert!(
            error.contains(&format!("its {name} table lies outside the file")),
            "{error}"
        );
    }
}

#[test]
fn a_refcount_table_with_gaps_is_refused_for_writing() {
    let mut bytes = valid().to_vec();
    let table = u64::from_be_bytes(bytes[48..56].try_into().unwrap()) as usize;
    // An entry after one that is missing.
    let entry = bytes[table..table + 8].to_vec();
    bytes[table + 16..table + 24].copy_from_slice(&entry);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, &bytes).unwrap();
    let opened = |read_only| assemble(vec![(open_rw(&path), Format::Qcow2)], read_only);
    let error = opened(false).err().expect("a refusal").to_string();
    assert!(error.contains("qemu-img convert"), "{error}");
    assert!(opened(true).is_ok());
}
