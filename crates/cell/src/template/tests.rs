use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, SystemTime};

use config::VmSpec;
use config::settings::ShareBetween;
use config::vm::{DiskFormatSpec, DiskMode, DiskSpec, NetKind, ShareSpec};
use diskstore::image::Record;
use hostfiles::lock::{self, Share};

use super::*;
use crate::snapshot::directory::caller;

const LIMIT: Duration = Duration::from_secs(20);

fn record(kernel: &str) -> Record {
    let file = serde_json::json!({ "file": "vmlinux", "bytes": 1, "digest": kernel });
    serde_json::from_value(serde_json::json!({
        "version": 1, "name": "tiny", "kernel": file, "initrd": null, "disk": null, "format": null,
        "cmdline": "quiet", "built_from": "", "created_s": 0, "agent": "1",
    }))
    .unwrap()
}

fn host() -> HostIdentity {
    HostIdentity {
        processor: "p".to_owned(),
        kernel: "6.1".to_owned(),
    }
}

fn spec(text: &str) -> VmSpec {
    config::parse("vm.toml", &format!("image = \"tiny\"\nwarm = true\n{text}")).unwrap()
}

fn basis(text: &str) -> Basis {
    Basis::of(&spec(text), &record("sha256:1"), ShareBetween::All, &host())
}

fn store(data: &Path) -> TemplateStore {
    TemplateStore::open(data, &[caller()]).unwrap()
}

/// Writes the files of a snapshot with a memory of 4 KiB.
fn write_snapshot(place: &Path) {
    fs::create_dir(place).unwrap();
    fs::write(place.join("memory"), [0; 4096]).unwrap();
    fs::write(place.join("state.json"), "{}").unwrap();
    let manifest = serde_json::json!({
        "version": 1, "name": "template", "spec": { "image": "tiny" }, "overlays": [],
        "files": [["memory", 4096], ["state.json", 2]],
    });
    fs::write(place.join("snapshot.json"), manifest.to_string()).unwrap();
    for entry in fs::read_dir(place).unwrap() {
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(entry.unwrap().path(), private).unwrap();
    }
    fs::set_permissions(place, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
}

/// Makes a template of `bytes`, last used `used_s` seconds after 1970; returns its key.
fn make(store: &TemplateStore, basis: &Basis, bytes: u64, used_s: u64) -> Key {
    let Begun::Making(making) = store.begin(basis, LIMIT).unwrap() else {
        panic!("there is one already");
    };
    write_snapshot(&making.snapshot());
    let template = making.publish(bytes).unwrap();
    let used = template.snapshot.with_file_name("used");
    let used = fs::File::options().write(true).open(used).unwrap();
    used.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(used_s))
        .unwrap();
    template.key
}

fn keys(store: &TemplateStore) -> Vec<Key> {
    store.list().unwrap().into_iter().map(|entry| entry.key).collect()
}

