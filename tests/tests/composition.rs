//! Risk: sharing works by itself, and not together with huge pages, the balloon, a clone or a disk of another
//! mode.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use guest_tests::command::{BOOT_LIMIT, Call};
use guest_tests::pattern::Numbers;
use guest_tests::repetitions::each;
use guest_tests::{Cluster, Scratch, Setting, Vm, VmFile, mirrorball, wait};

const MIB: u64 = 1 << 20;
const DISK_MIB: u64 = 32;
const PAGE_BYTES: u64 = 4096;
const LIMIT: Duration = Duration::from_secs(90);

/// A raw disk of random bytes, and their SHA-256.
fn disk(scratch: &Scratch, name: &str, seed: u64) -> (PathBuf, String) {
    let mut bytes = vec![0; (DISK_MIB * MIB) as usize];
    Numbers::new(seed).fill(&mut bytes);
    let path = scratch.join(name);
    fs::write(&path, &bytes).expect("a disk");
    let sum = sha256(&path);
    (path, sum)
}

fn sha256(path: &Path) -> String {
    first_word(&Call::new("sha256sum").args([path]).ok().text())
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

/// The guest's SHA-256 of a whole device, through its page cache, in which it stays while the device is open.
fn sum(vm: &Vm, device: &str) -> String {
    first_word(&vm.sh(&format!("sha256sum {device}")))
}

fn shared_pages(vm: &Vm) -> u64 {
    let seen = vm.inspect();
    let count = seen.pointer("/status/sharing/pages/mapped_pages");
    let count = count.and_then(serde_json::Value::as_u64);
    count.unwrap_or_else(|| panic!("no mapped_pages in {seen:#}"))
}

fn set_balloon(vm: &Vm, mib: u64) {
    mirrorball(["balloon", vm.name(), &format!("{mib}M")]).ok();
    wait::until(&format!("a balloon of {mib} MiB"), LIMIT, || {
        (vm.counters("balloon")["actual_bytes"].as_u64() == Some(mib * MIB)).then_some(())
    });
}

/// Pages read from the shared disk are sent to the exclusive one, the balloon takes and gives back memory,
/// and both disks hold what they should; with memory in small pages, and in huge ones that sharing has to
/// split.
fn shared_and_exclusive_disks_under_a_balloon(pages: &str) {
    let scratch = Scratch::new("beside");
    let (base, wanted) = disk(&scratch, "base.raw", 3);
    let (own, _) = disk(&scratch, "own.raw", 4);
    let vm = VmFile::new("beside")
        .memory("256M")
        .cpus(2)
        .key("pages", &format!("{pages:?}"))
        .disk(&base, "share = \"at-read\"")
        .disk(&own, "mode = \"exclusive\"\npersistent = true")
        .start(&scratch);
    vm.background("sh -c 'exec 3</dev/vda; sleep 600'");
    assert_eq!(sum(&vm, "/dev/vda"), wanted);
    let most = DISK_MIB * MIB / PAGE_BYTES * 8 / 10;
    let shared = shared_pages(&vm);
    assert!(shared >= most, "{shared} pages shared of at least {most}");

    vm.sh("dd if=/dev/vda of=/dev/vdb bs=1M; sync");
    set_balloon(&vm, 160);
    assert_eq!(sum(&vm, "/dev/vda"), wanted, "while the balloon is large");
    set_balloon(&vm, 0);
    vm.sh(
        "yes written | dd of=/dev/vda bs=64k count=16 seek=8 iflag=fullblock; \
         echo 3 >/proc/sys/vm/drop_caches",
    );
    assert_eq!(
        sum(&vm, "/dev/vdb"),
        wanted,
        "what went from the shared disk to the other"
    );
    assert_ne!(
        sum(&vm, "/dev/vda"),
        wanted,
        "the VM's own write to the shared disk"
    );
    vm.stop();
    assert_eq!(sha256(&own), wanted);
    assert_eq!(sha256(&base), wanted, "the base was written");
}

#[test]
fn shared_and_exclusive_disks_and_the_balloon_keep_their_data_in_small_pages() {
    shared_and_exclusive_disks_under_a_balloon("4K");
}

#[test]
fn shared_and_exclusive_disks_and_the_balloon_keep_their_data_in_huge_pages() {
    let _advise = Setting::huge_pages();
    shared_and_exclusive_disks_under_a_balloon("thp");
}

/// Pages are shared beside memory that is bound to a node of the host, and pages that become plain again are
/// bound, too.
#[test]
fn pages_are_shared_beside_memory_that_is_bound_to_a_host_node() {
    let scratch = Scratch::new("bound");
    let (base, wanted) = disk(&scratch, "base.raw", 6);
    // The runner's lab host has two nodes.
    let last = (0..64).rfind(|node| Path::new(&format!("/sys/devices/system/node/node{node}")).exists());
    let node = last.unwrap_or(0);
    let vm = VmFile::new("bound")
        .memory("256M")
        .disk(&base, "share = \"at-read\"")
        .table(&format!(
            "[[nodes]]\ncpus = \"0\"\nmemory = \"256M\"\nhost_node = {node}\n"
        ))
        .start(&scratch);
    vm.background("sh -c 'exec 3</dev/vda; sleep 600'");
    assert_eq!(sum(&vm, "/dev/vda"), wanted);
    let most = DISK_MIB * MIB / PAGE_BYTES * 8 / 10;
    let shared = shared_pages(&vm);
    assert!(shared >= most, "{shared} pages shared of at least {most}");
    vm.expect_memory_on(node);
    // The freed pages are plain memory again, which a program fills.
    vm.sh("echo 3 >/proc/sys/vm/drop_caches; pkill sleep; dd if=/dev/urandom of=/tmp/full bs=1M count=64");
    vm.expect_memory_on(node);
    assert_eq!(sum(&vm, "/dev/vda"), wanted, "read again");
    vm.kill();
}

/// A clone has the pages that its parent shared with the image; the balloon takes them from the clone alone.
#[test]
fn a_clone_keeps_what_its_parent_shared_and_the_balloon_takes_it_from_one() {
    let scratch = Scratch::new("family");
    let (base, wanted) = disk(&scratch, "base.raw", 5);
    let parent = VmFile::new("family")
        .memory("256M")
        .disk(&base, "share = \"at-read\"")
        .start(&scratch);
    parent.background("sh -c 'exec 3</dev/vda; sleep 600'");
    assert_eq!(sum(&parent, "/dev/vda"), wanted);
    let shared = shared_pages(&parent);
    let clone = mirrorball(["clone", parent.name()]).limit(LIMIT).ok();
    let clone = Vm::named(clone.text().trim());
    let inherited = shared_pages(&clone);
    assert!(
        inherited * 10 >= shared * 9,
        "{inherited} pages shared of the parent's {shared}"
    );
    set_balloon(&clone, 160);
    assert_eq!(sum(&clone, "/dev/vda"), wanted);
    assert_eq!(sum(&parent, "/dev/vda"), wanted);
    let left = shared_pages(&parent);
    assert!(
        left * 10 >= shared * 9,
        "the clone's balloon took the parent's pages: {left} of {shared} left"
    );
    set_balloon(&clone, 0);
    clone.sh("yes clone | dd of=/dev/vda bs=1M count=4 iflag=fullblock; sync");
    assert_eq!(
        sum(&parent, "/dev/vda"),
        wanted,
        "the clone's write shows in its parent"
    );
}

/// Moves random pages of a shard's largest mapping, the guest's memory, between the host's nodes 0 and 1
/// until it is dropped. Each move takes the pages away from the guest, which faults on its next access.
struct PageMoves {
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<usize>>,
}

impl PageMoves {
    const AT_ONCE: usize = 256;

    fn of(pid: u32, seed: u64) -> Self {
        let memory = largest_mapping(pid);
        let ends = Arc::new(AtomicBool::new(false));
        let must_end = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let mut numbers = Numbers::new(seed);
            let mut moved = 0;
            while !must_end.load(Ordering::Relaxed) {
                moved += Self::once(pid, &memory, &mut numbers);
                std::thread::sleep(Duration::from_millis(numbers.below(50)));
            }
            moved
        });
        Self {
            ends,
            thread: Some(thread),
        }
    }

    /// Returns the number of pages that are on the chosen node now. About half of them were on the other one.
    /// Pages that the guest never touched are on none.
    fn once(pid: u32, memory: &Range<u64>, numbers: &mut Numbers) -> usize {
        let pages = (memory.end - memory.start) / PAGE_BYTES;
        let page = |_| memory.start + numbers.below(pages) * PAGE_BYTES;
        let pages: Vec<u64> = (0..Self::AT_ONCE).map(page).collect();
        let nodes = [numbers.below(2) as i32; Self::AT_ONCE];
        let mut status = [-1_i32; Self::AT_ONCE];
        const MOVE_ALL: i32 = 4;
        // SAFETY: the kernel reads and writes the number of elements of the arrays that the call names; the
        // pages are another process's.
        let done = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                pid,
                Self::AT_ONCE,
                pages.as_ptr(),
                nodes.as_ptr(),
                status.as_mut_ptr(),
                MOVE_ALL,
            )
        };
        assert!(
            done >= 0,
            "pages of process {pid} were not moved: {}",
            std::io::Error::last_os_error()
        );
        status.iter().filter(|now| **now == nodes[0]).count()
    }

    /// Ends the moves. Returns the number of pages that were on their node after a move.
    fn end(mut self) -> usize {
        self.ends.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("it ends once");
        thread.join().expect("all pages may be moved")
    }
}

