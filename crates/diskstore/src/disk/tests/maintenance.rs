//! Commit, diff, compact and check lose no byte, even if killed at any moment, and damage is found.

use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::maintenance::{Change, Overlays, Target, check, commit, compact, diff};
use super::super::{DiskError, boot, open};
use super::model::{DISK_BYTES, SECTOR, Step, step};
use super::*;

const BIG: usize = 4 << 20;

fn quiet() -> impl FnMut(u64, u64) {
    |done, total| assert!(done <= total)
}

/// A base, an overlay over it with changes, and the bytes that it shows.
struct Made {
    _directory: tempfile::TempDir,
    base: PathBuf,
    overlay: PathBuf,
    shown: Vec<u8>,
}

impl Made {
    /// Whether the file system has extended attributes.
    fn keeps_attributes(&self) -> bool {
        let other = self.base.with_extension("other");
        let file = File::create(&other).unwrap();
        boot::record(&file, Some("kept")).unwrap();
        boot::is_recorded(&file, Some("kept"))
    }
}

fn overlay_of(base: &Path) -> DiskRequest {
    let mut wanted = request(base, "a");
    (wanted.persistent, wanted.overlay_path) = (true, Some(base.with_extension("own")));
    wanted
}

fn make(base_format: &str, change: impl FnOnce(&dyn Store)) -> Made {
    let directory = tempfile::tempdir().unwrap();
    let raw = patterned(directory.path(), "base.raw", DISK_BYTES);
    let base = directory.path().join("base");
    qemu_img(&["convert", "-f", "raw", "-O", base_format, text(&raw), text(&base)]);
    let wanted = overlay_of(&base);
    let disk = store(&wanted);
    change(&*disk);
    disk.write_back().unwrap();
    let shown = read(&*disk, 0, DISK_BYTES);
    drop(disk);
    Made {
        _directory: directory,
        overlay: wanted.overlay_path.unwrap(),
        base,
        shown,
    }
}

fn play(disk: &dyn Store, steps: &[Step]) {
    for step in steps {
        match *step {
            Step::Write {
                sector,
                sectors,
                value,
            } => write(disk, (sector * SECTOR) as u64, &vec![value; sectors * SECTOR]),
            Step::Zero {
                sector,
                sectors,
                unmap,
            } => disk
                .write_zeroes((sector * SECTOR) as u64, (sectors * SECTOR) as u64, unmap)
                .unwrap(),
            _ => {}
        }
    }
}

/// Content of the disk as its VM sees it.
fn shown(made: &Made) -> Vec<u8> {
    read(&*store(&overlay_of(&made.base)), 0, DISK_BYTES)
}

fn as_raw(path: &Path, format: &str) -> Vec<u8> {
    let copy = path.with_extension("copy");
    qemu_img(&["convert", "-f", format, "-O", "raw", text(path), text(&copy)]);
    std::fs::read(copy).unwrap()
}

