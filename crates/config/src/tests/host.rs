//! Specs that a host refuses; the hosts here are simulated.

use std::io::{self, ErrorKind};
use std::path::Path;

use super::refused::one_line;
use super::shown;
use crate::{Access, ConfigError, FileKind, HostFacts, VmFile, check_host, duplicate_names, parse};

const KERNEL: &str = "[kernel]\npath = \"vmlinuz\"\ninitrd = \"initrd\"\n";
const DISK: &str =
    "name = \"a\"\nimage = \"i\"\n[[disks]]\npath = \"d\"\nmode = \"exclusive\"\npersistent = true\n";

fn all_is_well(_: &Path, _: Access) -> io::Result<FileKind> {
    Ok(FileKind::File)
}

fn nothing_is_there(_: &Path, _: Access) -> io::Result<FileKind> {
    Err(ErrorKind::NotFound.into())
}

fn nothing_may_be_read(_: &Path, _: Access) -> io::Result<FileKind> {
    Err(ErrorKind::PermissionDenied.into())
}

fn nothing_may_be_written(_: &Path, access: Access) -> io::Result<FileKind> {
    match access {
        Access::Read => Ok(FileKind::File),
        Access::Write => Err(ErrorKind::PermissionDenied.into()),
    }
}

fn only_kernels_are_there(path: &Path, _: Access) -> io::Result<FileKind> {
    if path == Path::new("vmlinuz") {
        Ok(FileKind::File)
    } else {
        Err(ErrorKind::NotFound.into())
    }
}

fn all_are_directories(_: &Path, _: Access) -> io::Result<FileKind> {
    Ok(FileKind::Directory)
}

fn all_are_pipes(_: &Path, _: Access) -> io::Result<FileKind> {
    Ok(FileKind::Other)
}

fn all_are_block_devices(_: &Path, _: Access) -> io::Result<FileKind> {
    Ok(FileKind::BlockDevice)
}

type Open = fn(&Path, Access) -> io::Result<FileKind>;

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
    let cases: [(&str, Open, &str, &str); 9] = [
        (
            "image = \"i\"\nmemory = \"2G\"\n",
            all_is_well,
            r#"2:10 "2G": 2G of memory is more than the host has (1G)"#,
            "give the VM less",
        ),
        (
            KERNEL,
            nothing_is_there,
            r#"2:8 "vmlinuz": kernel "vmlinuz": no such file"#,
            "check the path; relative paths start at the VM file's folder",
        ),
        (
            KERNEL,
            only_kernels_are_there,
            r#"3:10 "initrd": initrd "initrd": no such file"#,
            "check the path; relative paths start at the VM file's folder",
        ),
        (
            KERNEL,
            nothing_may_be_read,
            r#"2:8 "vmlinuz": kernel "vmlinuz": no permission to read it"#,
            "give your user permission to read it",
        ),
        (
            KERNEL,
            all_are_directories,
            r#"2:8 "vmlinuz": kernel "vmlinuz": is a directory"#,
            "name a file",
        ),
        (
            KERNEL,
            all_are_block_devices,
            r#"2:8 "vmlinuz": kernel "vmlinuz": is not a file"#,
            "name a file",
        ),
        (
            DISK,
            nothing_is_there,
            r#"4:8 "d": disk "d": no such file"#,
            "check the path; relative paths start at the VM file's folder",
        ),
        (
            DISK,
            nothing_may_be_written,
            r#"4:8 "d": disk "d": no permission to write it"#,
            "give your user permission to write it, or drop `persistent`",
        ),
        (
            DISK,
            all_are_pipes,
            r#"4:8 "d": disk "d": is not a file"#,
            "name a file",
        ),
    ];
    for (text, open, error, help) in cases {
        let found = one_line(text, &check(text, open).unwrap_err());
        assert_eq!(found, format!("{error}; help: {help}"));
    }
}

#[test]
fn a_missing_disk_of_flags_is_shown_without_a_text() {
    let facts = HostFacts {
        memory_bytes: 1 << 30,
        open: nothing_is_there,
    };
    let spec = parse("flags", DISK).unwrap();
    assert_eq!(
        shown(&check_host(&spec, None, &facts).unwrap_err()),
        "\n  × --disk: disk \"d\": no such file\n  help: check the path\n"
    );
}

#[test]
fn a_block_device_may_be_a_disk() {
    assert!(check(DISK, all_are_block_devices).is_ok());
}

#[test]
fn a_host_with_everything_refuses_nothing() {
    assert!(check(KERNEL, all_is_well).is_ok());
    assert!(check(DISK, all_is_well).is_ok());
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
