//! Locks exclude other processes, name their holder, and end with it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use super::super::{DiskError, Holder, announce_again, holders, open};
use super::*;

/// A process that holds a disk until it is killed.
struct Other {
    process: Child,
}

impl Other {
    fn holding(path: &Path, mode: &str) -> Self {
        let mut process = in_subprocess(
            "disk::tests::locks::other_process",
            &format!("{mode} {}", text(path)),
        )
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let ready = lines
            .by_ref()
            .map(Result::unwrap)
            .any(|line| line.contains("holding"));
        assert!(ready, "the other process could not open the disk");
        Self { process }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Body of the other process; does nothing in an ordinary run.
#[test]
fn other_process() {
    let Some(value) = subprocess_value() else { return };
    let (mode, path) = value.split_once(' ').unwrap();
    let mut wanted = request(Path::new(path), "other-vm");
    if mode == "exclusive" {
        (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
    }
    let _disk = open(&wanted).unwrap();
    println!("holding");
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

fn exclusive(path: &Path) -> DiskRequest {
    let mut wanted = request(path, "mine");
    (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
    wanted
}

#[test]
fn exclusive_disk_is_refused_to_a_second_vm_with_the_holders_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let other = Other::holding(&path, "exclusive");

    let error = open(&exclusive(&path)).unwrap_err();

    let message = error.to_string();
    assert!(matches!(error, DiskError::InUse { .. }), "{message}");
    assert!(message.contains("VM other-vm"), "{message}");
    assert!(
        message.contains(&format!("process {}", other.process.id())),
        "{message}"
    );
    assert!(!message.contains('\n'), "{message}");
}

#[test]
fn exclusive_disk_is_refused_to_a_private_user() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let _other = Other::holding(&path, "exclusive");
    let message = open(&request(&path, "mine")).unwrap_err().to_string();
    assert!(message.contains("exclusively by VM other-vm"), "{message}");
}

#[test]
fn private_base_is_refused_to_an_exclusive_user_but_not_to_a_private_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let _other = Other::holding(&path, "private");
    assert!(
        open(&exclusive(&path))
            .unwrap_err()
            .to_string()
            .contains("VM other-vm")
    );
    let _mine = open(&request(&path, "mine")).unwrap();
    assert_eq!(holders(&path).unwrap().len(), 2);
}

#[test]
fn killed_holder_leaves_no_lock_and_no_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    drop(Other::holding(&path, "exclusive"));
    assert_eq!(holders(&path).unwrap(), []);
    open(&exclusive(&path)).unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn one_process_cannot_open_an_exclusive_disk_twice() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let first = open(&exclusive(&path)).unwrap();
    assert!(matches!(open(&exclusive(&path)), Err(DiskError::InUse { .. })));
    drop(first);
    open(&exclusive(&path)).unwrap();
}

#[test]
fn lock_lasts_while_a_copy_of_the_file_is_open() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let disk = open(&exclusive(&path)).unwrap();
    let shards = disk.layers[0].file.try_clone().unwrap();
    drop(disk);
    assert!(matches!(open(&exclusive(&path)), Err(DiskError::InUse { .. })));
    drop(shards);
    open(&exclusive(&path)).unwrap();
}

#[test]
fn holder_is_named_again_after_the_announcement_of_its_predecessor_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let mut disk = open(&exclusive(&path)).unwrap();
    // A monitor's successor has its open files, but not its announcements.
    let file = disk.layers.remove(0).file.try_clone().unwrap();
    drop(disk);
    assert_eq!(holders(&path).unwrap(), []);

    let announcement = announce_again(&file, "adopted");

    let holder = Holder {
        vm: "adopted".to_owned(),
        pid: std::process::id(),
    };
    assert_eq!(holders(&path).unwrap(), [holder]);
    let message = open(&exclusive(&path)).unwrap_err().to_string();
    assert!(message.contains("VM adopted"), "{message}");
    drop(announcement);
    assert_eq!(holders(&path).unwrap(), []);
    assert!(matches!(open(&exclusive(&path)), Err(DiskError::InUse { .. })));
}

#[test]
fn base_of_an_exclusive_overlay_stays_shared() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base", 1 << 16);
    let path = directory.path().join("disk.qcow2");
    create_qcow2_over("base", &path);
    let mut wanted = exclusive(&path);
    wanted.format = Some(Format::Qcow2);
    let _disk = open(&wanted).unwrap();
    open(&request(&base, "other")).unwrap();
    assert!(matches!(open(&exclusive(&base)), Err(DiskError::InUse { .. })));
}

#[test]
fn persistent_overlay_is_one_vms_own() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base", 1 << 16);
    let mut wanted = request(&base, "first");
    (wanted.persistent, wanted.overlay_path) = (true, Some(directory.path().join("own")));
    let _disk = open(&wanted).unwrap();
    let message = open(&wanted).unwrap_err().to_string();
    assert!(
        message.contains("own is in use") && message.contains("VM first"),
        "{message}"
    );
}
