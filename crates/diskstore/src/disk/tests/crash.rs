//! A completed flush survives the death of the process at any moment.
//!
//! A child process writes with two queues and reports which of its batches are flushed. It is killed at a
//! random moment, and every sector of the disk is read again. A sector must hold the content of the last
//! flushed batch, or of a write of the one batch in progress. The next child continues with the same disk.
//! `DISK_SEED` repeats a run's load; the moments of the kills depend on the machine.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::super::{IoQueue, Operation, Submission, maintenance};
use super::*;

const DISK_BYTES: u64 = 6 << 20;
const SECTOR: u64 = 512;
const QUEUES: u64 = 2;
/// The queues alternate in stripes of the disk whose size is not a cluster's, so that they share clusters.
const STRIPE_SECTORS: u64 = 200;
/// Bytes per read.
const READ_BYTES: usize = 1 << 20;
/// Kills before a new disk: while a disk is new, clusters are allocated all the time.
const KILLS_OF_A_DISK: u64 = 20;
/// Kills between two checks of the file by qemu-img.
const KILLS_OF_A_CHECK: u64 = 4;
const START_LIMIT: Duration = Duration::from_secs(20);

/// Content of a sector: the base's, zeroes, or the stamp of a write; [`ANY`] after a discard.
type Value = u64;
const ZERO: Value = 0;
const BASE: Value = 1;
const ANY: Value = u64::MAX;

#[derive(Clone, Copy, Debug)]
enum Action {
    Write,
    Zero { unmap: bool },
    Discard,
}

#[derive(Clone, Copy, Debug)]
struct Change {
    action: Action,
    first: u64,
    sectors: u64,
    stamp: Value,
}

impl Change {
    fn value(&self) -> Value {
        match self.action {
            Action::Write => self.stamp,
            Action::Zero { .. } => ZERO,
            Action::Discard => ANY,
        }
    }
}

/// The generator "SplitMix64".
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// A batch of a queue, the same in the child that writes it and the parent that checks it.
fn batch(seed: u64, queue: u64, number: u64) -> Vec<Change> {
    let mut random = Random(seed ^ (queue << 56) ^ number.wrapping_mul(0x1_0000_0001));
    let count = 1 + random.below(24);
    let stripes = DISK_BYTES / SECTOR / STRIPE_SECTORS / QUEUES;
    let change = |index| {
        let stripe = random.below(stripes) * QUEUES + queue;
        let start = random.below(STRIPE_SECTORS);
        let most = match random.below(3) {
            0 => 200,
            1 => 16,
            _ => 3,
        };
        let action = match random.below(8) {
            0 => Action::Discard,
            1 => Action::Zero {
                unmap: random.below(2) == 0,
            },
            _ => Action::Write,
        };
        Change {
            action,
            first: stripe * STRIPE_SECTORS + start,
            sectors: (1 + random.below(most)).min(STRIPE_SECTORS - start),
            stamp: 1 << 62 | queue << 56 | number << 8 | index,
        }
    };
    (0..count).map(change).collect()
}

fn content(stamp: Value, sector: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    for words in bytes.chunks_mut(16) {
        words[..8].copy_from_slice(&stamp.to_le_bytes());
        words[8..].copy_from_slice(&sector.to_le_bytes());
    }
    bytes
}

/// Whether a sector holds this value, whole.
fn holds(bytes: &[u8], sector: u64, base: &[u8], value: Value) -> bool {
    match value {
        ZERO => bytes == [0; SECTOR as usize],
        BASE => bytes == &base[(sector * SECTOR) as usize..][..SECTOR as usize],
        stamp => bytes == content(stamp, sector),
    }
}

/// Value of a sector; `None` if it is torn, another sector's, or was never written.
fn value_of(bytes: &[u8], sector: u64, base: &[u8]) -> Option<Value> {
    let stamp = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    [ZERO, BASE, stamp]
        .into_iter()
        .find(|value| holds(bytes, sector, base, *value))
}

fn finish(queue: &mut IoQueue, operation: Operation) {
    match queue.submit(operation, 1) {
        Submission::Done(result) => result.unwrap(),
        Submission::NoRoom(_, error) => panic!("{error}"),
        Submission::Pending => {
            queue.send().unwrap();
            loop {
                if let Some((_, result)) = queue.completed() {
                    return result.unwrap();
                }
                std::thread::yield_now();
            }
        }
    }
}

