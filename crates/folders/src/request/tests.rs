use proptest::prelude::*;

use super::*;
use crate::packet::u64_at;

const ALL: Rights = Rights {
    read_only: false,
    xattr: true,
};

/// A whole request of user 7 and group 8 with this body.
fn request(operation: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; REQUEST_HEADER_BYTES];
    bytes.extend(body);
    let length = bytes.len() as u32;
    set_u32_at(&mut bytes, 0, length);
    set_u32_at(&mut bytes, 4, operation);
    set_u32_at(&mut bytes, 8, 99);
    set_u32_at(&mut bytes, field::UID, 7);
    set_u32_at(&mut bytes, field::GID, 8);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn verdict(operation: u32, body: &[u8], rights: Rights) -> Verdict {
    admit(&mut request(operation, body), rights)
}

#[test]
fn guest_chooses_no_user_of_the_host() {
    let mut mkdir = request(opcode::MKDIR, &[words(&[0o755, 0]), b"new\0".to_vec()].concat());
    assert_eq!(admit(&mut mkdir, ALL), Verdict::Serve);
    assert_eq!(u32_at(&mkdir, field::UID), Some(0));
    assert_eq!(u32_at(&mkdir, field::GID), Some(0));
    assert_eq!(u64_at(&mkdir, 8), Some(99), "the id stays");
}

#[test]
fn bits_that_run_a_program_as_another_user_are_removed() {
    for (operation, offset, length) in [
        (opcode::CREATE, field::CREATE_MODE, 16),
        (opcode::MKNOD, field::FIRST, 16),
        (opcode::MKDIR, field::FIRST, 8),
        (opcode::SETATTR, field::SETATTR_MODE, 88),
    ] {
        let mut bytes = request(operation, &vec![0; length]);
        set_u32_at(&mut bytes, offset, libc::S_IFREG | 0o6755);
        assert_eq!(admit(&mut bytes, ALL), Verdict::Serve, "{operation}");
        assert_eq!(u32_at(&bytes, offset), Some(libc::S_IFREG | 0o755), "{operation}");
    }
}

#[test]
fn devices_are_not_made() {
    for (kind, expected) in [
        (libc::S_IFCHR, Verdict::Refuse(libc::EPERM)),
        (libc::S_IFBLK, Verdict::Refuse(libc::EPERM)),
        (libc::S_IFIFO, Verdict::Serve),
        (libc::S_IFSOCK, Verdict::Serve),
    ] {
        assert_eq!(
            verdict(opcode::MKNOD, &words(&[kind | 0o644, 0, 0, 0]), ALL),
            expected
        );
    }
}

#[test]
fn nothing_changes_a_read_only_folder() {
    let read_only = Rights {
        read_only: true,
        xattr: true,
    };
    let refused = Verdict::Refuse(libc::EROFS);
    for operation in [
        opcode::SETATTR,
        opcode::SYMLINK,
        opcode::MKNOD,
        opcode::MKDIR,
        opcode::UNLINK,
        opcode::RMDIR,
        opcode::RENAME,
        opcode::RENAME2,
        opcode::LINK,
        opcode::WRITE,
        opcode::SETXATTR,
        opcode::REMOVEXATTR,
        opcode::CREATE,
        opcode::FALLOCATE,
    ] {
        assert_eq!(verdict(operation, &[0; 128], read_only), refused, "{operation}");
    }
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC, libc::O_ACCMODE] {
        assert_eq!(
            verdict(opcode::OPEN, &words(&[flags as u32, 0]), read_only),
            refused
        );
    }
    assert_eq!(
        verdict(opcode::ACCESS, &words(&[libc::W_OK as u32, 0]), read_only),
        refused
    );
    for (operation, body) in [
        (opcode::OPEN, words(&[libc::O_RDONLY as u32, 0])),
        (opcode::ACCESS, words(&[libc::R_OK as u32, 0])),
        (opcode::READ, vec![0; 40]),
        (opcode::LOOKUP, b"name\0".to_vec()),
    ] {
        assert_eq!(
            verdict(operation, &body, read_only),
            Verdict::Serve,
            "{operation}"
        );
    }
}

