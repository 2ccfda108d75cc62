use std::cell::Cell;
use std::fs;
use std::os::unix::fs::symlink;

use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::mkfifo;

use super::*;

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn a_file_appears_whole_and_replaces_what_has_its_name() {
    for nameless in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        let new = AtomicFile::begin(&path, nameless).unwrap();
        new.file().write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()).len(), if nameless { 1 } else { 2 });
        new.replace().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(
            (names(folder.path()), mode(&path)),
            (vec!["file".to_owned()], 0o600)
        );
    }
}

#[test]
fn a_file_that_is_not_finished_is_removed() {
    for nameless in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        drop(AtomicFile::begin(&folder.path().join("file"), nameless).unwrap());
        assert!(names(folder.path()).is_empty());
    }
}

#[test]
fn a_new_file_takes_no_name_that_is_taken() {
    for nameless in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        AtomicFile::begin(&path, nameless).unwrap().publish_new().unwrap();
        let again = AtomicFile::begin(&path, nameless).unwrap().publish_new();
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(names(folder.path()), ["file"]);
    }
}

/// Plants links at each name that can be guessed, and at the target itself.
#[test]
fn planted_links_are_not_followed() {
    for nameless in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        fs::write(&other, "other").unwrap();
        symlink(&other, folder.path().join(".file.mirrorball-unfinished")).unwrap();
        symlink(&other, folder.path().join(".file.mirrorball-unfinished-0")).unwrap();
        symlink(&other, &path).unwrap();
        let new = AtomicFile::begin(&path, nameless).unwrap();
        new.file().write_all(b"new").unwrap();
        new.replace().unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"other");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
}

#[test]
fn directory_that_replaces_another_meanwhile_receives_no_file() {
    for nameless in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let [own, moved, foreign] = ["own", "moved", "foreign"].map(|name| folder.path().join(name));
        fs::create_dir(&own).unwrap();
        fs::create_dir(&foreign).unwrap();
        let new = AtomicFile::begin(&own.join("file"), nameless).unwrap();
        fs::rename(&own, &moved).unwrap();
        symlink(&foreign, &own).unwrap();
        new.replace().unwrap();
        assert_eq!(
            (names(&moved), names(&foreign)),
            (vec!["file".to_owned()], vec![])
        );
    }
}

#[test]
fn named_file_is_distinguished_from_a_link_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    let old = File::open(&path).unwrap();
    let new = AtomicFile::beside(&path).unwrap();
    assert!(new.is_target(&old).unwrap());
    assert_eq!(new.folder_owner().unwrap(), geteuid().as_raw());
    fs::rename(&path, folder.path().join("moved")).unwrap();
    assert!(!new.is_target(&old).unwrap());
    symlink(folder.path().join("moved"), &path).unwrap();
    assert!(!new.is_target(&old).unwrap());
}

#[test]
fn remains_of_a_killed_process_are_removed_and_a_living_ones_file_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let long_ago = SystemTime::now() - 2 * REMAINS_AGE;
    for remains in [".file.mirrorball-unfinished", ".file.mirrorball-unfinished-1"] {
        let remains = File::create(folder.path().join(remains)).unwrap();
        remains.set_modified(long_ago).unwrap();
    }
    let living = AtomicFile::begin(&path, false).unwrap();
    living.file().set_modified(long_ago).unwrap();
    fs::write(folder.path().join(".file.mirrorball-unfinished-young"), "").unwrap();
    drop(AtomicFile::begin(&path, true).unwrap());
    let left = names(folder.path());
    assert_eq!(left.len(), 2, "{left:?}");
    living.replace().unwrap();
    assert_eq!(
        names(folder.path()),
        [".file.mirrorball-unfinished-young", "file"]
    );
}