fn apply(queue: &mut IoQueue, change: &Change) {
    let (offset, bytes) = (change.first * SECTOR, change.sectors * SECTOR);
    match change.action {
        Action::Write => {
            let mut data: Vec<u8> = (change.first..change.first + change.sectors)
                .flat_map(|sector| content(change.stamp, sector))
                .collect();
            let from = segments(&mut data, 4096);
            finish(queue, Operation::Write { offset, from });
        }
        Action::Zero { unmap } => finish(queue, Operation::WriteZeroes { offset, bytes, unmap }),
        Action::Discard => finish(queue, Operation::Discard { offset, bytes }),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A raw file written in place.
    Raw,
    /// A qcow2 file written in place.
    Qcow2,
    /// A persistent overlay over a raw file.
    Overlay,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Raw, Self::Qcow2, Self::Overlay];

    fn request(self, directory: &Path, vm: &str) -> DiskRequest {
        let mut wanted = request(&directory.join("disk"), vm);
        wanted.persistent = true;
        match self {
            Self::Overlay => wanted.overlay_path = Some(directory.join("overlay")),
            _ => wanted.mode = Mode::Exclusive,
        }
        wanted
    }

    /// Path of the file with the disk's own data, if it is qcow2.
    fn qcow2(self, directory: &Path) -> Option<PathBuf> {
        match self {
            Self::Raw => None,
            Self::Qcow2 => Some(directory.join("disk")),
            Self::Overlay => Some(directory.join("overlay")),
        }
    }
}

/// The child: `KIND SEED BATCH BATCH DIRECTORY`, where a batch is the first one of a queue.
#[test]
fn writer_process() {
    let Some(value) = subprocess_value() else { return };
    let words: Vec<_> = value.splitn(5, ' ').collect();
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let kind = Kind::ALL[number(0) as usize];
    let disk = store(&kind.request(Path::new(words[4]), "writer"));
    std::thread::scope(|scope| {
        for queue in 0..QUEUES {
            let (disk, seed, first) = (disk.clone(), number(1), number(2 + queue as usize));
            scope.spawn(move || {
                let mut io = IoQueue::new(disk, 8);
                for number in first.. {
                    batch(seed, queue, number)
                        .iter()
                        .for_each(|change| apply(&mut io, change));
                    finish(&mut io, Operation::Flush);
                    // Standard output is flushed at the end of a line.
                    println!("flushed {queue} {number}");
                }
            });
        }
    });
}

/// A disk under test and its expected content.
struct Trial {
    kind: Kind,
    seed: u64,
    directory: tempfile::TempDir,
    base: Vec<u8>,
    sectors: Vec<Value>,
    /// The next batch of each queue.
    next: [u64; QUEUES as usize],
}

impl Trial {
    fn new(kind: Kind, seed: u64, in_memory: bool) -> Self {
        let memory = Path::new("/dev/shm");
        let directory = if in_memory && memory.is_dir() {
            tempfile::tempdir_in(memory).unwrap()
        } else {
            tempfile::tempdir().unwrap()
        };
        let base = pattern(DISK_BYTES as usize);
        let raw = patterned(directory.path(), "disk", DISK_BYTES as usize);
        if kind == Kind::Qcow2 {
            std::fs::rename(&raw, directory.path().join("raw")).unwrap();
            let (from, to) = (directory.path().join("raw"), text(&raw));
            qemu_img(&["convert", "-f", "raw", "-O", "qcow2", text(&from), to]);
        }
        Self {
            kind,
            seed,
            directory,
            base,
            sectors: vec![BASE; (DISK_BYTES / SECTOR) as usize],
            next: [0; QUEUES as usize],
        }
    }