fn sound(path: &Path) {
    let report = check(path, Some(Format::Qcow2), &mut quiet()).unwrap();
    assert_eq!((report.faults, report.leaked_bytes), (0, 0), "{:?}", report.told);
    qemu_img(&["check", "-f", "qcow2", text(path)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn diff_commit_and_compact_keep_every_byte(
        steps in prop::collection::vec(step(), 1..40),
        base_format in prop_oneof![Just("raw"), Just("qcow2")],
    ) {
        let made = make(base_format, |disk| play(disk, &steps));
        // The difference is that of the bytes.
        let found = diff(&made.overlay, Some(Format::Qcow2), &mut quiet()).unwrap();
        let mut rebuilt = pattern(DISK_BYTES);
        for Change { offset, bytes } in &found.changes {
            let range = *offset as usize..(offset + bytes) as usize;
            prop_assert!(rebuilt[range.clone()].chunks(SECTOR).zip(made.shown[range.clone()].chunks(SECTOR))
                .all(|(old, new)| old != new));
            rebuilt[range.clone()].copy_from_slice(&made.shown[range]);
        }
        prop_assert!(rebuilt == made.shown);
        // A new file has all of it, and the overlay is unchanged.
        for (format, name) in [(Format::Raw, "raw"), (Format::Qcow2, "qcow2")] {
            let path = made.base.with_extension(name).with_file_name(format!("new.{name}"));
            let target = Target::New { path: path.clone(), format };
            commit(&made.overlay, Some(Format::Qcow2), &target, &mut quiet()).unwrap();
            prop_assert!(as_raw(&path, name) == made.shown);
        }
        prop_assert!(shown(&made) == made.shown);
        let compacted = compact(&made.overlay, Some(Format::Qcow2), &mut quiet()).unwrap();
        prop_assert!(compacted.after_bytes <= compacted.before_bytes);
        prop_assert!(shown(&made) == made.shown);
        sound(&made.overlay);
        // After a commit to the base, the base has all of it, and the overlay is empty over it.
        commit(&made.overlay, Some(Format::Qcow2), &Target::Base, &mut quiet()).unwrap();
        prop_assert!(as_raw(&made.base, base_format) == made.shown);
        prop_assert!(shown(&made) == made.shown);
        let found = diff(&made.overlay, Some(Format::Qcow2), &mut quiet()).unwrap();
        prop_assert!(found.held_bytes == 0 && found.changes.is_empty());
        sound(&made.overlay);
        if base_format == "qcow2" {
            sound(&made.base);
        }
        let entries = std::fs::read_dir(made.base.parent().unwrap()).unwrap();
        let names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name.to_string_lossy().contains("unfinished"))
            .collect();
        prop_assert!(names.is_empty(), "{names:?}");
    }
}

#[test]
fn nothing_is_done_to_a_disk_that_a_vm_uses_and_the_vm_is_named() {
    let made = make("raw", |disk| write(disk, 0, &[1; 4096]));
    let before = (
        std::fs::read(&made.base).unwrap(),
        std::fs::read(&made.overlay).unwrap(),
    );
    let in_use = |result: Result<(), DiskError>| {
        let text = result.unwrap_err().to_string();
        assert!(
            text.contains("VM busy (process ") && text.ends_with("stop it first"),
            "{text}"
        );
    };
    let said = Some(Format::Qcow2);
    let mut user = overlay_of(&made.base);
    user.vm_name = "busy".into();
    let running = open(&user).unwrap();
    let new = Target::New {
        path: made.base.with_extension("new"),
        format: Format::Raw,
    };
    in_use(commit(&made.overlay, said, &Target::Base, &mut quiet()).map(drop));
    in_use(commit(&made.overlay, said, &new, &mut quiet()).map(drop));
    in_use(diff(&made.overlay, said, &mut quiet()).map(drop));
    in_use(compact(&made.overlay, said, &mut quiet()).map(drop));
    in_use(check(&made.overlay, said, &mut quiet()).map(drop));
    drop(running);
    // Another VM uses the same base: only writes to the base must wait.
    let mut other = request(&made.base, "busy");
    other.read_only = true;
    let running = open(&other).unwrap();
    in_use(commit(&made.overlay, said, &Target::Base, &mut quiet()).map(drop));
    diff(&made.overlay, said, &mut quiet()).unwrap();
    check(&made.overlay, said, &mut quiet()).unwrap();
    drop(running);
    assert!(
        before
            == (
                std::fs::read(&made.base).unwrap(),
                std::fs::read(&made.overlay).unwrap()
            )
    );
}

#[test]
fn an_existing_file_is_not_overwritten_by_a_commit() {
    let made = make("raw", |disk| write(disk, 0, &[1; 4096]));
    let target = Target::New {
        path: made.base.clone(),
        format: Format::Raw,
    };
    let error = commit(&made.overlay, Some(Format::Qcow2), &target, &mut quiet()).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    assert!(std::fs::read(&made.base).unwrap() == pattern(DISK_BYTES));
}

#[test]
fn a_disk_without_a_base_can_neither_be_compared_nor_committed() {
    let directory = tempfile::tempdir().unwrap();
    let raw = patterned(directory.path(), "disk", DISK_BYTES);
    let refused = |result: Result<(), DiskError>| {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("stands on no base"), "{text}");
    };
    refused(diff(&raw, None, &mut quiet()).map(drop));
    refused(commit(&raw, None, &Target::Base, &mut quiet()).map(drop));
}

