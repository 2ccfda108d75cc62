//! Risk: under load a VM reads wrong data: an old block, another block, or another VM's bytes.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_tests::command::Call;
use guest_tests::pattern::{SECTOR_BYTES, Sectors, canary, digest};
use guest_tests::repetitions::{in_campaign, seconds};
use guest_tests::vm::SHARE_BETWEEN_ALL;
use guest_tests::{Scratch, Vm, VmFile, wait};

/// VMs in a campaign.
const VMS: u64 = 8;
const DISK_BYTES: usize = 32 << 20;
const LOAD_S: u64 = 120;
/// Alignment of a canary in memory.
const ALIGNMENT: usize = 16;

fn base(scratch: &Scratch) -> (PathBuf, String) {
    let bytes = Sectors::base_bytes((DISK_BYTES / SECTOR_BYTES) as u64);
    (scratch.write("base", &bytes), digest(&bytes))
}

fn seed(number: u64) -> u64 {
    100 + number
}

/// Promise SHARE-02.
#[test]
fn eight_vms_read_right_data_for_minutes_and_hold_no_other_vms_bytes() {
    let scratch = Scratch::new("isolation");
    let (path, whole) = base(&scratch);
    let policies = ["at-read", "deferred"];
    let count = if in_campaign() { VMS } else { VMS / 2 };
    let vms: Vec<Vm> = (0..count)
        .map(|number| {
            let share = policies[number as usize % policies.len()];
            let file = VmFile::new(&format!("load-{number}"))
                .cpus(1 + (number % 2) as u8)
                .disk(&path, &format!("share = \"{share}\""));
            // Their commands are root's, whose VMs share by groups by default.
            let vm = file.host_file(SHARE_BETWEEN_ALL).start(&scratch);
            vm.add_tool();
            vm
        })
        .collect();
    std::thread::scope(|scope| {
        for (number, vm) in vms.iter().enumerate() {
            scope.spawn(move || {
                let (seed, lasting_s) = (seed(number as u64).to_string(), seconds(LOAD_S));
                let load = vm.tool(&["disk-load", "/dev/vda", &seed, &lasting_s.to_string()]);
                let said = load.limit(Duration::from_secs(lasting_s + 180)).ok().text();
                println!("{}: {}", vm.name(), said.trim());
            });
        }
    });
    let canaries: Vec<[u8; 16]> = (0..count).map(|number| canary(seed(number))).collect();
    for (number, vm) in vms.iter().enumerate() {
        let found = hunt(vm.shard(), &canaries);
        assert!(found[number] > 0, "the hunt does not even find a VM's own bytes");
        for (other, count) in found.iter().enumerate() {
            assert!(
                other == number || *count == 0,
                "{} holds {count} sectors that {} wrote",
                vm.name(),
                vms[other].name()
            );
        }
    }
    // The memory of VMs that end goes to those that start.
    for vm in &vms[1..] {
        vm.kill();
    }
    let newcomer = VmFile::new("newcomer")
        .memory("512M")
        .disk(&path, "")
        .host_file(SHARE_BETWEEN_ALL)
        .start(&scratch);
    newcomer.add_tool();
    newcomer
        .tool(&["memory", "300"])
        .limit(Duration::from_secs(120))
        .ok();
    assert_eq!(hunt(newcomer.shard(), &canaries), vec![0; canaries.len()]);
    assert_eq!(
        digest(&fs::read(&path).expect("the base")),
        whole,
        "the base was written"
    );
}

/// Number of times that each canary is in a process's memory: the guest's, and the shard's own.
fn hunt(pid: u32, canaries: &[[u8; 16]]) -> Vec<usize> {
    let memory = File::open(format!("/proc/{pid}/mem")).expect("only root may look into another process");
    // Two words are compared by one instruction or two; a guest's memory has a million of them in 16 MiB.
    let canaries: Vec<u128> = canaries
        .iter()
        .map(|canary| u128::from_ne_bytes(*canary))
        .collect();
    let mut found = vec![0; canaries.len()];
    let mut buffer = vec![0; 1 << 20];
    for range in mappings(pid, |line| {
        line.split(' ').nth(1).is_some_and(|may| may.starts_with('r'))
    }) {
        for start in range.clone().step_by(buffer.len()) {
            let length = buffer.len().min((range.end - start) as usize);
            // Memory that the kernel keeps to itself can't be read, and contains no data of a guest.
            let Ok(count) = memory.read_at(&mut buffer[..length], start) else {
                continue;
            };
            let (places, _) = buffer[..count].as_chunks::<ALIGNMENT>();
            for place in places.iter().map(|bytes| u128::from_ne_bytes(*bytes)) {
                // Most memory is empty.
                if place == 0 {
                    continue;
                }
                if let Some(whose) = canaries.iter().position(|canary| *canary == place) {
                    found[whose] += 1;
                }
            }
        }
    }
    found
}

