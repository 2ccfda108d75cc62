use std::time::SystemTime;

use super::entry::UNLOCKED_MAX;
use super::*;

#[test]
fn a_name_is_taken_until_its_entry_is_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let entry = registry.claim("a").unwrap();
    assert!(matches!(registry.claim("a"), Err(RegistryError::Taken(name)) if name == "a"));
    registry.claim("b").unwrap();
    drop(entry);
    registry.claim("a").unwrap();
}

#[test]
fn name_stays_taken_while_a_successor_has_the_open_lock() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let entry = registry.claim("a").unwrap();
    let (folder, left) = (entry.folder().to_owned(), entry.lock().try_clone_to_owned());
    let left = File::from(left.unwrap());
    // The predecessor ends like a monitor that transfers its VM: without a destructor.
    std::mem::forget(entry);
    assert!(matches!(registry.claim("a"), Err(RegistryError::Taken(_))));
    let adopted = Entry::adopt(folder.clone(), left).unwrap();
    assert!(matches!(registry.claim("a"), Err(RegistryError::Taken(_))));
    let foreign = File::open(folder.join("lock")).unwrap();
    assert!(
        Entry::adopt(folder, foreign).is_err(),
        "another opening of the file"
    );
    drop(adopted);
    registry.claim("a").unwrap();
}

#[test]
fn entry_of_a_dead_monitor_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let left = directory.path().join("vms/dead");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("lock"), "").unwrap();
    fs::write(left.join("console.sock"), "").unwrap();
    assert!(registry.list().unwrap().is_empty());
    assert!(!left.exists());
    assert!(matches!(
        registry.find("dead"),
        Err(RegistryError::Unknown { .. })
    ));
}

#[test]
fn end_that_no_process_saw_is_noted_once_by_the_command_that_finds_it() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let entry = registry.claim("lost").unwrap();
    entry.write(&record("lost")).unwrap();
    // As after the death of its monitor and its keeper: the lock is free and the directory exists.
    let folder = entry.folder().to_owned();
    let kept = fs::read(folder.join("vm.json")).unwrap();
    drop(entry);
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("lock"), "").unwrap();
    fs::write(folder.join("vm.json"), kept).unwrap();
    for _ in 0..2 {
        assert!(registry.list().unwrap().is_empty());
    }
    let mut events = crate::journal::Reader::from_start(Journal::at(directory.path()));
    let event = events.next_entry().unwrap().expect("the end").known().unwrap();
    assert!(
        matches!(&event.change, Change::VmEnded { vm, status: None, why: Some(_) } if vm == "lost"),
        "{event:?}"
    );
    assert_eq!(events.next_entry().unwrap(), None);
}

#[test]
fn entry_that_is_removed_while_entries_are_listed_is_no_error() {
    let directory = tempfile::tempdir().unwrap();
    Registry::at(directory.path()).unwrap();
    // As if its monitor had removed it since its name was read.
    assert!(remove_stale(&directory.path().join("vms/gone"), drop).unwrap());
}

/// The lock of each can't be opened, as for a process at its limit of open files, or shows nothing.
#[test]
fn an_entry_is_removed_only_when_its_lock_was_taken() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let vms = directory.path().join("vms");
    let living = vms.join("living");
    fs::create_dir(&living).unwrap();
    fs::write(living.join("console.sock"), "").unwrap();
    // A link to itself, which no process can open.
    std::os::unix::fs::symlink("lock", living.join("lock")).unwrap();
    let error = registry.list().unwrap_err().to_string();
    assert!(error.contains("living/lock"), "{error}");
    assert!(matches!(registry.claim("living"), Err(RegistryError::Host(_))));
    assert!(living.join("console.sock").exists());
    fs::remove_dir_all(&living).unwrap();
    // An entry that is being created or removed, and then the remains of one.
    let young = vms.join("young");
    fs::create_dir(&young).unwrap();
    assert!(registry.list().unwrap().is_empty() && young.exists());
    assert!(matches!(registry.claim("young"), Err(RegistryError::Taken(_))));
    let long_ago = SystemTime::now() - 2 * UNLOCKED_MAX;
    File::open(&young).unwrap().set_modified(long_ago).unwrap();
    assert!(registry.list().unwrap().is_empty() && !young.exists());
}