    fn start(&self) -> Child {
        let kind = Kind::ALL.iter().position(|kind| *kind == self.kind).unwrap();
        let [first, second] = self.next;
        let directory = text(self.directory.path());
        let value = format!("{kind} {} {first} {second} {directory}", self.seed);
        in_subprocess("disk::tests::crash::writer_process", &value)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Runs a child for a while, kills it, and applies its reports; returns the batches it flushed.
    fn kill_one(&mut self, random: &mut Random) -> u64 {
        let mut child = self.start();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (say, said) = mpsc::channel();
        let listener = std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let Some((_, rest)) = line.split_once("flushed ") else {
                    continue;
                };
                let (queue, number) = rest.split_once(' ').unwrap();
                say.send((queue.parse::<usize>().unwrap(), number.parse::<u64>().unwrap()))
                    .unwrap();
            }
        });
        // One in eight dies during its start; the others at work, some right after the start.
        let mut flushed = Vec::new();
        if random.below(8) > 0 {
            let first = said.recv_timeout(START_LIMIT);
            flushed.push(first.expect("the child flushed nothing"));
        }
        let most = [300, 3_000, 20_000, 60_000][random.below(4) as usize];
        let micros = random.below(most);
        std::thread::sleep(Duration::from_micros(micros));
        child.kill().unwrap();
        child.wait().unwrap();
        listener.join().unwrap();
        flushed.extend(said.try_iter());
        for (queue, number) in &flushed {
            assert_eq!(
                *number, self.next[*queue],
                "seed {}: batches out of order",
                self.seed
            );
            for change in batch(self.seed, *queue as u64, *number) {
                let range = change.first as usize..(change.first + change.sectors) as usize;
                self.sectors[range].fill(change.value());
            }
            self.next[*queue] += 1;
        }
        flushed.len() as u64
    }

    /// Reads every sector, and takes its value as the new expected content.
    fn verify(&mut self, with_qemu: bool) {
        // Values that the batches in progress may have written.
        let mut maybe = HashMap::<u64, Vec<Value>>::new();
        for (queue, number) in self.next.iter_mut().enumerate() {
            for change in batch(self.seed, queue as u64, *number) {
                for sector in change.first..change.first + change.sectors {
                    maybe.entry(sector).or_default().push(change.value());
                }
            }
            *number += 1;
        }
        let disk = store(&self.kind.request(self.directory.path(), "reader"));
        let pieces = (0..DISK_BYTES).step_by(READ_BYTES);
        let bytes: Vec<u8> = pieces
            .flat_map(|offset| read(&*disk, offset, READ_BYTES))
            .collect();
        for (sector, bytes) in (0_u64..).zip(bytes.chunks(SECTOR as usize)) {
            let expected = self.sectors[sector as usize];
            if holds(bytes, sector, &self.base, expected) {
                continue;
            }
            let found = value_of(bytes, sector, &self.base);
            let maybe = maybe.get(&sector).map_or(&[][..], Vec::as_slice);
            let any = expected == ANY || maybe.contains(&ANY);
            assert!(
                found.is_some_and(|found| any || maybe.contains(&found)),
                "{:?}, seed {}, batches {:?}: sector {sector} holds {found:x?} ({:x?}...), not \
                 {expected:x} or one of {maybe:x?}",
                self.kind,
                self.seed,
                self.next,
                &bytes[..16]
            );
            self.sectors[sector as usize] = found.unwrap();
        }
        drop(disk);
        if let Some(qcow2) = self.kind.qcow2(self.directory.path()) {
            sound(&qcow2, self.seed, with_qemu);
        }
    }
}

/// Leaked clusters cost only space; any other finding is an error (exit status 2).
fn sound(qcow2: &Path, seed: u64, with_qemu: bool) {
    let report = maintenance::check(qcow2, Some(Format::Qcow2), &mut |_, _| {}).unwrap();
    assert_eq!(report.faults, 0, "seed {seed}: {:?}", report.told);
    if !with_qemu {
        return;
    }
    let check = Command::new("qemu-img")
        .args(["check", "-q", text(qcow2)])
        .output()
        .unwrap();
    let code = check.status.code();
    let said = String::from_utf8_lossy(&check.stdout);
    assert!(matches!(code, Some(0 | 3)), "seed {seed}: {said}");
}

fn survives(kind: Kind, kills: u64) {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("DISK_SEED").map_or_else(|_| now(), |seed| seed.parse().unwrap());
    println!("{kind:?}: DISK_SEED={seed}");
    let start = Instant::now();
    let mut random = Random(seed);
    let mut flushed = 0;
    for disk in 0..kills / KILLS_OF_A_DISK {
        // The test kills a process, not the host: memory suffices, and every fourth disk is on a real file
        // system.
        let mut trial = Trial::new(kind, random.next(), disk % 4 != 0);
        for kill in 0..KILLS_OF_A_DISK {
            flushed += trial.kill_one(&mut random);
            trial.verify(kill % KILLS_OF_A_CHECK == 0);
        }
    }
    println!(
        "{kind:?}: {kills} kills, {flushed} flushed batches, {:?}",
        start.elapsed()
    );
    assert!(
        flushed > kills,
        "{kind:?}: the children hardly wrote: {flushed} batches"
    );
}

#[test]
fn flushed_writes_to_a_raw_disk_survive_200_kills() {
    survives(Kind::Raw, 200);
}

#[test]
fn flushed_writes_to_a_qcow2_disk_survive_40_kills() {
    survives(Kind::Qcow2, 40);
}

#[test]
fn flushed_writes_to_a_persistent_overlay_survive_200_kills() {
    survives(Kind::Overlay, 200);
}
