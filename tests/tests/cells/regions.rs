//! Memory that VMs of two cells share. Each guest writes a letter to the region, and prints what it reads
//! there.

use std::collections::BTreeSet;
use std::fs;

use guest_tests::cluster::allowed_cpus;
use guest_tests::halting::{halting_guest, region_guest};
use guest_tests::{Output, Scratch, host, wait};
use serde_json::{Value, json};

use super::{Cells, SOON};

const MIB: u64 = 1 << 20;
/// The region, of cell 0: VMs whose names begin with `w` write it, those with `r` read it.
const REGION: &str =
    "[[shared]]\nname = \"table\"\nsize = \"64M\"\ncell = 0\nreaders = [\"r*\"]\nwriters = [\"w*\"]\n";

/// Two cells of 192 MiB, and the region.
#[track_caller]
fn cells_up(test: &str) -> Cells {
    let cells = allowed_cpus().map(|cpu| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"192M\"\n"));
    let cells: Vec<String> = cells.take(2).collect();
    assert_eq!(cells.len(), 2, "two cells need two CPUs");
    let text = format!("{}[borrowing]\nautomatic = false\n{REGION}", cells.concat());
    Cells::up_of(Scratch::new(test), &text, &halting_guest())
}

/// Writes the file of a VM of 64 MiB that writes this letter.
fn file(cells: &Cells, name: &str, letter: u8, cell: u16, shared: &str) -> String {
    let kernel = cells.scratch.write(&format!("{name}.elf"), region_guest(letter));
    let text = format!(
        "name = \"{name}\"\nmemory = \"64M\"\nnets = []\ncell = {cell}\n\
         kernel = {{ path = {kernel:?} }}\n{shared}"
    );
    let path = cells.scratch.write(&format!("{name}.toml"), text);
    path.into_os_string().into_string().expect("UTF-8")
}

const WRITES: &str = "[[shared]]\nname = \"table\"\n";
const READS: &str = "[[shared]]\nname = \"table\"\nread_only = true\n";

#[track_caller]
fn run(cells: &Cells, name: &str, letter: u8, cell: u16, shared: &str) {
    cells
        .call(["run", "-d", &file(cells, name, letter, cell, shared)])
        .ok();
}

#[track_caller]
fn refusal(cells: &Cells, file: &str) -> String {
    cells.call(["run", "-d", file]).run().expect(1).errors()
}

/// Waits until a guest prints this letter.
#[track_caller]
fn wait_printed(cells: &Cells, name: &str, letter: char) {
    wait::until(&format!("the letter {letter} of {name}"), SOON, || {
        cells
            .call(["logs", name])
            .run()
            .text()
            .contains(letter)
            .then_some(())
    });
}

/// Waits until cell 0 has given so many MiB, and has no region.
#[track_caller]
fn wait_freed(cells: &Cells, given_mib: u64) {
    wait::until("the end of the region", SOON, || {
        let home = &cells.status()[0];
        (home["regions"].is_null() && home["given_bytes"] == given_mib * MIB).then_some(())
    });
}

#[track_caller]
fn pid(cells: &Cells, name: &str, key: &str) -> u32 {
    let vm = cells.inspect(name).expect("the VM runs");
    super::as_pid(&vm[key]).unwrap_or_else(|| panic!("no {key} in {vm:#}"))
}

/// The access modes by which a process has the region open, and the permissions of its mappings.
fn access(pid: u32) -> (Vec<u32>, Vec<String>) {
    let fds = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("a process")
        .flatten();
    let fds = fds.filter(|fd| {
        fs::read_link(fd.path()).is_ok_and(|link| link.to_string_lossy().contains("shared-region"))
    });
    let mode = |fd: fs::DirEntry| {
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", fd.file_name().to_string_lossy()));
        let info = info.expect("a descriptor");
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        u32::from_str_radix(flags.expect("flags").trim(), 8).expect("octal") & 3
    };
    let modes = fds.map(mode).collect();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("a process");
    let maps = maps.lines().filter(|line| line.contains("shared-region"));
    let permissions = maps.filter_map(|line| line.split_whitespace().nth(1).map(str::to_owned));
    (modes, permissions.collect())
}

