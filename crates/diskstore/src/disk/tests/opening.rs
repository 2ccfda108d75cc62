//! Opening a disk: its format, its files, and the errors.

use std::os::unix::fs::{FileExt, PermissionsExt};

use super::super::fingerprint::Fingerprint;
use super::super::maintenance::{Target, commit, compact};
use super::super::{DiskError, open};
use super::*;

fn message(result: Result<super::super::OpenDisk, DiskError>) -> String {
    let message = result.unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

/// Runs `work` with the rights of the user `nobody` where this process is root, else with its own.
fn as_an_ordinary_user<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    const NOBODY: libc::c_int = 65534;
    const SAME: libc::c_int = -1;
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // SAFETY: passes only numbers. The library's function would change all threads; the system call
            // changes this one, which ends with the work.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, SAME, NOBODY, SAME) };
            // SAFETY: no arguments.
            let is_root = unsafe { libc::geteuid() } == 0;
            assert!(changed == 0 || !is_root, "root may become any user");
            work()
        });
        worker.join().unwrap()
    })
}

fn in_place(path: &Path) -> DiskRequest {
    let mut wanted = request(path, "vm");
    (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
    wanted
}

#[test]
fn missing_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none.raw");
    let message = message(open(&request(&path, "vm")));
    assert!(message.contains("none.raw: no such file"), "{message}");
}

#[test]
fn directory_is_no_disk() {
    let directory = tempfile::tempdir().unwrap();
    let message = message(open(&request(directory.path(), "vm")));
    assert!(message.contains("is a directory"), "{message}");
}

#[test]
fn empty_file_is_no_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 100);
    assert!(message(open(&request(&path, "vm"))).contains("less than one sector"));
}

#[test]
fn foreign_format_gets_the_command_that_converts_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.vmdk");
    qemu_img(&["create", "-q", "-f", "vmdk", text(&path), "1M"]);
    let message = message(open(&request(&path, "vm")));
    assert!(
        message.contains("VMDK") && message.contains("qemu-img convert"),
        "{message}"
    );
}

#[test]
fn unwritable_file_can_be_used_privately_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o444)).unwrap();
    // A private disk has its overlay in the same directory.
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
    // Root may write all files.
    let (in_place, privately) = as_an_ordinary_user(|| (open(&in_place(&path)), open(&request(&path, "vm"))));
    assert!(message(in_place).contains("use it privately"));
    privately.unwrap();
}

#[test]
fn private_use_puts_a_scratch_overlay_over_an_unwritable_base() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let disk = open(&request(&path, "vm")).unwrap();
    let formats: Vec<_> = disk.layers.iter().map(|layer| layer.format).collect();
    assert_eq!(formats, [Format::Scratch, Format::Raw]);
    assert_eq!(disk.size_bytes, 1 << 16);
    let mut base = &disk.layers[1].file;
    assert!(std::io::Write::write(&mut base, b"x").is_err());
}

#[test]
fn read_only_use_needs_no_overlay() {
    let directory = tempfile::tempdir().unwrap();
    let path = patterned(directory.path(), "disk", 1 << 16);
    let mut wanted = request(&path, "vm");
    wanted.read_only = true;
    let disk = open(&wanted).unwrap();
    assert_eq!(disk.layers.len(), 1);
    assert!(disk.read_only);
}

#[test]
fn guest_that_writes_a_qcow2_header_into_its_raw_disk_reads_no_file_of_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let secret = patterned(directory.path(), "secret", 1 << 16);
    let header = directory.path().join("header");
    create_qcow2_over(text(&secret), &header);
    let path = directory.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    // The guest's write, through a disk that was detected as raw.
    write(
        &*store(&in_place(&path)),
        0,
        &std::fs::read(&header).unwrap()[..4096],
    );

    for wanted in [in_place(&path), request(&path, "vm")] {
        match open(&wanted) {
            Ok(disk) => {
                assert_eq!(disk.layers.last().unwrap().format, Format::Raw, "reinterpreted");
                assert_eq!(disk.size_bytes, 1 << 20);
            }
            // On file systems without attributes.
            Err(error) => assert!(matches!(error, DiskError::UntrustedBacking { .. }), "{error}"),
        }
    }
}

#[test]
fn qcow2_with_a_backing_file_needs_an_explicit_format() {
    let directory = tempfile::tempdir().unwrap();
    patterned(directory.path(), "base", 1 << 16);
    let path = directory.path().join("disk.qcow2");
    create_qcow2_over("base", &path);
    let mut wanted = request(&path, "vm");
    let refused = message(open(&wanted));
    assert!(refused.contains("format = \"qcow2\""), "{refused}");
    wanted.format = Some(Format::Qcow2);
    assert_eq!(open(&wanted).unwrap().layers.len(), 3);
}

