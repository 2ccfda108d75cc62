//! Tests of files of shared folders: real leases on a file system of this host.

use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::*;
use crate::sharing::FolderSharing;
use crate::sharing::leases::FILES_MAX;

const NODE: u64 = 7;

/// A folder with a file of [`IMAGE_PAGES`] pages, and a VM without disks.
struct World {
    folder: tempfile::TempDir,
    vm: Vm,
    sharing: FolderSharing,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), image_bytes()).unwrap();
        let ram = ram_of(None);
        let mapper = Mapper::new(&ram, Vec::new(), Advice::Ordinary).unwrap();
        let sharing = FolderSharing::new(mapper.clone());
        let vm = with(ram, mapper, image(), Share::Never);
        Self { folder, vm, sharing }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("file")
    }

    /// Opens the file with a lease, as the folder's process does.
    fn leased(&self) -> File {
        let file = File::open(self.path()).unwrap();
        take_lease(&file);
        file
    }

    /// Copies pages of the file to guest memory, as the device does.
    fn read(&self, pages: u64) {
        let host = self.vm.ram.get_host_address(GuestAddress(AT)).unwrap() as u64;
        let pieces = [(host, pages * PAGE_BYTES)];
        self.sharing.before_copy(NODE, 0, pieces.into_iter()).unwrap();
        let bytes = &image_bytes()[..(pages * PAGE_BYTES) as usize];
        self.vm.ram.write_slice(bytes, GuestAddress(AT)).unwrap();
    }

    fn background(&self, done: impl Fn(&Vm) -> bool) {
        self.vm.background(Share::Never, done);
    }
}

fn lease(file: &File) -> nix::Result<()> {
    // A waiting writer's signal goes to the process that took the lease.
    folders::lend::Lender::ignore_signals().unwrap();
    // SAFETY: the call takes no pointers.
    let taken = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK as libc::c_int) };
    nix::errno::Errno::result(taken).map(drop)
}

/// Takes a lease. A child that another test starts has the file open for writing until its program begins.
fn take_lease(file: &File) {
    let limit = Instant::now() + Duration::from_secs(20);
    while let Err(error) = lease(file) {
        assert!(error == nix::Error::EAGAIN && Instant::now() < limit, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A program of the host that waits to open the file for writing, and then cuts it to one byte.
fn writer(path: PathBuf) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(1).unwrap();
        file.write_all_at(b"new", 0).unwrap();
    })
}

#[test]
fn pages_of_a_folders_file_are_mapped_and_plain_again_before_a_writer_changes_it() {
    let mut world = World::new();
    let leased = world.leased();
    assert!(world.sharing.receive(NODE, leased));
    world.read(32);
    world.background(|vm| vm.counted("mapped_later") == 32);
    assert_eq!((world.vm.plain_pages(), world.vm.counted("leased_files")), (0, 1));
    // The guest's own write stays its own.
    world
        .vm
        .ram
        .write_slice(&[99], GuestAddress(AT + 5 * PAGE_BYTES))
        .unwrap();
    let mut expected = image_bytes()[..32 * 4096].to_vec();
    expected[5 * 4096] = 99;
    assert_eq!(fs::read(world.path()).unwrap(), image_bytes());
    let writer = writer(world.path());
    world.background(|vm| vm.counted("leases_broken") == 1);
    writer.join().unwrap();
    assert_eq!(fs::read(world.path()).unwrap(), b"new");
    assert_eq!(world.vm.bytes(AT, 32 * PAGE_BYTES), expected);
    assert_eq!(world.vm.plain_pages(), 32);
    for counter in ["mapped_pages", "leased_files", "candidates"] {
        assert_eq!(world.vm.counted(counter), 0, "{counter}");
    }
}

#[test]
fn writer_waits_only_for_a_vm_that_runs_or_is_held_by_an_order() {
    let mut world = World::new();
    let leased = world.leased();
    assert!(world.sharing.receive(NODE, leased));
    world.read(8);
    world.background(|vm| vm.counted("mapped_later") == 8);
    let writer = writer(world.path());
    let pressure = world.vm.disk.pressure.clone();
    let background = Background::open(world.vm.mapper.clone(), pressure, Vec::new());
    let quiescer = Quiescer::new();
    let pause = quiescer.pause().unwrap();
    quiescer.set_held(true);
    let deadline = Instant::now() + Duration::from_secs(20);
    while background.watch_leases(&quiescer) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    writer.join().unwrap();
    quiescer.set_held(false);
    drop(pause);
    assert_eq!(world.vm.bytes(AT, 8 * PAGE_BYTES), image_bytes()[..8 * 4096]);
    assert_eq!(world.vm.counted("mapped_pages"), 0);
}