#[test]
fn members_of_two_cells_see_one_memory_that_readers_cannot_write() {
    let cells = cells_up("regions");
    run(&cells, "w1", b'W', 0, WRITES);
    wait_printed(&cells, "w1", 'W');
    run(&cells, "r1", b'X', 1, READS);
    wait_printed(&cells, "r1", 'W');

    // Nothing of the reader's can write: neither the guest, nor the shard, nor a copy of its descriptor.
    let (modes, permissions) = access(pid(&cells, "r1", "shard_pid"));
    assert!(modes.iter().all(|mode| *mode == 0), "{modes:?}");
    assert_eq!(permissions, ["r--s"]);
    let (modes, _) = access(pid(&cells, "r1", "keeper_pid"));
    assert!(
        !modes.is_empty() && modes.iter().all(|mode| *mode == 0),
        "{modes:?}"
    );

    let status = cells.status();
    let members = json!([
        { "vm": "r1", "cell": 1, "access": "read" },
        { "vm": "w1", "cell": 0, "access": "write" },
    ]);
    let region = &status[0]["regions"][0];
    assert_eq!(region["members"], members, "{status:?}");
    assert_eq!(region["bytes"], 64 * MIB);
    assert_eq!(
        [&status[0], &status[1]].map(|cell| cell["given_bytes"].as_u64()),
        [Some(128 * MIB), Some(64 * MIB)]
    );
    let shown = cells.call(["cluster", "status"]).ok().text();
    let line = "cell 0 shares region table, 64M: r1 reads in cell 1, w1 writes in cell 0";
    assert!(shown.contains(line), "{shown}");
    let grant = &cells.inspect("r1").expect("it runs")["regions"][0];
    assert_eq!(
        (&grant["name"], &grant["home"], &grant["access"]),
        (&Value::from("table"), &Value::from(0), &Value::from("read"))
    );

    let clone = cells.call(["clone", "w1"]).run().expect(1).errors();
    assert!(clone.contains("it has the shared region table"), "{clone}");
    let snapshot = cells.scratch.join("snapshot");
    let snapshot = snapshot.to_str().expect("UTF-8");
    let snapshot = cells.call(["snapshot", "w1", snapshot]).run().expect(1).errors();
    assert!(snapshot.contains("it has the shared region table"), "{snapshot}");

    // A member's death leaves the region to the others, and a later member finds it.
    host::kill9(pid(&cells, "w1", "shard_pid"));
    wait::until("the end of w1", SOON, || {
        cells.inspect("w1").is_none().then_some(())
    });
    run(&cells, "w2", b'V', 1, WRITES);
    wait_printed(&cells, "r1", 'V');
    let printed = cells.call(["logs", "r1"]).ok().text();
    assert!(!printed.contains('X'), "the reader has written: {printed}");
    cells.call(["kill", "w2"]).ok();
    assert_eq!(
        cells.status()[0]["given_bytes"],
        64 * MIB,
        "the reader still has it"
    );
    cells.call(["kill", "r1"]).ok();
    wait_freed(&cells, 0);
}

#[test]
fn vm_that_may_not_have_a_region_is_refused_with_the_reason() {
    let cells = cells_up("strangers");
    let of = |name: &str, shared: &str| refusal(&cells, &file(&cells, name, b'X', 1, shared));
    let reader = of("r1", WRITES);
    assert!(
        reader.contains("VM r1 may not write shared region table; add it to `writers`"),
        "{reader}"
    );
    let stranger = of("stranger", READS);
    assert!(
        stranger.contains("VM stranger may not read shared region table"),
        "{stranger}"
    );
    let unknown = of("w1", "[[shared]]\nname = \"tables\"\n");
    assert!(
        unknown.contains("no shared region tables; it has table"),
        "{unknown}"
    );
    let away = refusal(
        &cells,
        &file(&cells, "w1", b'X', 1, &format!("cells = [1]\n{WRITES}")),
    );
    assert!(away.contains("add 0 to `cells`"), "{away}");
    for name in ["r1", "stranger", "w1"] {
        assert!(cells.inspect(name).is_none(), "{name} has left something");
    }
    // No room: VMs have all but 32 MiB of the home.
    let large = cells.vm_file("large", "memory = \"160M\"\ncell = 0\n", None);
    cells.call(["run", "-d", &large]).ok();
    let no_room = of("w1", WRITES);
    assert!(
        no_room.contains("cell 0 has 32 MiB for shared region table of 64 MiB"),
        "{no_room}"
    );
    cells.call(["kill", "large"]).ok();
    wait_freed(&cells, 0);
    cells.call(["cluster", "down"]).ok();
    let alone = of("w1", "").replace("cell 1", "");
    assert!(alone.contains("no cluster is up"), "{alone}");
    let kernel = cells.scratch.join("w1.elf");
    let text =
        format!("name = \"w1\"\nmemory = \"64M\"\nnets = []\nkernel = {{ path = {kernel:?} }}\n{WRITES}");
    let path = cells.scratch.write("alone.toml", text);
    let alone = refusal(&cells, path.to_str().expect("UTF-8"));
    assert!(
        alone.contains("the VM has the shared region table, and no cluster is up here"),
        "{alone}"
    );
}