/// The guest of an overlay wrote a qcow2 header that names a file of the host; its raw base has it after the
/// commit.
#[test]
fn header_that_a_guest_wrote_is_ignored_after_a_commit() {
    let directory = tempfile::tempdir().unwrap();
    let evil = directory.path().join("evil");
    let secret = patterned(directory.path(), "secret", DISK_BYTES);
    create_qcow2_over(text(&secret), &evil);
    let header = std::fs::read(&evil).unwrap();
    let mut made = make("raw", |disk| write(disk, 0, &header[..65536]));
    made.shown[..65536].copy_from_slice(&header[..65536]);
    let new = made.base.with_extension("new");
    let target = Target::New {
        path: new.clone(),
        format: Format::Raw,
    };
    commit(&made.overlay, Some(Format::Qcow2), &target, &mut quiet()).unwrap();
    commit(&made.overlay, Some(Format::Qcow2), &Target::Base, &mut quiet()).unwrap();
    for path in [&made.base, &new] {
        match open(&request(path, "a")) {
            Ok(disk) => assert!(read(&*assemble_open(disk), 0, DISK_BYTES) == made.shown),
            // On file systems without attributes.
            Err(error) => assert!(matches!(error, DiskError::UntrustedBacking { .. }), "{error}"),
        }
    }
}

#[test]
fn compacting_gives_back_freed_and_repeated_space() {
    // In a raw file, zeroes become holes.
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("disk");
    let mut bytes = vec![0; BIG];
    bytes[1 << 20..2 << 20].copy_from_slice(&pattern(1 << 20));
    std::fs::write(&raw, &bytes).unwrap();
    open_rw(&raw).sync_all().unwrap();
    let compacted = compact(&raw, None, &mut quiet()).unwrap();
    assert!(compacted.before_bytes >= BIG as u64, "{compacted:?}");
    assert!(compacted.after_bytes < (1 << 20) + 65536, "{compacted:?}");
    assert!(std::fs::read(&raw).unwrap() == bytes);
    // An overlay drops clusters that equal the base, and zeroes.
    let made = make("raw", |disk| {
        write(disk, 0, &[7; DISK_BYTES]);
        write(disk, 65536, &pattern(DISK_BYTES)[65536..]);
        write(disk, 0, &[0; 4096]);
    });
    std::fs::set_permissions(&made.overlay, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let compacted = compact(&made.overlay, Some(Format::Qcow2), &mut quiet()).unwrap();
    assert!(compacted.before_bytes > DISK_BYTES as u64, "{compacted:?}");
    assert!(compacted.after_bytes < 512 << 10, "{compacted:?}");
    let about = std::fs::metadata(&made.overlay).unwrap();
    assert_eq!(
        (about.mode() & 0o777, about.blocks() * 512),
        (0o640, compacted.after_bytes)
    );
    assert!(shown(&made) == made.shown);
    // A second run gains nothing, and the file stays.
    let again = compact(&made.overlay, Some(Format::Qcow2), &mut quiet()).unwrap();
    assert_eq!(again.before_bytes, again.after_bytes);
    assert_eq!(std::fs::metadata(&made.overlay).unwrap().ino(), about.ino());
}

#[test]
fn a_link_to_a_disk_stays_a_link_when_it_is_compacted() {
    let made = make("raw", |disk| {
        write(disk, 0, &[7; DISK_BYTES]);
        write(disk, 0, &pattern(DISK_BYTES));
    });
    let link = made.base.with_file_name("link");
    std::os::unix::fs::symlink(&made.overlay, &link).unwrap();
    let compacted = compact(&link, Some(Format::Qcow2), &mut quiet()).unwrap();
    assert!(compacted.after_bytes < compacted.before_bytes);
    assert!(link.symlink_metadata().unwrap().is_symlink());
    assert!(shown(&made) == made.shown);
}

/// Damage of each kind, at the place where qemu-img finds it too.
#[test]
fn damage_is_found_where_qemu_finds_it() {
    type Damage = fn(&mut [u8]);
    let big = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let cases: [(&str, Damage); 6] = [
        ("used 2 times", |file| {
            let l2 = l2_of(file);
            let first: [u8; 8] = file[l2..l2 + 8].try_into().unwrap();
            file[l2 + 8..l2 + 16].copy_from_slice(&first);
        }),
        ("behind the end", |file| {
            let l2 = l2_of(file);
            file[l2..l2 + 8].copy_from_slice(&(1_u64 << 63 | 1 << 40).to_be_bytes());
        }),
        ("not on a cluster's border", |file| {
            let l2 = l2_of(file);
            let offset = u64::from_be_bytes(file[l2..l2 + 8].try_into().unwrap());
            file[l2..l2 + 8].copy_from_slice(&(offset + 512).to_be_bytes());
        }),
        ("marked shared", |file| {
            let l2 = l2_of(file);
            file[l2] &= 0x7f;
        }),
        ("counted 0", |file| {
            let counts = counts_of(file);
            file[counts + 2 * 6..counts + 2 * 7].fill(0);
        }),
        ("marked used once", |file| {
            let counts = counts_of(file);
            file[counts + 2 * 6 + 1] = 2;
        }),
    ];
    fn l2_of(file: &[u8]) -> usize {
        let at = |at: usize| u64::from_be_bytes(file[at..at + 8].try_into().unwrap());
        (at(at(40) as usize) & 0x00ff_ffff_ffff_fe00) as usize
    }
    fn counts_of(file: &[u8]) -> usize {
        let at = |at: usize| u64::from_be_bytes(file[at..at + 8].try_into().unwrap());
        at(at(48) as usize) as usize
    }
    for (told, damage) in cases {
        let directory = tempfile::tempdir().unwrap();
        let raw = patterned(directory.path(), "raw", DISK_BYTES);
        let path = directory.path().join("disk");
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&path)]);
        sound(&path);
        let mut file = std::fs::read(&path).unwrap();
        assert!(big(&file, 40) > 0);
        damage(&mut file);
        std::fs::write(&path, &file).unwrap();
        let report = check(&path, None, &mut quiet()).unwrap();
        assert!(report.faults > 0, "{told}: nothing found");
        assert!(
            report.told.iter().any(|text| text.contains(told)),
            "{told}: {:?}",
            report.told
        );
        let qemu = Command::new("qemu-img")
            .args(["check", "-q", text(&path)])
            .status()
            .unwrap();
        assert_eq!(qemu.code(), Some(2), "{told}: qemu-img");
    }
}