fn files(data: &Path) -> Vec<String> {
    let entries = fs::read_dir(data.join("templates")).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn each_thing_that_a_template_stands_on_changes_its_key() {
    let all = [
        basis(""),
        basis("memory = \"256M\""),
        basis("cpus = 2"),
        basis("nets = []"),
        basis("nets = [{ kind = \"subnet\" }]"),
        basis("nets = [{ kind = \"user\" }, { kind = \"subnet\" }]"),
        basis("nets = [{ kind = \"subnet\" }, { kind = \"user\" }]"),
        basis("disks = [{ path = \"a\" }]"),
        basis("disks = [{ path = \"a\" }, { path = \"b\" }]"),
        basis("disks = [{ path = \"a\", read_only = true }]"),
        basis("disks = [{ path = \"a\", queues = 2 }]"),
        basis("share_group = \"red\""),
        Basis::of(&spec(""), &record("sha256:2"), ShareBetween::All, &host()),
        Basis::of(&spec(""), &record("sha256:1"), ShareBetween::Group, &host()),
        Basis::of(
            &spec(""),
            &Record {
                cmdline: "debug".to_owned(),
                ..record("sha256:1")
            },
            ShareBetween::All,
            &host(),
        ),
        Basis::of(
            &spec(""),
            &Record {
                agent: Some("2".to_owned()),
                ..record("sha256:1")
            },
            ShareBetween::All,
            &host(),
        ),
        Basis::of(
            &spec(""),
            &record("sha256:1"),
            ShareBetween::All,
            &HostIdentity {
                processor: "q".to_owned(),
                ..host()
            },
        ),
        Basis::of(
            &spec(""),
            &record("sha256:1"),
            ShareBetween::All,
            &HostIdentity {
                kernel: "6.2".to_owned(),
                ..host()
            },
        ),
    ];
    let mut keys: Vec<Key> = all.iter().map(|basis| basis.key().unwrap()).collect();
    assert!(
        keys.iter()
            .all(|key| Key::parse(key.as_str()).as_ref() == Some(key))
    );
    let count = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), count);
    // The caller's own is in no key.
    let own = basis("name = \"web\"\ncommand = [\"true\"]\ncpu_limit = 1.5\nsandbox = \"require\"");
    assert_eq!(own.key().unwrap(), basis("").key().unwrap());
    let ports = basis("nets = [{ kind = \"user\", forward = [\"8080:80\"] }]");
    assert_eq!(ports.key().unwrap(), basis("").key().unwrap());
    let network = basis("nets = [{ kind = \"subnet\", network = \"red\", bandwidth = \"1M\" }]");
    let subnet = basis("nets = [{ kind = \"subnet\" }]");
    assert_eq!(network.key().unwrap(), subnet.key().unwrap());
    let file = basis("disks = [{ path = \"b\", mode = \"exclusive\", persistent = true, operations = 9 }]");
    let disk = basis("disks = [{ path = \"a\" }]");
    assert_eq!(file.key().unwrap(), disk.key().unwrap());
}

#[test]
fn vm_of_a_template_has_nothing_of_its_caller() {
    let caller = basis("name = \"web\"\nmemory = \"256M\"\ncpus = 3\nnets = []\ncommand = [\"true\"]");
    let key = caller.key().unwrap();
    let none = Path::new("none");
    let made = caller.spec(&key, none).unwrap();
    assert_eq!(made.name, Some(format!("template-{key}")));
    assert_eq!((made.memory.0, made.cpus), (256 << 20, 3));
    assert_eq!(made.nets.map(|cards| cards.len()), Some(0));
    assert!(!made.warm && made.command.is_none() && made.share.is_none());
    let alone = Basis::of(&spec(""), &record("sha256:1"), ShareBetween::Group, &host());
    let made = alone.spec(&key, none).unwrap();
    assert_eq!(made.share, Some(ShareSpec::Never));
    assert!(config::check(&made).is_ok());
    let red = basis("share_group = \"red\"").spec(&key, none).unwrap();
    assert_eq!(red.share_group.as_deref(), Some("red"));
    assert!(red.share.is_none());
}

#[test]
fn vm_of_a_template_has_empty_disks_and_cards_on_networks_of_its_own() {
    let caller = basis(
        "share_group = \"red\"\n\
         nets = [{ kind = \"subnet\", network = \"red\", forward = [\"80:80\"], host = true }, \
         { kind = \"user\", mac = \"02:00:00:00:00:01\" }]\n\
         disks = [{ path = \"a.raw\", mode = \"exclusive\", persistent = true }, \
         { path = \"b.qcow2\", read_only = true, queues = 3, on_full = \"pause\" }]",
    );
    let key = caller.key().unwrap();
    let made = caller.spec(&key, Path::new("/templates/placeholder")).unwrap();
    config::check(&made).unwrap();
    let cards = made.nets.unwrap();
    let kinds: Vec<_> = cards.iter().map(|card| card.kind).collect();
    assert_eq!(kinds, [NetKind::Subnet, NetKind::User]);
    assert_eq!(cards[0].network, made.name);
    assert!(
        cards
            .iter()
            .all(|card| card.forward.is_empty() && !card.host && card.mac.is_none())
    );
    assert_eq!(made.disks.len(), 2);
    for disk in &made.disks {
        assert_eq!(disk.path, Path::new("/templates/placeholder"));
        assert_eq!(disk.format, Some(DiskFormatSpec::Raw));
        assert_eq!(disk.share, Some(ShareSpec::Never));
        assert_eq!((disk.mode, disk.persistent), (DiskMode::Private, false));
    }
    let shape = |disk: &DiskSpec| (disk.read_only, disk.queues);
    assert_eq!(shape(&made.disks[0]), (false, None));
    assert_eq!(shape(&made.disks[1]), (true, Some(3)));
    let same = TemplateMachine::of(&basis("").spec(&key, Path::new("none")).unwrap());
    assert_eq!(
        same,
        TemplateMachine::of(&spec("")),
        "a card is there unless `nets` is empty"
    );
}