#[test]
fn a_directory_of_other_files_is_refused_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let precious = directory.path().join("vms/precious");
    fs::create_dir_all(&precious).unwrap();
    fs::write(precious.join("disk.raw"), "all").unwrap();
    for _ in 0..2 {
        let error = Registry::at(directory.path()).unwrap_err().to_string();
        assert!(
            error.contains("not made by mirrorball") && error.contains("help: "),
            "{error}"
        );
        assert_eq!(fs::read(precious.join("disk.raw")).unwrap(), b"all");
    }
    fs::remove_dir_all(&precious).unwrap();
    Registry::at(directory.path()).unwrap().claim("a").unwrap();
    Registry::at(directory.path()).unwrap();
}

#[test]
fn files_of_the_registry_are_closed_to_other_users() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let entry = registry.claim("a").unwrap();
    registry.next_cid().unwrap();
    entry.write(&record("a")).unwrap();
    assert_eq!(read(entry.folder()).unwrap().name, "a");
    let vms = directory.path().join("vms");
    for (folder, count) in [(vms.as_path(), 4), (entry.folder(), 2)] {
        let entries: Vec<_> = fs::read_dir(folder).unwrap().map(Result::unwrap).collect();
        assert_eq!(entries.len(), count, "{entries:?}");
        for entry in entries {
            let about = entry.metadata().unwrap();
            let wanted = match about.is_dir() {
                true => private::DIRECTORY_MODE,
                false => 0o600,
            };
            assert_eq!(about.permissions().mode() & 0o7777, wanted, "{entry:?}");
        }
    }
}

#[test]
fn a_guard_that_is_held_is_an_error_that_names_the_holder() {
    let directory = tempfile::tempdir().unwrap();
    let mut registry = Registry::at(directory.path()).unwrap();
    registry.limit = Duration::from_millis(100);
    let held = registry.guard().unwrap();
    let error = registry.list().unwrap_err().to_string();
    let holder = format!("process {}", std::process::id());
    assert!(error.contains("vms/.lock") && error.contains(&holder), "{error}");
    drop(held);
    registry.list().unwrap();
}

fn record(name: &str) -> Record {
    let spec = config::parse("vm.toml", "image = \"x\"").unwrap();
    Record::new(name.to_owned(), spec, CID_FIRST)
}

#[test]
fn addresses_differ() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let cids: Vec<_> = (0..4).map(|_| registry.next_cid().unwrap()).collect();
    assert_eq!(cids, [3, 4, 5, 6]);
}

#[test]
fn addresses_begin_again_after_the_last_and_after_a_damaged_file() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let file = directory.path().join("vms/.cid");
    for (last, next) in [
        ((u32::MAX - 2).to_string(), u32::MAX - 1),
        // All ones is every address (`VMADDR_CID_ANY`).
        ((u32::MAX - 1).to_string(), 3),
        (u32::MAX.to_string(), 3),
        ("x".to_owned(), 3),
    ] {
        fs::write(&file, &last).unwrap();
        assert_eq!(registry.next_cid().unwrap(), next, "after {last}");
    }
}

#[test]
fn name_that_leads_elsewhere_has_no_directory() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let web = directory.path().join("vms/web");
    assert_eq!(registry.folder_of("web").unwrap(), web);
    for wrong in ["", ".", "..", "../web", "a/b", "/web", "web/", "./web"] {
        let error = registry.folder_of(wrong).unwrap_err().to_string();
        assert!(error.contains("is no VM's name"), "{wrong:?}: {error}");
    }
}

#[test]
fn unknown_name_is_refused_with_those_that_run() {
    let directory = tempfile::tempdir().unwrap();
    let registry = Registry::at(directory.path()).unwrap();
    let refusal = || registry.find("c").unwrap_err().to_string();
    assert_eq!(refusal(), "no VM named c is running; none is");
    // An entry without a record is of a VM that is being started.
    let starting = registry.claim("c").unwrap();
    assert_eq!(refusal(), "no VM named c is running; none is");
    drop(starting);
    let running = ["b", "a"].map(|name| {
        let entry = registry.claim(name).unwrap();
        entry.write(&record(name)).unwrap();
        entry
    });
    assert_eq!(refusal(), "no VM named c is running; running: a, b");
    assert_eq!(registry.find("a").unwrap(), running[1].folder());
}