/// After a crash of the host that kept a table and lost a refcount, the cluster was allocated twice.
#[test]
fn a_qcow2_file_with_a_cluster_used_twice_is_not_written_after_the_host_started_again() {
    let made = make("raw", |disk| write(disk, 0, &[7; DISK_BYTES]));
    let mut bytes = std::fs::read(&made.overlay).unwrap();
    let at = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = at(&bytes, 40) as usize;
    let l2 = (at(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    let first: [u8; 8] = bytes[l2..l2 + 8].try_into().unwrap();
    bytes[l2 + 8..l2 + 16].copy_from_slice(&first);
    let file = open_rw(&made.overlay);
    file.write_all_at(&bytes, 0).unwrap();
    boot::record(&file, Some("another start")).unwrap();
    for _ in 0..2 {
        let error = open(&overlay_of(&made.base)).unwrap_err().to_string();
        assert!(
            error.contains("used 2 times") && error.contains("help: "),
            "{error}"
        );
        assert!(std::fs::read(&made.overlay).unwrap() == bytes);
    }
}

#[test]
fn a_sound_qcow2_file_is_checked_once_in_each_start_of_the_host() {
    let made = make("raw", |disk| write(disk, 0, &[7; DISK_BYTES]));
    let file = open_rw(&made.overlay);
    let present = boot::present();
    boot::record(&file, Some("another start")).unwrap();
    assert!(!boot::is_recorded(&file, present.as_deref()));
    drop(open(&overlay_of(&made.base)).unwrap());
    // On file systems with attributes.
    if made.keeps_attributes() {
        assert!(boot::is_recorded(&file, present.as_deref()));
    }
    assert!(!boot::is_recorded(&file, None));
    assert!(shown(&made) == made.shown);
}

#[test]
fn leaks_snapshots_and_compression_are_no_damage() {
    let directory = tempfile::tempdir().unwrap();
    let raw = patterned(directory.path(), "raw", DISK_BYTES);
    let path = directory.path().join("disk");
    qemu_img(&[
        "convert",
        "-c",
        "-f",
        "raw",
        "-O",
        "qcow2",
        text(&raw),
        text(&path),
    ]);
    qemu_img(&["snapshot", "-c", "one", text(&path)]);
    sound(&path);
    qemu_img(&["snapshot", "-d", "one", text(&path)]);
    // Space after the last cluster, counted but unused.
    let file = open_rw(&path);
    let end = file.metadata().unwrap().len().next_multiple_of(65536);
    file.set_len(end + 65536).unwrap();
    let mut place = [0; 8];
    file.read_exact_at(&mut place, 48).unwrap();
    let table = u64::from_be_bytes(place);
    file.read_exact_at(&mut place, table).unwrap();
    let count = u64::from_be_bytes(place) + end / 65536 * 2;
    file.write_all_at(&[0, 1], count).unwrap();
    let report = check(&path, None, &mut quiet()).unwrap();
    assert_eq!(
        (report.faults, report.leaked_bytes),
        (0, 65536),
        "{:?}",
        report.told
    );
}

#[test]
fn overlays_are_listed_and_removed_unless_used() {
    let data = tempfile::tempdir().unwrap();
    let base = patterned(data.path(), "base", DISK_BYTES);
    let overlays = Overlays::of(data.path());
    assert_eq!(overlays.list().unwrap(), []);
    let folder = data.path().join("overlays/web");
    std::fs::create_dir_all(&folder).unwrap();
    let mut wanted = request(&base, "web");
    for disk in ["0", "10", "2"] {
        (wanted.persistent, wanted.overlay_path) = (true, Some(folder.join(format!("{disk}.qcow2"))));
        drop(store(&wanted));
    }
    let running = open(&wanted).unwrap();
    let list = overlays.list().unwrap();
    let disks: Vec<_> = list.iter().map(|overlay| (&*overlay.vm, overlay.disk)).collect();
    assert_eq!(disks, [("web", 0), ("web", 2), ("web", 10)]);
    assert_eq!(list[1].used_by, [std::process::id()]);
    assert!(list[0].base_is_there && list[0].base.as_deref() == Some(&*base.canonicalize().unwrap()));
    assert_eq!(list[0].size_bytes, DISK_BYTES as u64);
    assert_eq!(overlays.standing_on(&base, &list[0].path).unwrap(), list[1..]);
    assert_eq!(overlays.named("web/10").unwrap(), list[2..]);
    let text = overlays.remove(&list[1]).unwrap_err().to_string();
    assert!(text.contains("VM web"), "{text}");
    drop(running);
    list.iter().for_each(|overlay| overlays.remove(overlay).unwrap());
    assert!(!folder.exists() && base.exists());
}

/// Body of the process that compacts and commits repeatedly until it is killed.
#[test]
fn maintenance_process() {
    let Some(value) = subprocess_value() else { return };
    let (what, path) = value.split_once(' ').unwrap();
    let path = Path::new(path);
    println!("begin");
    match what {
        "compact" => drop(compact(path, Some(Format::Qcow2), &mut quiet()).unwrap()),
        _ => drop(commit(path, Some(Format::Qcow2), &Target::Base, &mut quiet()).unwrap()),
    }
}

/// Starts that process; returns once it has begun, with its output, which must stay open.
fn begin(what: &str, overlay: &Path) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = in_subprocess(
        "disk::tests::maintenance::maintenance_process",
        &format!("{what} {}", text(overlay)),
    )
    .stdout(Stdio::piped())
    .spawn()
    .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().contains("begin")));
    (child, lines)
}