#[test]
fn placeholder_is_a_disk_of_one_empty_sector() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let Begun::Making(making) = store.begin(&basis(""), LIMIT).unwrap() else {
        panic!("there is none");
    };
    let placeholder = making.placeholder().unwrap();
    assert_eq!(fs::read(&placeholder).unwrap(), [0; 512]);
    assert_eq!(fs::metadata(&placeholder).unwrap().mode() & 0o777, 0o600);
    assert_eq!(PLACEHOLDER_SECTORS, 1);
    drop(making);
    assert!(!placeholder.exists());
}

#[test]
fn template_of_the_first_format_is_listed_and_makes_room() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let old = make(&store, &basis("cpus = 2"), 40, 1);
    let description = data.path().join(format!("templates/{old}/template.json"));
    let text = fs::read_to_string(&description).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let of_basis = value["basis"].as_object_mut().unwrap();
    assert!(of_basis.remove("cards").is_some() && of_basis.remove("disks").is_some());
    of_basis.insert("has_card".to_owned(), true.into());
    of_basis.insert("format".to_owned(), 1.into());
    fs::write(&description, value.to_string()).unwrap();
    assert_eq!(keys(&store), std::slice::from_ref(&old));
    let new = make(&store, &basis(""), 40, 5);
    assert_eq!(store.fit(50, &new).unwrap().len(), 1);
    assert_eq!(keys(&store), [new]);
}

#[test]
fn no_path_is_a_key() {
    for text in [
        "",
        "..",
        "../../etc",
        "0123456789abcde",
        "0123456789ABCDEF",
        "0123456789abcdef0",
    ] {
        assert_eq!(Key::parse(text), None, "{text:?}");
    }
}

#[test]
fn template_is_found_after_it_was_made_and_not_before() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let basis = basis("");
    assert!(matches!(store.find(&basis).unwrap(), Found::Missing));
    let key = make(&store, &basis, 5, 1);
    assert_eq!(store.list().unwrap()[0].used_s, 1);
    let Found::Ready(template) = store.find(&basis).unwrap() else {
        panic!("it was made");
    };
    assert_eq!(template.key, key);
    assert!(template.snapshot.join("memory").exists());
    let entry = store.list().unwrap().remove(0);
    assert_eq!((entry.bytes, &entry.basis), (5, &basis));
    assert!(entry.used_s > 1, "its use is recorded");
    drop(template);
    assert!(matches!(store.begin(&basis, LIMIT).unwrap(), Begun::Made(_)));
    let mode = fs::metadata(data.path().join("templates")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn template_that_was_cut_off_is_made_again() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let basis = basis("");
    for (damaged, why) in [("snapshot/memory", "instead of 4096"), ("template.json", "EOF")] {
        let key = make(&store, &basis, 5, 1);
        let file = data.path().join("templates").join(key.as_str()).join(damaged);
        fs::File::options()
            .write(true)
            .open(file)
            .unwrap()
            .set_len(3)
            .unwrap();
        match store.find(&basis).unwrap() {
            Found::Damaged(found) => assert!(found.contains(why), "{found}"),
            found => panic!("{damaged}: {found:?}"),
        }
        make(&store, &basis, 5, 1);
        assert!(matches!(store.find(&basis).unwrap(), Found::Ready(_)));
        assert!(store.remove(&key).unwrap());
    }
}

