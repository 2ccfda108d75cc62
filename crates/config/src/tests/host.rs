//! Specs that a host refuses; the hosts here are simulated.

use std::io::{self, ErrorKind};
use std::path::Path;

use super::refused::one_line;
use super::shown;
use crate::{Access, ConfigError, FileKind, HostFacts, VmFile, check_host, duplicate_names, parse};

const KERNEL: &str = "[kernel]\npath = \"vmlinuz\"\ninitrd = \"initrd\"\n";
const DISK: &str =
    "name = \"a\"\nimage = \"i\"\n[[disks]]\npath = \"d\"\nmode = \"exclusive\"\npersistent = true\n";

const CHECK_THE_PATH: &str = "check the path; relative paths start at the VM file's folder";

/// The host's answer to a request to open a file.
type Open = fn(&Path, Access) -> io::Result<FileKind>;

const ALL_ARE_FILES: Open = |_, _| Ok(FileKind::File);
const ALL_ARE_BLOCK_DEVICES: Open = |_, _| Ok(FileKind::BlockDevice);
const ALL_ARE_DIRECTORIES: Open = |_, _| Ok(FileKind::Directory);
const ALL_ARE_PIPES: Open = |_, _| Ok(FileKind::Other);
const NO_FILE_EXISTS: Open = |_, _| Err(ErrorKind::NotFound.into());
const NO_FILE_IS_READABLE: Open = |_, _| Err(ErrorKind::PermissionDenied.into());
const NO_FILE_IS_WRITABLE: Open = |_, access| match access {
    Access::Read => Ok(FileKind::File),
    Access::Write => Err(ErrorKind::PermissionDenied.into()),
};
const ONLY_KERNELS_EXIST: Open = |path, _| match path == Path::new("vmlinuz") {
    true => Ok(FileKind::File),
    false => Err(ErrorKind::NotFound.into()),
};

fn file(name: &str, text: &str) -> VmFile {
    VmFile {
        source_name: name.to_owned(),
        text: text.to_owned(),
        spec: parse(name, text).unwrap(),
    }
}

fn check(text: &str, open: Open) -> Result<(), ConfigError> {
    let facts = HostFacts {
        memory_bytes: 1 << 30,
        open,
    };
    let file = file("vm.toml", text);
    check_host(&file.spec, Some(&file), &facts)
}

#[test]
fn fault_of_the_host_has_its_place_cause_and_help() {
    // A text, with the place of its fault.
    let memory = ("image = \"i\"\nmemory = \"2G\"\n", r#"2:10 "2G""#);
    let kernel = (KERNEL, r#"2:8 "vmlinuz": kernel "vmlinuz""#);
    let initrd = (KERNEL, r#"3:10 "initrd": initrd "initrd""#);
    let disk = (DISK, r#"4:8 "d": disk "d""#);
    for ((text, place), open, cause, help) in [
        (
            memory,
            ALL_ARE_FILES,
            "2G of memory is more than the host has (1G)",
            "give the VM less",
        ),
        (kernel, NO_FILE_EXISTS, "no such file", CHECK_THE_PATH),
        (initrd, ONLY_KERNELS_EXIST, "no such file", CHECK_THE_PATH),
        (disk, NO_FILE_EXISTS, "no such file", CHECK_THE_PATH),
        (
            kernel,
            NO_FILE_IS_READABLE,
            "no permission to read it",
            "give your user permission to read it",
        ),
        (
            disk,
            NO_FILE_IS_WRITABLE,
            "no permission to write it",
            "give your user permission to write it, or drop `persistent`",
        ),
        (kernel, ALL_ARE_DIRECTORIES, "is a directory", "name a file"),
        (kernel, ALL_ARE_BLOCK_DEVICES, "is not a file", "name a file"),
        (disk, ALL_ARE_PIPES, "is not a file", "name a file"),
    ] {
        let found = one_line(text, &check(text, open).unwrap_err());
        assert_eq!(found, format!("{place}: {cause}; help: {help}"));
    }
}

#[test]
fn a_missing_disk_of_flags_is_shown_without_a_text() {
    let facts = HostFacts {
        memory_bytes: 1 << 30,
        open: NO_FILE_EXISTS,
    };
    let spec = parse("flags", DISK).unwrap();
    assert_eq!(
        shown(&check_host(&spec, None, &facts).unwrap_err()),
        "\n  × --disk: disk \"d\": no such file\n  help: check the path\n"
    );
}

#[test]
fn a_block_device_may_be_a_disk() {
    assert!(check(DISK, ALL_ARE_BLOCK_DEVICES).is_ok());
}

#[test]
fn a_host_with_everything_refuses_nothing() {
    assert!(check(KERNEL, ALL_ARE_FILES).is_ok());
    assert!(check(DISK, ALL_ARE_FILES).is_ok());
}

#[test]
fn two_files_with_one_name_are_refused() {
    let files = [
        file("one.toml", "name = \"a\"\nimage = \"i\"\n"),
        file("nameless.toml", "image = \"i\"\n"),
        file("two.toml", "image = \"i\"\nname = \"a\"\n"),
    ];
    let shown = shown(&duplicate_names(&files).unwrap_err());
    assert_eq!(
        shown,
        r#"
  × two VMs named "a": one.toml has it too
   ╭─[two.toml:2:8]
 1 │ image = "i"
 2 │ name = "a"
   ·        ─┬─
   ·         ╰── here
   ╰────
  help: give each VM its own name
"#
    );
}

#[test]
fn kinds_of_files_of_this_host_are_distinguished() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "text").unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
    let open = HostFacts::of_this_host().open;

    assert_eq!(open(&path, Access::Write).unwrap(), FileKind::File);
    assert_eq!(open(folder.path(), Access::Read).unwrap(), FileKind::Directory);
    assert_eq!(
        open(&folder.path().join("socket"), Access::Read).unwrap(),
        FileKind::Other
    );
    assert_eq!(
        open(&folder.path().join("none"), Access::Read)
            .unwrap_err()
            .kind(),
        ErrorKind::NotFound
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"text");
}