#[test]
fn a_kill_during_compacting_or_committing_loses_nothing() {
    const KILLS: u32 = 40;
    let mut finished = 0;
    // Duration of each operation, measured by its first run, which is not killed.
    let mut whole = [Duration::ZERO; 2];
    for kill in 0..KILLS {
        let what = kill as usize % 2;
        let name = ["compact", "commit"][what];
        let base_format = if kill % 4 < 2 { "raw" } else { "qcow2" };
        let made = make(base_format, |disk| {
            write(disk, 0, &[7; DISK_BYTES]);
            write(disk, 65536, &pattern(DISK_BYTES)[65536..DISK_BYTES / 2]);
            disk.write_zeroes(300_000 / 512 * 512, 200 * 512, true).unwrap();
        });
        let (mut child, _output) = begin(name, &made.overlay);
        let start = Instant::now();
        if kill < 2 {
            assert!(child.wait().unwrap().success());
            whole[what] = start.elapsed();
        } else {
            std::thread::sleep(whole[what] * kill / KILLS);
            child.kill().unwrap();
            finished += u32::from(child.wait().unwrap().success());
        }
        assert!(shown(&made) == made.shown, "{name} killed, number {kill}");
        // It can be done again.
        commit(&made.overlay, Some(Format::Qcow2), &Target::Base, &mut quiet()).unwrap();
        assert!(
            as_raw(&made.base, base_format) == made.shown,
            "{name} killed, number {kill}"
        );
        sound(&made.overlay);
    }
    println!("{finished} of {KILLS} had finished before they were killed");
    assert!(finished < KILLS - 2, "none was killed in time");
}