#[test]
fn cyclic_backing_chain_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", text(&path), "1M"]);
    qemu_img(&["rebase", "-u", "-F", "qcow2", "-b", "disk.qcow2", text(&path)]);
    let mut wanted = request(&path, "vm");
    wanted.format = Some(Format::Qcow2);
    assert!(message(open(&wanted)).contains("more than 16 files"));
}

#[test]
fn overlay_of_another_base_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let one = patterned(directory.path(), "one", 1 << 16);
    let two = patterned(directory.path(), "two", 1 << 16);
    let overlay = directory.path().join("own");
    let mut wanted = request(&one, "vm");
    (wanted.persistent, wanted.overlay_path) = (true, Some(overlay.clone()));
    drop(open(&wanted).unwrap());
    wanted.path = two;
    let refused = message(open(&wanted));
    assert!(
        refused.contains("was made for") && refused.contains("/one"),
        "{refused}"
    );
    let names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
    assert_eq!(names.len(), 3, "files left over: {names:?}");
}

#[test]
fn overlay_of_a_base_that_was_written_since_is_refused_until_its_mark_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base", 1 << 16);
    let overlay = directory.path().join("own");
    let mut wanted = request(&base, "vm");
    (wanted.persistent, wanted.overlay_path) = (true, Some(overlay.clone()));
    drop(open(&wanted).unwrap());
    // Neither use nor maintenance changes the mark.
    compact(&overlay, Some(Format::Qcow2), &mut |_, _| ()).unwrap();
    drop(open(&wanted).unwrap());
    commit(&overlay, Some(Format::Qcow2), &Target::Base, &mut |_, _| ()).unwrap();
    drop(open(&wanted).unwrap());
    let time = std::fs::metadata(&base).unwrap().modified().unwrap();
    let file = File::options().write(true).open(&base).unwrap();
    file.write_all_at(b"other", 512).unwrap();
    file.set_modified(time + std::time::Duration::from_nanos(1_000_000))
        .unwrap();
    let refused = message(open(&wanted));
    assert!(
        refused.contains("was written since") && refused.contains("setfattr -x user.mirrorball.base"),
        "{refused}"
    );
    Fingerprint::forget(&File::open(&overlay).unwrap());
    open(&wanted).unwrap();
}

#[test]
fn persistent_overlay_opens_with_qemu_over_its_base() {
    let directory = tempfile::tempdir().unwrap();
    let base = patterned(directory.path(), "base", 1 << 20);
    let overlay = directory.path().join("own");
    let mut wanted = request(&base, "vm");
    (wanted.persistent, wanted.overlay_path) = (true, Some(overlay.clone()));
    let disk = store(&wanted);
    write(&*disk, 4096, &[5; 8192]);
    disk.write_back().unwrap();
    drop(disk);
    qemu_img(&["check", text(&overlay)]);
    let info = qemu_img(&["info", text(&overlay)]);
    assert!(info.contains("backing file format: raw"), "{info}");
    // Opens it again: the writes are still there.
    assert_eq!(read(&*store(&wanted), 4096, 8192), vec![5; 8192]);
}

#[test]
fn all_files_that_a_disk_stands_on_lie_below_the_allowed_directories() {
    let directory = tempfile::tempdir().unwrap();
    let allowed = directory.path().join("allowed");
    std::fs::create_dir(&allowed).unwrap();
    let base = |folder: &Path| patterned(folder, "base.raw", 1 << 16);
    let (inside, outside) = (base(&allowed), base(directory.path()));
    let overlay = |name: &str, base: &Path| {
        let path = allowed.join(name);
        qemu_img(&[
            "create",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            text(base),
            text(&path),
        ]);
        path
    };
    let open = |path: &Path| {
        open(&DiskRequest {
            format: Some(Format::Qcow2),
            below: Some(hostfiles::names::Below {
                directories: vec![allowed.clone()],
                setting: "`paths`".to_owned(),
            }),
            ..request(path, "vm")
        })
    };
    let opened = open(&overlay("good", &inside)).unwrap();
    assert_eq!(
        opened.layers.len(),
        3,
        "a temporary overlay, the file and its base"
    );
    for base in [&outside, Path::new("/etc/passwd"), Path::new("../base.raw")] {
        let path = allowed.join("bad");
        let real = if base.is_absolute() {
            base.to_owned()
        } else {
            allowed.join(base)
        };
        qemu_img(&[
            "create",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            text(&real),
            text(&path),
        ]);
        qemu_img(&["rebase", "-u", "-F", "raw", "-b", text(base), text(&path)]);
        let message = message(open(&path));
        assert!(
            message.contains("`paths` lists these") || message.contains("without `..`"),
            "{base:?}: {message}"
        );
    }
}
