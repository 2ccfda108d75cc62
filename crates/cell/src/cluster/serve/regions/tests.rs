use std::os::unix::fs::FileExt;

use vm_memory::{FileOffset, MmapRegion};

use super::*;

const BYTES: u64 = 2 << 20;

fn created() -> RegionFiles {
    let mut files = RegionFiles::default();
    files.create("table", BYTES, &[0]).unwrap();
    files
}

fn refusal<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

#[test]
fn members_see_one_content_and_readers_cannot_write() {
    let files = created();
    let writer = files.descriptor("table", RegionAccess::Write).unwrap();
    let reader = files.descriptor("table", RegionAccess::Read).unwrap();
    writer.write_all_at(b"shared", 4096).unwrap();
    let mut content = [0; 6];
    reader.read_exact_at(&mut content, 4096).unwrap();
    assert_eq!(content, *b"shared");
    assert_eq!(refusal(reader.write_at(b"x", 0)), libc::EBADF);
    let writable = MmapRegion::<()>::from_file(FileOffset::new(reader, 0), BYTES as usize);
    assert!(writable.is_err(), "a reader maps the file for writing");
}

#[test]
fn no_member_changes_the_length() {
    let files = created();
    let writer = files.descriptor("table", RegionAccess::Write).unwrap();
    assert_eq!(refusal(writer.set_len(0)), libc::EPERM);
    assert_eq!(refusal(writer.set_len(2 * BYTES)), libc::EPERM);
    let seal = fcntl(&writer, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE));
    assert_eq!(seal.unwrap_err() as i32, libc::EPERM);
}

#[test]
fn file_is_used_while_a_member_has_or_maps_it() {
    let files = created();
    assert!(!files.is_used("table").unwrap());
    let first = files.descriptor("table", RegionAccess::Write).unwrap();
    let second = files.descriptor("table", RegionAccess::Read).unwrap();
    let copy = second.try_clone().unwrap();
    drop(first);
    drop(second);
    assert!(files.is_used("table").unwrap(), "a copy is left");
    drop(copy);
    assert!(!files.is_used("table").unwrap());
    let writer = files.descriptor("table", RegionAccess::Write).unwrap();
    let mapping = MmapRegion::<()>::from_file(FileOffset::new(writer, 0), BYTES as usize).unwrap();
    assert!(files.is_used("table").unwrap(), "a mapping is left");
    drop(mapping);
    assert!(!files.is_used("table").unwrap());
}

#[test]
fn next_process_takes_the_file_of_a_member_and_not_the_members_lock() {
    let before = created();
    let reader = before.descriptor("table", RegionAccess::Read).unwrap();
    let writer = before.descriptor("table", RegionAccess::Write).unwrap();
    writer.write_all_at(b"kept", 0).unwrap();
    drop((before, writer));
    let mut files = RegionFiles::default();
    assert!(is_region(&reader, BYTES) && !is_region(&reader, 2 * BYTES));
    files.keep("table", open_again(&reader, RegionAccess::Write).unwrap());
    assert!(files.is_used("table").unwrap(), "the member has it");
    let later = files.descriptor("table", RegionAccess::Write).unwrap();
    let mut content = [0; 4];
    later.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(content, *b"kept");
    drop((reader, later));
    assert!(!files.is_used("table").unwrap());
}

#[test]
fn file_of_another_kind_is_no_region() {
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(BYTES).unwrap();
    assert!(!is_region(&plain, BYTES));
    let unsealed = File::from(memfd_create(c"other", MFdFlags::MFD_ALLOW_SEALING).unwrap());
    unsealed.set_len(BYTES).unwrap();
    assert!(!is_region(&unsealed, BYTES));
    assert!(File::open("/dev/null").is_ok_and(|null| !is_region(&null, BYTES)));
}
