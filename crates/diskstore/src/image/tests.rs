//! Store of images: interrupted builds, damage, locks, imports.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use hostfiles::lock::{self, Share};

use super::{ImageError, ImageStore, ImportRequest, Record, import};

fn store() -> (tempfile::TempDir, ImageStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = ImageStore::open(folder.path()).unwrap();
    (folder, store)
}

fn kernel(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("some-kernel");
    fs::write(&path, b"\x7fELF and so on").unwrap();
    path
}

fn imported(folder: &Path, store: &ImageStore, name: &str) -> Record {
    let disk = folder.join("some-disk");
    let mut bytes = vec![0; 1 << 20];
    bytes[300_000..300_004].copy_from_slice(b"data");
    fs::write(&disk, bytes).unwrap();
    let request = ImportRequest {
        name: name.into(),
        kernel: Some(kernel(folder)),
        disk: Some(disk),
        ..ImportRequest::default()
    };
    import(store, &request, &mut |_, _| {}).unwrap()
}

fn entries(store: &ImageStore) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(store.images())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn error_for_a_missing_image_lists_the_images_and_help() {
    let (folder, store) = store();
    imported(folder.path(), &store, "one");
    let text = store.get("none").unwrap_err().to_string();
    assert!(
        text.contains("there are: one") && text.contains("mirrorball image build debian-12"),
        "{text}"
    );
}

#[test]
fn an_imported_image_is_whole_and_verifies() {
    let (folder, store) = store();
    let record = imported(folder.path(), &store, "one");
    let image = store.get("one").unwrap();
    assert_eq!(image.record, record);
    assert_eq!(fs::read(image.kernel.unwrap()).unwrap(), b"\x7fELF and so on");
    let (disk, format) = image.disk.unwrap();
    assert_eq!(format, crate::disk::Format::Raw);
    assert_eq!(&fs::read(disk).unwrap()[300_000..300_004], b"data");
    store.verify("one").unwrap();
}

#[test]
fn an_image_is_closed_to_other_users_and_its_files_are_not_written_again() {
    let (folder, store) = store();
    // Its source files are readable by all users.
    imported(folder.path(), &store, "one");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let image = store.images().join("one");
    assert_eq!(mode(&image), 0o700);
    let files: Vec<_> = fs::read_dir(&image)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    assert_eq!(files.len(), 4, "{files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o400, "{file:?}");
    }
    let build = store.begin("two").unwrap();
    assert_eq!(
        (mode(&build.folder), mode(&build.folder.join("lock"))),
        (0o700, 0o600)
    );
    // Other users can't list the images.
    assert_eq!(mode(&store.images()) & 0o066, 0);
}

#[test]
fn an_image_whose_lock_is_held_is_an_error_that_names_the_holder() {
    let (folder, store) = store();
    imported(folder.path(), &store, "one");
    let path = store.images().join("one/lock");
    let held = lock::at_once(fs::File::open(&path).unwrap(), Share::Exclusive).unwrap();
    let error = store.get_within("one", Duration::from_millis(50)).unwrap_err();
    let ImageError::Io { source, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(source.kind(), io::ErrorKind::TimedOut);
    let holder = format!("process {}", std::process::id());
    assert!(source.to_string().contains(&holder), "{source}");
    drop(held);
    store.get("one").unwrap();
}

/// The lock can't be opened, as for a process at its limit of open files.
#[test]
fn an_image_and_a_build_are_removed_only_when_their_lock_was_taken() {
    let (folder, store) = store();
    imported(folder.path(), &store, "one");
    let build = store.images().join(".building-999999999-two");
    fs::create_dir(&build).unwrap();
    for folder in [&build, &store.images().join("one")] {
        let _ = fs::remove_file(folder.join("lock"));
        std::os::unix::fs::symlink("lock", folder.join("lock")).unwrap();
    }
    assert!(matches!(store.remove("one"), Err(ImageError::Io { .. })));
    drop(store.begin("three").unwrap());
    assert_eq!(entries(&store), [".building-999999999-two", "one"]);
    // Without a lock there is neither a user nor a builder.
    for folder in [&build, &store.images().join("one")] {
        fs::remove_file(folder.join("lock")).unwrap();
    }
    store.remove("one").unwrap();
    drop(store.begin("three").unwrap());
    assert!(entries(&store).is_empty());
}

#[test]
fn a_changed_file_is_found() {
    let (folder, store) = store();
    imported(folder.path(), &store, "one");
    let disk = store.images().join("one/root.raw");
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o600)).unwrap();
    let mut bytes = fs::read(&disk).unwrap();
    bytes[700_000] = 1;
    fs::write(&disk, &bytes).unwrap();
    assert!(matches!(store.verify("one"), Err(ImageError::Damaged { .. })));
    fs::write(&disk, b"short").unwrap();
    assert!(matches!(store.get("one"), Err(ImageError::Damaged { .. })));
}

