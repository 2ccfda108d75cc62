//! A base that is changed under a running VM is detected; use or renaming of a base is no change.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::time::Duration;

use super::super::BaseWatch;
use super::*;

/// Longer than the kernel's tick, which is the resolution of write times.
const TICK: Duration = Duration::from_millis(30);

fn watched(wanted: &DiskRequest) -> (std::sync::Arc<dyn Store>, BaseWatch) {
    let disk = store(wanted);
    let mut watch = BaseWatch::default();
    watch.watch("disk0", &*disk).unwrap();
    std::thread::sleep(TICK);
    (disk, watch)
}

#[test]
fn a_write_to_a_base_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base", 1 << 20);
    let (_disk, watch) = watched(&request(&base, "a"));
    assert_eq!(watch.changed(), None);
    open_rw(&base).write_all_at(b"x", 5000).unwrap();
    let text = watch.changed().unwrap();
    assert!(text.contains("disk0") && text.contains("was written"), "{text}");
}

#[test]
fn a_base_that_shrinks_or_grows_is_noticed() {
    for bytes in [4096, 2 << 20] {
        let directory = tempfile::tempdir().unwrap();
        let base = patterned(directory.path(), "base", 1 << 20);
        let (_disk, watch) = watched(&request(&base, "a"));
        open_rw(&base).set_len(bytes).unwrap();
        let text = watch.changed().unwrap();
        assert!(text.contains(&format!("from 1048576 to {bytes} bytes")), "{text}");
    }
}

#[test]
fn a_base_of_a_base_is_watched_too() {
    let directory = tempfile::tempdir().unwrap();
    let raw = patterned(directory.path(), "base.raw", 1 << 20);
    let base = directory.path().join("base.qcow2");
    create_qcow2_over("base.raw", &base);
    let mut wanted = request(&base, "a");
    wanted.format = Some(Format::Qcow2);
    for persistent in [false, true] {
        (wanted.persistent, wanted.overlay_path) = (persistent, Some(directory.path().join("own")));
        let (_disk, watch) = watched(&wanted);
        assert_eq!(watch.changed(), None);
        open_rw(&raw).write_all_at(b"x", 0).unwrap();
        assert!(watch.changed().is_some());
    }
}

#[test]
fn use_by_vms_new_names_and_new_rights_are_no_change() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base", 1 << 20);
    let mut other = request(&base, "b");
    (other.persistent, other.overlay_path) = (true, Some(directory.path().join("own")));
    let (disk, watch) = watched(&request(&base, "a"));
    let second = store(&other);
    for disk in [&disk, &second] {
        write(&**disk, 0, &[1; 8192]);
        disk.discard(4096, 65536).unwrap();
        disk.write_back().unwrap();
        read(&**disk, 0, 1 << 20);
    }
    let moved = directory.path().join("moved");
    std::fs::rename(&base, &moved).unwrap();
    std::fs::set_permissions(&moved, std::fs::Permissions::from_mode(0o400)).unwrap();
    std::fs::remove_file(&moved).unwrap();
    assert_eq!(watch.changed(), None);
}

#[test]
fn a_disk_written_in_place_has_no_base_to_watch() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 20);
    let mut wanted = request(&path, "a");
    (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
    let (disk, watch) = watched(&wanted);
    write(&*disk, 0, &[1; 512]);
    assert_eq!(watch.changed(), None);
}