#[test]
fn copy_that_differs_from_the_file_is_not_mapped() {
    let mut world = World::new();
    let leased = world.leased();
    assert!(world.sharing.receive(NODE, leased));
    world.read(8);
    // A process that passes another file than the guest reads does no harm.
    world
        .vm
        .ram
        .write_slice(&[0xEE; 4096], GuestAddress(AT + 2 * PAGE_BYTES))
        .unwrap();
    world.background(|vm| vm.counted("mapped_later") + vm.counted("changed") == 8);
    assert_eq!(world.vm.counted("changed"), 1);
    assert_eq!(world.vm.bytes(AT + 2 * PAGE_BYTES, 4096), [0xEE; 4096]);
}

#[test]
fn file_without_a_lease_or_that_is_no_whole_page_is_refused() {
    let mut world = World::new();
    let plain = File::open(world.path()).unwrap();
    assert!(!world.sharing.receive(NODE, plain), "no lease");
    let writable = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(world.path())
        .unwrap();
    assert!(
        lease(&File::open(world.path()).unwrap()).is_err(),
        "the kernel knows the writer"
    );
    drop(writable);
    fs::write(world.folder.path().join("small"), "small").unwrap();
    let small = File::open(world.folder.path().join("small")).unwrap();
    take_lease(&small);
    assert!(!world.sharing.receive(NODE, small), "less than a page");
    assert!(
        !world
            .sharing
            .receive(NODE, File::open(world.folder.path()).unwrap()),
        "a directory"
    );
    let (pipe, _) = nix::unistd::pipe().unwrap();
    assert!(!world.sharing.receive(NODE, pipe.into()), "a pipe");
    assert!(
        !world
            .sharing
            .receive(NODE, File::open("/proc/self/maps").unwrap()),
        "procfs"
    );
    assert_eq!(world.vm.counted("leased_files"), 0);
    world.read(8);
    assert_eq!(world.vm.counted("candidates"), 0);
}

#[test]
fn unused_file_is_given_back_and_the_number_of_files_is_bounded() {
    let mut world = World::new();
    let names = (0..=FILES_MAX).map(|number| world.folder.path().join(format!("{number}")));
    let names: Vec<_> = names.collect();
    let mut taken = 0;
    for (node, name) in names.iter().enumerate() {
        fs::write(name, [1; 4096]).unwrap();
        let file = File::open(name).unwrap();
        take_lease(&file);
        taken += usize::from(world.sharing.receive(node as u64, file));
    }
    assert_eq!(taken, FILES_MAX);
    let leased = world.leased();
    assert!(!world.sharing.receive(NODE, leased));
    let pressure = world.vm.disk.pressure.clone();
    let background = Background::open(world.vm.mapper.clone(), pressure, Vec::new());
    for _ in 0..20 {
        background.return_unused_leases();
    }
    assert_eq!(world.vm.counted("leased_files"), 0);
    // A writer need not wait.
    let mut file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&names[0])
        .unwrap();
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    assert_eq!(content, [1; 4096]);
    let leased = world.leased();
    assert!(world.sharing.receive(NODE, leased));
}

#[test]
fn pages_that_a_file_lost_with_its_lease_become_plain_memory_and_end_nothing() {
    let mut world = World::new();
    let leased = world.leased();
    let given_up = leased.try_clone().unwrap();
    assert!(world.sharing.receive(NODE, leased));
    world.read(8);
    world.background(|vm| vm.counted("mapped_later") == 8);
    // SAFETY: the call takes no pointers.
    let ended = unsafe {
        libc::fcntl(
            given_up.as_raw_fd(),
            libc::F_SETLEASE,
            libc::F_UNLCK as libc::c_int,
        )
    };
    assert_eq!(ended, 0);
    fs::OpenOptions::new()
        .write(true)
        .open(world.path())
        .unwrap()
        .set_len(0)
        .unwrap();
    world.background(|vm| vm.counted("leases_broken") == 1);
    assert_eq!(world.vm.counted("mapped_pages"), 0);
    world.vm.bytes(AT, 8 * PAGE_BYTES);
}