#[test]
fn template_under_another_ones_name_is_made_again() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let templates = data.path().join("templates");
    let (asked, other) = (basis(""), basis("cpus = 2"));
    let key = make(&store, &other, 5, 1);
    let name = asked.key().unwrap();
    fs::rename(templates.join(key.as_str()), templates.join(name.as_str())).unwrap();
    match store.find(&asked).unwrap() {
        Found::Damaged(why) => assert!(why.contains("another template's"), "{why}"),
        found => panic!("{found:?}"),
    }
    make(&store, &asked, 5, 1);
    assert!(matches!(store.find(&asked).unwrap(), Found::Ready(_)));
}

#[test]
fn description_is_read_up_to_its_greatest_length() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let key = make(&store, &basis(""), 5, 1);
    let description = data.path().join(format!("templates/{key}/template.json"));
    let text = fs::read_to_string(&description).unwrap();
    fs::write(&description, format!("{}{text}", " ".repeat(1 << 10))).unwrap();
    assert_eq!(keys(&store), [key]);
    fs::write(&description, format!("{}{text}", " ".repeat(64 << 10))).unwrap();
    assert!(keys(&store).is_empty());
    assert!(matches!(store.find(&basis("")).unwrap(), Found::Damaged(_)));
}

#[test]
fn maker_removes_remains_of_the_dead_and_none_of_another_maker() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let Begun::Making(living) = store.begin(&basis("cpus = 2"), LIMIT).unwrap() else {
        panic!("there is none");
    };
    let templates = data.path().join("templates");
    let dead = basis("cpus = 3").key().unwrap();
    for kind in ["making", "removing"] {
        fs::create_dir(templates.join(format!(".{kind}-1-{dead}"))).unwrap();
    }
    // A process creates the lock before the directory that it makes.
    fs::write(templates.join(format!("{dead}.lock")), "").unwrap();
    fs::create_dir(templates.join(".making-1-no-key")).unwrap();
    let key = make(&store, &basis(""), 5, 1);
    let directories: Vec<_> = files(data.path())
        .into_iter()
        .filter(|name| !name.ends_with(".lock"))
        .collect();
    let of_living = living.snapshot();
    let of_living = of_living.parent().unwrap().file_name().unwrap();
    assert_eq!(
        directories,
        [".making-1-no-key", of_living.to_str().unwrap(), key.as_str()]
    );
}

#[test]
fn waiter_for_the_lock_of_a_removed_template_waits_for_the_next_one() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let path = data
        .path()
        .join(format!("templates/{}.lock", basis("").key().unwrap()));
    let locked = || {
        let file = hostfiles::private::lock_file(&path).unwrap();
        lock::at_once(file, Share::Exclusive).unwrap().unwrap()
    };
    let remover = locked();
    let other = store.clone();
    let waiter = thread::spawn(move || other.begin(&basis(""), LIMIT).map(drop));
    thread::sleep(Duration::from_millis(200));
    fs::remove_file(&path).unwrap();
    let maker = locked();
    drop(remover);
    thread::sleep(Duration::from_millis(300));
    assert!(!waiter.is_finished(), "the lock of no file is no lock");
    drop(maker);
    waiter.join().unwrap().unwrap();
}

#[test]
fn maker_that_fails_or_dies_leaves_nothing_that_is_taken_for_a_template() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let basis = basis("");
    let key = basis.key().unwrap();
    let Begun::Making(making) = store.begin(&basis, LIMIT).unwrap() else {
        panic!("there is none");
    };
    write_snapshot(&making.snapshot());
    drop(making);
    assert_eq!(files(data.path()), [format!("{key}.lock")]);
    // A killed one runs no destructor. Its lock is free.
    let remains = data.path().join("templates").join(format!(".making-1-{key}"));
    fs::create_dir(&remains).unwrap();
    write_snapshot(&remains.join("snapshot"));
    assert!(matches!(store.find(&basis).unwrap(), Found::Missing));
    assert!(keys(&store).is_empty());
    make(&store, &basis, 5, 1);
    assert!(!remains.exists());
}