#[test]
fn a_small_file_is_replaced_with_its_mode() {
    for replace in [replace_file, replace_volatile_file] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x".repeat(255));
        replace(&path, 0o640, b"one").unwrap();
        replace(&path, 0o600, b"two").unwrap();
        assert_eq!((fs::read(&path).unwrap(), mode(&path)), (b"two".to_vec(), 0o600));
        assert_eq!(names(folder.path()), ["x".repeat(255)]);
        assert!(replace(Path::new("/"), 0o600, b"").is_err());
        let missing = replace(&folder.path().join("no/file"), 0o600, b"");
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

#[test]
fn a_pipe_or_a_directory_that_was_planted_neither_blocks_nor_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let long_ago = TimeSpec::new(1_000_000_000, 0);
    let planted = [".file.mirrorball-unfinished-d", ".file.mirrorball-unfinished-p"];
    let [directory, pipe] = planted.map(|name| folder.path().join(name));
    fs::create_dir(&directory).unwrap();
    mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    for path in [&directory, &pipe] {
        let how = UtimensatFlags::NoFollowSymlink;
        utimensat(AT_FDCWD, path, &long_ago, &long_ago, how).unwrap();
    }
    drop(AtomicFile::beside(&folder.path().join("file")).unwrap());
    assert_eq!(names(folder.path()), planted);
}

#[test]
fn files_become_remains_at_an_age() {
    let folder = tempfile::tempdir().unwrap();
    let opened = open_folder(folder.path()).unwrap();
    let file = File::create(folder.path().join("file")).unwrap();
    let is_remains = |age| {
        file.set_modified(SystemTime::now() - age).unwrap();
        super::is_remains(&opened, OsStr::new("file"))
    };
    assert!(is_remains(REMAINS_AGE));
    assert!(!is_remains(REMAINS_AGE - Duration::from_secs(20)));
    assert!(!super::is_remains(&opened, OsStr::new("missing")));
}

#[test]
fn a_random_name_that_is_taken_is_replaced_by_another_until_attempts_run_out() {
    let attempts = &Cell::new(0);
    let taken = |free_at| {
        move |_: &OsStr| {
            attempts.set(attempts.get() + 1);
            match attempts.get() {
                attempt if attempt >= free_at => Ok(attempt),
                _ => Err(io::ErrorKind::AlreadyExists.into()),
            }
        }
    };
    let (attempt, name) = with_random_name(OsStr::new("file"), taken(3)).unwrap();
    assert_eq!(attempt, 3);
    assert!(name.as_bytes().starts_with(b".file.mirrorball-unfinished-"));
    attempts.set(0);
    let error = with_random_name(OsStr::new("file"), taken(u32::MAX)).unwrap_err();
    assert_eq!(
        (error.kind(), attempts.get()),
        (io::ErrorKind::AlreadyExists, ATTEMPTS_MAX)
    );
    attempts.set(0);
    let refused = with_random_name(OsStr::new("file"), |_: &OsStr| -> io::Result<()> {
        attempts.set(attempts.get() + 1);
        Err(io::ErrorKind::PermissionDenied.into())
    });
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(attempts.get(), 1, "another name would be refused, too");
}

#[test]
fn only_errors_of_missing_support_lead_to_a_named_file() {
    let of = |code| has_no_nameless_files(&io::Error::from_raw_os_error(code));
    let missing = [
        libc::EOPNOTSUPP,
        libc::EISDIR,
        libc::ENOENT,
        libc::EINVAL,
        libc::ENOSYS,
    ];
    assert!(missing.into_iter().all(of));
    assert!(![libc::EACCES, libc::ENOSPC, libc::EROFS].into_iter().any(of));
    assert!(!has_no_nameless_files(&io::ErrorKind::InvalidInput.into()));
}

#[test]
fn a_link_to_an_old_file_that_was_planted_stays() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old");
    let file = File::create(&old).unwrap();
    file.set_modified(SystemTime::now() - 2 * REMAINS_AGE).unwrap();
    symlink(&old, folder.path().join(".file.mirrorball-unfinished-l")).unwrap();
    drop(AtomicFile::beside(&folder.path().join("file")).unwrap());
    assert_eq!(names(folder.path()), [".file.mirrorball-unfinished-l", "old"]);
}

#[test]
fn only_a_directory_is_opened_as_the_folder_and_no_program_inherits_it() {
    let folder = tempfile::tempdir().unwrap();
    let opened = open_folder(folder.path()).unwrap();
    let flags = nix::fcntl::fcntl(&opened, nix::fcntl::FcntlArg::F_GETFD).unwrap();
    assert_eq!(flags, libc::FD_CLOEXEC);
    let path = folder.path().join("file");
    fs::write(&path, "").unwrap();
    let error = open_folder(&path).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOTDIR));
}