/// The addresses of the largest mapping of a process.
fn largest_mapping(pid: u32) -> Range<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the shard runs");
    let ranges = maps
        .lines()
        .filter(|line| line.contains("rw-s"))
        .filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let address = |text| u64::from_str_radix(text, 16).ok();
            Some(address(start)?..address(end)?)
        });
    ranges
        .max_by_key(|range| range.end - range.start)
        .expect("a guest has memory")
}

impl Drop for PageMoves {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

/// Guests whose pages the host takes away at random times run on. A campaign counts 100 such guests: memory
/// that is paged out or moved needs it.
#[test]
fn guest_runs_on_while_the_host_takes_its_pages_away() {
    const RUNS: usize = 100;
    const LOAD_S: &str = "6";
    let scratch = Scratch::new("taken");
    each("guest_runs_on_while_the_host_takes_its_pages_away", RUNS, |run| {
        let vm = VmFile::new(&format!("taken-{run}"))
            .memory("256M")
            .cpus(2)
            .start(&scratch);
        vm.add_tool();
        let boot = vm.boot_id();
        let moves = PageMoves::of(vm.shard(), run as u64);
        let load = vm.tool(&["churn", "2", LOAD_S]).limit(LIMIT).ok().text();
        let moved = moves.end();
        assert!(moved >= 50, "only {moved} pages in {LOAD_S} s");
        assert_eq!(vm.boot_id(), boot, "the guest has booted anew");
        vm.kill();
        format!("seed {run}: {moved} pages; {}", load.trim())
    });
}

/// The host's count of the pages of a VM's own memory, by node.
fn pages_by_node(vm: &Vm) -> BTreeMap<u64, u64> {
    let path = format!("/proc/{}/numa_maps", vm.shard());
    let maps = fs::read_to_string(path).expect("a host that counts by node");
    let mut nodes = BTreeMap::new();
    for word in maps
        .lines()
        .filter(|line| line.contains("guest-memory"))
        .flat_map(|line| line.split(' '))
    {
        let counted = word.strip_prefix('N').and_then(|word| word.split_once('='));
        if let Some((node, pages)) =
            counted.and_then(|(node, pages)| Some((node.parse().ok()?, pages.parse::<u64>().ok()?)))
        {
            *nodes.entry(node).or_default() += pages;
        }
    }
    nodes
}

/// Checks that all but a hundredth of a VM's pages is on this node: the kernel leaves a page that it uses at
/// the moment.
#[track_caller]
fn expect_nearly_all_on(vm: &Vm, node: u64) {
    let pages = pages_by_node(vm);
    let all: u64 = pages.values().sum();
    let there = pages.get(&node).copied().unwrap_or(0);
    assert!(
        all > 0 && there * 100 >= all * 99,
        "{pages:?} instead of node {node}"
    );
}

/// A VM's memory moves between nodes of the host while it runs, beside pages that it shares; a reboot and a
/// clone keep to the node.
#[test]
fn memory_of_a_running_vm_moves_to_other_nodes_of_the_host_and_stays_there() {
    let scratch = Scratch::new("nodes");
    let (base, wanted) = disk(&scratch, "base.raw", 8);
    let is_there = |node: &u64| Path::new(&format!("/sys/devices/system/node/node{node}")).exists();
    let last = (0..64).rfind(is_there).unwrap_or(0);
    let vm = VmFile::new("nodes")
        .memory("256M")
        .disk(&base, "share = \"at-read\"")
        .start(&scratch);
    vm.background("sh -c 'exec 3</dev/vda; sleep 600'");
    assert_eq!(sum(&vm, "/dev/vda"), wanted);
    let shared = shared_pages(&vm);
    vm.sh("dd if=/dev/urandom of=/tmp/full bs=1M count=48");
    let content = sum(&vm, "/tmp/full");
    let place = |nodes: &str| mirrorball(["update", vm.name(), "--memory-nodes", nodes]).limit(LIMIT);
    for node in [last, 0, last] {
        let said = place(&node.to_string()).ok().text();
        let count = pages_by_node(&vm)[&node];
        assert!(
            said.contains("pages of 4 KiB: ") && said.contains(&format!("on node {node}")),
            "{said}"
        );
        println!("{said} (then {count})");
        expect_nearly_all_on(&vm, node);
        assert_eq!(vm.inspect()["spec"]["memory_nodes"], serde_json::json!([node]));
        assert_eq!(sum(&vm, "/tmp/full"), content, "after the move to node {node}");
        assert_eq!(sum(&vm, "/dev/vda"), wanted, "after the move to node {node}");
    }
    assert!(
        shared_pages(&vm) * 10 >= shared * 9,
        "pages of the image are shared still"
    );
    for (nodes, why) in [("63", "no memory on node 63; help: "), ("0-x", "as 0 or 0-1,3")] {
        let refused = place(nodes).run();
        assert!(refused.errors().contains(why), "{refused}");
    }

    let clone = mirrorball(["clone", vm.name()]).limit(LIMIT).ok();
    let clone = Vm::named(clone.text().trim());
    clone.sh("dd if=/dev/urandom of=/tmp/more bs=1M count=24");
    assert_eq!(clone.inspect()["spec"]["memory_nodes"], serde_json::json!([last]));
    expect_nearly_all_on(&clone, last);
    assert_eq!(sum(&clone, "/tmp/full"), content);
    clone.kill();
    // The parent's memory is frozen now, and its later writes are its own.
    place("0").ok();
    vm.sh("dd if=/dev/urandom of=/tmp/full bs=1M count=48");
    place(&last.to_string()).ok();

    let boot_id = vm.boot_id();
    mirrorball(["reset", vm.name()]).limit(LIMIT).ok();
    mirrorball(["wait", vm.name(), "--for", "agent", "--limit", "100"])
        .limit(BOOT_LIMIT)
        .ok();
    assert_ne!(vm.boot_id(), boot_id);
    vm.sh("dd if=/dev/urandom of=/tmp/full bs=1M count=48");
    expect_nearly_all_on(&vm, last);
    place("all").ok();
    assert!(vm.inspect()["spec"]["memory_nodes"].is_null());
    vm.kill();
}

/// In a cluster a VM's memory keeps to the nodes of its place.
#[test]
fn memory_of_a_vm_in_a_cell_moves_to_nodes_of_its_place_only() {
    let scratch = Scratch::new("place");
    let cluster = Cluster::up(&scratch);
    let nodes = |cell: usize| cluster.cell(cell)["nodes"].clone();
    let first = |cell: usize| nodes(cell)[0].as_u64().expect("a node");
    let (own, other) = (first(0), first(1));
    let vm = VmFile::new("place").key("cell", "0").start(&scratch);
    let place =
        |node: u64| mirrorball(["update", vm.name(), "--memory-nodes", &node.to_string()]).limit(LIMIT);
    place(own).ok();
    expect_nearly_all_on(&vm, own);
    if nodes(0) != nodes(1) {
        let refused = place(other).run().expect(1);
        let why = format!("node {other} is not of the VM's place in the cluster; help: name some of {own}");
        assert!(refused.errors().contains(&why), "{refused}");
        expect_nearly_all_on(&vm, own);
    }
    vm.kill();
    let spans = VmFile::new("spans")
        .cpus(2)
        .memory("256M")
        .span(&[0, 1])
        .start_only(&scratch);
    let refused = mirrorball(["update", spans.name(), "--memory-nodes", "0"])
        .run()
        .expect(1);
    assert!(refused.errors().contains("spans cells"), "{refused}");
    spans.kill();
    drop(cluster);
}