#[test]
fn data_that_does_not_fit_a_packet_is_refused() {
    let sized = |operation, size: usize| {
        let mut body = vec![0; 40];
        set_u32_at(&mut body, 16, size as u32);
        verdict(operation, &body, ALL)
    };
    for operation in [opcode::READ, opcode::READDIR, opcode::READDIRPLUS] {
        assert_eq!(sized(operation, DATA_BYTES_MAX), Verdict::Serve);
        assert_eq!(
            sized(operation, DATA_BYTES_MAX + 1),
            Verdict::Refuse(libc::EINVAL)
        );
        assert_eq!(sized(operation, u32::MAX as usize), Verdict::Refuse(libc::EINVAL));
    }
    assert_eq!(
        verdict(opcode::LISTXATTR, &words(&[u32::MAX, 0]), ALL),
        Verdict::Refuse(libc::EINVAL)
    );
    // A write whose size is not that of its data.
    assert_eq!(sized(opcode::WRITE, 1), Verdict::Refuse(libc::EINVAL));
    assert_eq!(sized(opcode::WRITE, 0), Verdict::Serve);
}

#[test]
fn only_attributes_of_users_are_passed_on() {
    let get = |name: &[u8], rights| {
        let body = [&words(&[64, 0]), name, b"\0"].concat();
        verdict(opcode::GETXATTR, &body, rights)
    };
    assert_eq!(get(b"user.note", ALL), Verdict::Serve);
    let refused = Verdict::Refuse(libc::EOPNOTSUPP);
    assert_eq!(get(b"security.capability", ALL), refused);
    assert_eq!(get(b"system.posix_acl_access", ALL), refused);
    assert_eq!(verdict(opcode::REMOVEXATTR, b"trusted.x\0", ALL), refused);
    assert_eq!(
        get(b"user.note", Rights::default()),
        Verdict::Refuse(libc::ENOSYS)
    );
}

#[test]
fn name_of_the_parent_is_not_looked_up() {
    for name in [b".\0".as_slice(), b"..\0", b"..", b".."] {
        assert_eq!(verdict(opcode::LOOKUP, name, ALL), Verdict::Refuse(libc::EINVAL));
    }
    assert_eq!(verdict(opcode::LOOKUP, b"...\0", ALL), Verdict::Serve);
}

#[test]
fn flags_that_a_guest_may_not_choose_are_removed() {
    let flags = (libc::O_RDWR | libc::O_DIRECT | libc::O_TMPFILE | libc::O_PATH | libc::O_ASYNC) as u32;
    let mut open = request(opcode::OPEN, &words(&[flags, 0]));
    assert_eq!(admit(&mut open, ALL), Verdict::Serve);
    let kept = (libc::O_RDWR | libc::O_DIRECTORY) as u32;
    assert_eq!(u32_at(&open, field::FIRST), Some(kept));
}

#[test]
fn list_of_forgotten_files_is_within_its_request() {
    let batch = |count: u32, items: usize| {
        let body = [words(&[count, 0]), vec![0; items * FORGET_ITEM_BYTES]].concat();
        verdict(opcode::BATCH_FORGET, &body, ALL)
    };
    assert_eq!(batch(2, 2), Verdict::Serve);
    assert_eq!(batch(3, 2), Verdict::Ignore);
    assert_eq!(batch(u32::MAX, 2), Verdict::Ignore);
    assert_eq!(verdict(opcode::INTERRUPT, &[0; 8], ALL), Verdict::Ignore);
}

#[test]
fn unknown_operation_and_wrong_length_are_refused() {
    // SETUPMAPPING, IOCTL, GETLK.
    for operation in [48, 39, 31, 0, u32::MAX] {
        assert_eq!(verdict(operation, &[0; 128], ALL), Verdict::Refuse(libc::ENOSYS));
    }
    let mut long = request(opcode::STATFS, &[]);
    long.push(0);
    assert_eq!(admit(&mut long, ALL), Verdict::Refuse(libc::EINVAL));
    assert_eq!(admit(&mut [0; 39], ALL), Verdict::Ignore);
}

proptest! {
    #[test]
    fn any_request_is_decided_without_panic_and_keeps_its_length_operation_and_id(
        operation in 0_u32..60,
        body in proptest::collection::vec(any::<u8>(), 0..200),
        read_only: bool,
        xattr: bool,
    ) {
        let before = request(operation, &body);
        let mut after = before.clone();
        let verdict = admit(&mut after, Rights { read_only, xattr });
        prop_assert_eq!(after.len(), before.len());
        prop_assert_eq!(RequestHeader::read(&after), RequestHeader::read(&before));
        if verdict == Verdict::Serve && RequestHeader::read(&after).is_some_and(|header| header.has_reply()) {
            prop_assert_eq!(u32_at(&after, field::UID), Some(0));
        }
    }
}