#[test]
fn an_image_in_use_is_not_removed() {
    let (folder, store) = store();
    imported(folder.path(), &store, "one");
    let image = store.get("one").unwrap();
    assert!(matches!(store.remove("one"), Err(ImageError::InUse(_))));
    drop(image);
    store.remove("one").unwrap();
    assert!(entries(&store).is_empty());
}

#[test]
fn an_interrupted_build_leaves_nothing() {
    let (_folder, store) = store();
    let build = store.begin("one").unwrap();
    fs::write(build.folder.join("vmlinuz"), "half").unwrap();
    drop(build);
    assert!(entries(&store).is_empty());
}

#[test]
fn remains_of_a_killed_builder_are_removed_by_the_next_and_a_living_ones_are_not() {
    let (folder, store) = store();
    let dead = store.images().join(".building-999999999-dead");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("lock"), "").unwrap();
    let living = store.begin("living").unwrap();
    imported(folder.path(), &store, "one");
    assert!(!dead.exists() && living.folder.exists());
    assert_eq!(entries(&store).len(), 2);
}

#[test]
fn a_name_is_taken_once_and_never_leads_out_of_the_store() {
    let (folder, store) = store();
    imported(folder.path(), &store, "one");
    assert!(matches!(store.begin("one"), Err(ImageError::Exists(_))));
    for name in ["", ".", "..", "a/b", ".hidden", "-x", "a b"] {
        assert!(matches!(store.begin(name), Err(ImageError::Name(_))), "{name}");
        assert!(matches!(store.remove(name), Err(ImageError::Name(_))), "{name}");
        assert!(matches!(store.get(name), Err(ImageError::Name(_))), "{name}");
    }
}

#[test]
fn a_file_that_is_neither_kernel_nor_disk_is_refused() {
    let (folder, store) = store();
    let odd = folder.path().join("odd");
    fs::write(&odd, b"hello").unwrap();
    let request = |kernel: bool| ImportRequest {
        name: "one".into(),
        kernel: kernel.then(|| odd.clone()),
        disk: (!kernel).then(|| odd.clone()),
        ..ImportRequest::default()
    };
    for kernel in [true, false] {
        assert!(matches!(
            import(&store, &request(kernel), &mut |_, _| {}),
            Err(ImageError::File { .. })
        ));
    }
    assert!(entries(&store).is_empty());
}

#[test]
fn a_qcow2_with_a_backing_file_is_refused() {
    let (folder, store) = store();
    let disk = folder.path().join("disk");
    let mut bytes = vec![0; 512];
    bytes[..4].copy_from_slice(b"QFI\xfb");
    bytes[15] = 104;
    fs::write(&disk, bytes).unwrap();
    let request = ImportRequest {
        name: "one".into(),
        disk: Some(disk),
        ..ImportRequest::default()
    };
    assert!(matches!(
        import(&store, &request, &mut |_, _| {}),
        Err(ImageError::File { .. })
    ));
}