#[test]
fn content_outlives_the_homes_process_and_its_failure_ends_the_members() {
    let cells = cells_up("homes");
    run(&cells, "w1", b'W', 1, WRITES);
    wait_printed(&cells, "w1", 'W');
    // The next process of the home has the file from a member.
    let [_, process] = cells.processes(0);
    host::kill9(process);
    wait::until("the next process of cell 0", SOON, || {
        (cells.processes(0)[1] != process).then_some(())
    });
    run(&cells, "r1", b'X', 1, READS);
    wait_printed(&cells, "r1", 'W');
    let region = &cells.status()[0]["regions"][0];
    assert_eq!(region["members"].as_array().map(Vec::len), Some(2), "{region}");
    assert_eq!(cells.status()[0]["given_bytes"], 64 * MIB, "counted once");

    // Its last members end while the home is down. Afterwards a region begins anew.
    let [guard, process] = cells.processes(0);
    host::stop(guard);
    host::kill9(process);
    for name in ["w1", "r1"] {
        cells.call(["kill", name]).ok();
    }
    host::go_on(guard);
    wait::until("the next process of cell 0", SOON, || {
        (cells.processes(0)[1] != process).then_some(())
    });
    wait_freed(&cells, 0);
    run(&cells, "r2", b'X', 1, READS);
    wait::until("a first byte of r2", SOON, || {
        (!cells.call(["logs", "r2"]).run().text().is_empty()).then_some(())
    });
    let printed = cells.call(["logs", "r2"]).ok().text();
    assert!(!printed.contains('W'), "the former content: {printed}");

    // r2 runs in cell 1 and has memory of cell 0.
    run(&cells, "w2", b'V', 1, WRITES);
    wait_printed(&cells, "r2", 'V');
    cells.call(["cluster", "fail", "0"]).ok();
    for name in ["r2", "w2"] {
        assert!(cells.inspect(name).is_none(), "{name} runs without its memory");
    }
    let failed = refusal(&cells, &file(&cells, "w3", b'U', 1, WRITES));
    assert!(failed.contains("cell 0, which has failed"), "{failed}");
}

/// Orders a move of the region to a cell.
fn move_to(cells: &Cells, cell: &str) -> Output {
    cells.call(["move", "--region", "table", "--cell", cell]).run()
}

/// Checks which cells lend the region's memory, by the home and by the members' records.
#[track_caller]
fn check_lenders(cells: &Cells, members: &[&str], expected: &Value) {
    let region = &cells.status()[0]["regions"][0];
    assert_eq!(&region["borrowed"], expected, "{region}");
    for member in members {
        let vm = cells.inspect(member).expect("it runs");
        let borrowed = vm["regions"][0].get("borrowed").cloned();
        assert_eq!(borrowed.unwrap_or(json!([])), *expected, "{member}");
    }
}

/// Checks that the pages of the region that a VM's shard maps are on the nodes of a cell, and bound to them.
/// A host with one node has no other.
#[track_caller]
fn check_nodes(cells: &Cells, vm: &str, cell: usize) {
    let nodes = &cells.status()[cell]["nodes"];
    let nodes: BTreeSet<u64> = serde_json::from_value(nodes.clone()).expect("numbers");
    let maps = fs::read_to_string(format!("/proc/{}/numa_maps", pid(cells, vm, "shard_pid")));
    let maps = maps.expect("a kernel with NUMA");
    let region: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains("shared-region"))
        .collect();
    assert!(!region.is_empty(), "no region in {maps}");
    let binds = fs::metadata("/sys/devices/system/node/node1").is_ok();
    for line in region {
        let policy = line.split(' ').nth(1).expect("a policy");
        assert!(!binds || policy.starts_with("bind:"), "not bound: {line}");
        let words = line
            .split(' ')
            .filter_map(|word| word.strip_prefix('N')?.split_once('='));
        let on: BTreeSet<u64> = words.map(|(node, _)| node.parse().expect("a number")).collect();
        assert!(
            on.is_subset(&nodes) && !on.is_empty(),
            "pages on other nodes than {nodes:?}: {line}"
        );
    }
}