/// The ranges of a process's memory whose line in `maps` is `wanted`.
fn mappings(pid: u32, wanted: impl Fn(&str) -> bool) -> Vec<std::ops::Range<u64>> {
    let file = File::open(format!("/proc/{pid}/maps")).expect("the process runs");
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let range = |line: String| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    lines.filter(|line| wanted(line)).filter_map(range).collect()
}

/// A mount of an ext4 file system in a file. Unmounted when dropped.
struct Ext4(PathBuf);

impl Ext4 {
    fn new(scratch: &Scratch) -> Self {
        let image = scratch.sparse("host.ext4", 256 << 20);
        let place = scratch.join("host");
        fs::create_dir(&place).expect("a directory");
        Call::new("mke2fs").args(["-q", "-t", "ext4"]).args([&image]).ok();
        Call::new("mount")
            .args(["-o", "loop"])
            .args([&image, &place])
            .ok();
        Self(place)
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        let _ = Call::new("umount").args(["-l"]).args([&self.0]).run();
    }
}

/// [`Scratch`] is in memory; here the base is on a disk's file system, and the host reclaims its pages
/// meanwhile.
/// Promise SHARE-04.
#[test]
fn a_base_on_ext4_may_be_evicted_while_it_is_mapped() {
    let scratch = Scratch::new("evicted");
    let host = Ext4::new(&scratch);
    let path = host.0.join("base");
    let sectors = (DISK_BYTES / SECTOR_BYTES) as u64;
    fs::write(&path, Sectors::base_bytes(sectors)).expect("room for the base");
    nix::unistd::sync();
    for share in ["at-read", "deferred"] {
        let vm = VmFile::new(&format!("evicted-{share}"))
            .memory("256M")
            .disk(&path, &format!("share = \"{share}\""))
            .start(&scratch);
        // A kernel drops the cached pages of a disk when no process has it open any more.
        vm.sh("sleep 10000 3</dev/vda </dev/null >/dev/null 2>&1 &");
        let sum = || vm.sh("sha256sum </dev/vda");
        let first = sum();
        let half = DISK_BYTES as u64 / 2;
        wait::until("half of the base to be mapped", Duration::from_secs(60), || {
            let pages = vm.inspect()["status"]["sharing"]["pages"]["mapped_pages"].as_u64()?;
            (pages * 4096 > half).then_some(())
        });
        assert_eq!(sum(), first, "sharing changed what the guest sees ({share})");
        let mapped = || resident(vm.shard(), &path);
        assert!(
            mapped() > half,
            "the guest does not read what is mapped ({share})"
        );
        // The kernel first keeps pages that the guest has used.
        let left = wait::until("the base to be evicted", Duration::from_secs(30), || {
            evict(vm.shard(), &path);
            Some(mapped()).filter(|left| *left < half / 2)
        });
        // The guest reads its own page cache, so the host has to read the base again.
        assert_eq!(sum(), first, "a page came back different ({share})");
        assert!(mapped() > left, "nothing was read again ({share})");
        vm.add_tool();
        vm.tool(&["disk-load", "/dev/vda", "5", "10"])
            .limit(Duration::from_secs(120))
            .ok();
        vm.kill();
    }
    let left = fs::read(&path).expect("the base");
    assert!(left == Sectors::base_bytes(sectors), "the base was written");
}

fn is_of(path: &Path) -> impl Fn(&str) -> bool {
    // A shard lives in a root of its own, from which the file has another path.
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).expect("the base"));
    move |line| line.split_ascii_whitespace().nth(4) == Some(&inode.to_string())
}

/// Bytes of a file that a process has in memory and mapped.
fn resident(pid: u32, path: &Path) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process runs");
    let (is_of, mut ours, mut bytes) = (is_of(path), false, 0);
    for line in text.lines() {
        if let Some(kib) = line.strip_prefix("Rss:") {
            let kib: u64 = kib.trim().trim_end_matches(" kB").parse().expect("a number");
            bytes += if ours { kib << 10 } else { 0 };
        } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            ours = is_of(line);
        }
    }
    bytes
}

/// Has the kernel evict a file's pages from memory, though a process maps them, as it does when memory is
/// short.
fn evict(pid: u32, path: &Path) {
    // SAFETY: a call with numbers only.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    assert!(process >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
    for range in mappings(pid, is_of(path)) {
        let part = libc::iovec {
            iov_base: range.start as *mut libc::c_void,
            iov_len: (range.end - range.start) as usize,
        };
        // SAFETY: the range is the other process's: the kernel only writes its pages out and drops them.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                process,
                &part,
                1,
                libc::MADV_PAGEOUT,
                0,
            )
        };
        assert!(done >= 0, "process_madvise: {}", std::io::Error::last_os_error());
    }
    let file = File::open(path).expect("the base");
    // SAFETY: a call with numbers only, on an open file.
    let done = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(done, 0, "posix_fadvise");
    // SAFETY: this process opened it and nothing else uses it.
    unsafe { libc::close(process as i32) };
}