#[test]
fn second_maker_waits_for_the_first_and_finds_its_template() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let Begun::Making(making) = store.begin(&basis(""), LIMIT).unwrap() else {
        panic!("there is none");
    };
    let other = store.clone();
    let second = thread::spawn(move || match other.begin(&basis(""), LIMIT).unwrap() {
        Begun::Made(template) => template.key,
        Begun::Making(_) => panic!("two make it"),
    });
    thread::sleep(Duration::from_millis(200));
    assert!(!second.is_finished());
    write_snapshot(&making.snapshot());
    let key = making.publish(5).unwrap().key;
    assert_eq!(second.join().unwrap(), key);
}

#[test]
fn templates_of_a_changed_image_are_removed_and_others_stay() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    make(&store, &basis(""), 5, 1);
    let changed = record("sha256:2");
    let current = make(
        &store,
        &Basis::of(&spec(""), &changed, ShareBetween::All, &host()),
        5,
        1,
    );
    let of_other = Record {
        name: "other".to_owned(),
        ..record("sha256:1")
    };
    let other = make(
        &store,
        &Basis::of(&spec(""), &of_other, ShareBetween::All, &host()),
        5,
        1,
    );
    assert_eq!(store.remove_stale(&changed).unwrap().len(), 1);
    let mut stay = vec![current, other];
    stay.sort();
    assert_eq!(keys(&store), stay);
}

#[test]
fn image_with_another_file_command_line_or_agent_makes_a_template_stale() {
    let basis = basis("");
    let now = || record("sha256:1");
    let with_more = Record {
        initrd: now().kernel,
        ..now()
    };
    let with_cmdline = Record {
        cmdline: "debug".to_owned(),
        ..now()
    };
    let with_agent = Record { agent: None, ..now() };
    assert!(!basis.is_stale(&now()));
    for changed in [record("sha256:2"), with_more, with_cmdline, with_agent] {
        assert!(basis.is_stale(&changed), "{changed:?}");
    }
}

#[test]
fn least_recently_used_templates_make_room_and_one_in_use_stays() {
    let data = tempfile::tempdir().unwrap();
    let store = store(data.path());
    let old = make(&store, &basis("cpus = 1"), 40, 10);
    let older = make(&store, &basis("cpus = 2"), 40, 5);
    let new = make(&store, &basis("cpus = 3"), 40, 1);
    let removed = store.fit(100, &new).unwrap();
    assert_eq!(removed.len(), 1);
    assert_eq!(removed[0].key, older);
    // A start that reads it holds the lock.
    let Found::Ready(template) = store.find(&basis("cpus = 1")).unwrap() else {
        panic!("it stays");
    };
    assert!(store.fit(50, &new).unwrap().is_empty());
    assert!(!store.remove(&old).unwrap());
    drop(template);
    assert_eq!(store.fit(50, &new).unwrap().len(), 1);
    assert_eq!(keys(&store), std::slice::from_ref(&new));
    assert_eq!(files(data.path()), [new.to_string(), format!("{new}.lock")]);
}

#[test]
fn processor_is_that_of_the_first_cpu_without_what_changes_by_itself() {
    let cpu = |mhz: &str, flags: &str, number: u32| {
        let head = format!("processor\t: {number}\nvendor_id\t: G\nmodel name\t: M\n");
        head + &format!("cpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\n")
    };
    let one = basis::processor(&(cpu("1", "fpu", 0) + &cpu("1", "fpu", 1)));
    assert_eq!(one, basis::processor(&cpu("2000", "fpu", 7)));
    assert_ne!(one, basis::processor(&cpu("1", "fpu avx", 0)));
    assert!(HostIdentity::of_this_host().is_ok());
}