#[test]
fn memory_of_a_region_moves_between_cells_and_ends_the_dependency_on_its_lender() {
    let cells = cells_up("region-moves");
    let none = move_to(&cells, "1").expect(1).errors();
    assert!(none.contains("no VM has the shared region table"), "{none}");
    run(&cells, "w1", b'W', 0, WRITES);
    run(&cells, "r1", b'X', 1, READS);
    wait_printed(&cells, "r1", 'W');
    let short = move_to(&cells, "1").expect(1).errors();
    assert!(
        short.contains("cell 0 has 0 MiB free of cell 1's memory"),
        "{short}"
    );
    cells
        .call(["cluster", "lend", "64M", "--from", "1", "--to", "0"])
        .ok();
    let moved = move_to(&cells, "1").expect(0).text();
    assert!(
        moved.contains("shared region table has the memory of cell 1"),
        "{moved}"
    );
    let lent = json!([{ "cell": 1, "bytes": 64 * MIB }]);
    check_lenders(&cells, &["w1", "r1"], &lent);
    check_nodes(&cells, "w1", 1);
    // The home has its own memory for a VM, and the members the same bytes as before.
    let large = cells.vm_file("large", "memory = \"128M\"\ncell = 0\n", None);
    cells.call(["run", "-d", &large]).ok();
    let full = move_to(&cells, "0").expect(1).errors();
    assert!(full.contains("cell 0 has 0 MiB free"), "{full}");
    cells.call(["kill", "large"]).ok();
    run(&cells, "w2", b'V', 1, WRITES);
    wait_printed(&cells, "r1", 'V');
    check_lenders(&cells, &["w1", "r1", "w2"], &lent);

    // The next process of the home knows it, and moves the memory back.
    let [_, process] = cells.processes(0);
    host::kill9(process);
    wait::until("the next process of cell 0", SOON, || {
        (cells.processes(0)[1] != process).then_some(())
    });
    check_lenders(&cells, &["w1", "r1", "w2"], &lent);
    let reclaim = ["cluster", "reclaim", "64M", "--from", "0", "--to", "1"];
    let used = cells.call(reclaim).run().expect(1).errors();
    assert!(used.contains("mirrorball move --region table --cell 0"), "{used}");
    check_nodes(&cells, "w1", 1);
    move_to(&cells, "0").expect(0);
    check_lenders(&cells, &["w1", "r1", "w2"], &json!([]));
    check_nodes(&cells, "w1", 0);
    cells.call(reclaim).ok();
    run(&cells, "w3", b'U', 1, WRITES);
    wait_printed(&cells, "r1", 'U');

    // The member in cell 0 depends on the former lender no longer.
    cells.call(["cluster", "fail", "1"]).ok();
    for name in ["r1", "w2", "w3"] {
        assert!(cells.inspect(name).is_none(), "{name} runs in a failed cell");
    }
    assert!(cells.inspect("w1").is_some(), "it depended on its own cell only");
    let failed = move_to(&cells, "1").expect(1).errors();
    assert!(failed.contains("cell 1 has failed"), "{failed}");
}

#[test]
fn region_that_has_moved_ends_its_members_with_its_new_lender_and_does_not_move_without_a_record() {
    let cells = cells_up("region-lender");
    run(&cells, "w1", b'W', 0, WRITES);
    run(&cells, "r1", b'X', 1, READS);
    wait_printed(&cells, "r1", 'W');
    cells
        .call(["cluster", "lend", "64M", "--from", "1", "--to", "0"])
        .ok();
    move_to(&cells, "1").expect(0);
    let lent = json!([{ "cell": 1, "bytes": 64 * MIB }]);
    check_lenders(&cells, &["w1", "r1"], &lent);
    // The process that serves r1 hangs, until its guard replaces it. The record has to name the home's part.
    let [_, process] = cells.processes(1);
    host::stop(process);
    let refused = move_to(&cells, "0").expect(1).errors();
    assert!(
        refused.contains("VM r1 does not record that its shared region moves"),
        "{refused}"
    );
    wait::until("the next process of cell 1", SOON, || {
        (cells.processes(1)[1] != process).then_some(())
    });
    check_lenders(&cells, &["w1", "r1"], &lent);
    cells.call(["cluster", "fail", "1"]).ok();
    for name in ["w1", "r1"] {
        assert!(cells.inspect(name).is_none(), "{name} runs without its memory");
    }
}
