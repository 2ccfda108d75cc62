//! Risk: two cells work and four do not; a whole Debian over several cells computes something else than in
//! one.

#[path = "span/cpus.rs"]
mod cpus;
#[path = "wide/idle_cpu.rs"]
mod idle_cpu;

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use guest_tests::command::{BOOT_LIMIT, Output};
use guest_tests::host::Traces;
use guest_tests::span::{Moves, on_each_cpu};
use guest_tests::storm::{Extent, Storm};
use guest_tests::terminal::Terminal;
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, net, peer, repetitions, wait};

const LIMIT: Duration = Duration::from_secs(120);
const CELLS: [u16; 4] = [0, 1, 2, 3];
const CPUS: usize = CELLS.len();
/// Each CPU's part of the disk, KiB.
const PART_KIB: usize = 512;
const SENT_BYTES: u64 = 500_000;

#[test]
fn four_cells_are_one_machine() {
    let scratch = Scratch::new("four");
    let cluster = Cluster::up_with(4);
    let disk = scratch.sparse("disk", (CPUS * PART_KIB) as u64 * 1024);
    let vm = VmFile::new("four")
        .cpus(4)
        .memory("512M")
        .span(&CELLS)
        .disk(&disk, "mode = \"exclusive\"\npersistent = true")
        .net("kind = \"user\"\nhost = true")
        .start(&scratch);
    assert_eq!(vm.places(), [0, 1, 2, 3]);
    assert_eq!(vm.shards().len(), 4);
    assert_eq!(vm.sh("nproc").trim(), "4");
    for node in 0..4 {
        let read = |name: &str| vm.sh(&format!("cat /sys/devices/system/node/node{node}/{name}"));
        assert_eq!(read("cpulist").trim(), node.to_string());
        let distances = read("distance");
        let own = distances.split_whitespace().nth(node);
        assert_eq!(own, Some("10"), "node {node}: {distances}");
    }
    cpus::all_work(&vm);
    let tool = |words: &[&str]| {
        let said = vm.tool(words).limit(LIMIT).ok().text();
        println!("{}", said.trim());
        said
    };
    assert!(tool(&["nodes", "50"]).contains("node3=50MiB"));
    assert!(tool(&["clock", "4", &repetitions(5000).to_string()]).contains("pairs=12"));
    tool(&["ipi", "4", "6"]);
    println!("{}", Moves::by_chance(&vm, 4, repetitions(40), 71));
    tool(&["churn", "4", "6"]);
    the_disk_serves_each_cell(&vm);
    the_card_serves_each_cell(&vm, &scratch);
    vm.expect_sound_clock();
    cpus::go_and_come(&vm, repetitions(10));
    for sender in 0..CPUS {
        cpus::get_nmis_from(&vm, sender);
    }
    cpus::get_nmis_of_the_host(&vm);
    vm.expect_sound_clock();
    vm.stop();
    vm.wait_ended(Duration::from_secs(10));
    for cell in 0..4 {
        assert_eq!(cluster.given_bytes(cell), 0, "cell {cell}");
    }
}

/// Has each CPU write a part of the disk, and a CPU of another cell read it from there.
#[track_caller]
fn the_disk_serves_each_cell(vm: &Vm) {
    let written = on_each_cpu(vm, CPUS, |cpu| {
        let at = cpu * PART_KIB;
        format!(
            "dd if=/dev/urandom of=/tmp/part{cpu} bs=1k count={PART_KIB} 2>/dev/null
             dd if=/tmp/part{cpu} of=/dev/vda bs=1k seek={at} conv=notrunc,fsync 2>/dev/null
             sha256sum </tmp/part{cpu}"
        )
    });
    vm.sh("sync; echo 3 > /proc/sys/vm/drop_caches");
    let read = on_each_cpu(vm, CPUS, |cpu| {
        let at = (cpu + 1) % CPUS * PART_KIB;
        format!("dd if=/dev/vda bs=1k count={PART_KIB} skip={at} 2>/dev/null | sha256sum")
    });
    for (cpu, sum) in read.iter().enumerate() {
        assert_eq!(*sum, written[(cpu + 1) % CPUS], "read on CPU {cpu}");
        assert!(read[..cpu].iter().all(|other| other != sum), "{read:?}");
    }
}

/// Has each CPU send bytes of its own and fetch others.
#[track_caller]
fn the_card_serves_each_cell(vm: &Vm, scratch: &Scratch) {
    let router = net::lease(vm, scratch);
    let listen = || {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        (listener, port)
    };
    let (receivers, sent_to): (Vec<_>, Vec<u16>) = (0..CPUS)
        .map(|_| {
            let (listener, port) = listen();
            let receiver = thread::spawn(move || peer::receive(listener.accept()?.0));
            (receiver, port)
        })
        .unzip();
    let sent = on_each_cpu(vm, CPUS, |cpu| {
        format!(
            "/tmp/guest-tool send {router}:{} {} {SENT_BYTES}",
            sent_to[cpu],
            70 + cpu
        )
    });
    let (senders, fetched_from): (Vec<_>, Vec<u16>) = (0..CPUS as u64)
        .map(|cpu| {
            let (listener, port) = listen();
            let sender = thread::spawn(move || peer::send(listener.accept()?.0, 80 + cpu, SENT_BYTES));
            (sender, port)
        })
        .unzip();
    let fetched = on_each_cpu(vm, CPUS, |cpu| {
        format!("/tmp/guest-tool fetch {router}:{}", fetched_from[cpu])
    });
    let peers = receivers.into_iter().chain(senders);
    for (said, peer) in sent.iter().chain(&fetched).zip(peers) {
        assert_eq!(*said, peer.join().expect("no panic").expect("the transfer"));
        assert!(said.ends_with(&format!("-{SENT_BYTES}")), "{said}");
    }
}

#[test]
fn every_interrupt_comes_once_over_four_shards_while_vcpus_move() {
    let scratch = Scratch::new("storm-four");
    let _cluster = Cluster::up_with(4);
    let endless = Extent {
        cpus: 4,
        epochs: 0,
        sweeps: 40,
    };
    let mut storm = Storm::start(&scratch, "storm-four", endless, &["--span", "0,1,2,3"]);
    let moves = Moves::by_chance(&storm.vm, 4, repetitions(100), 72);
    storm.stop();
    let counts = storm.counts(LIMIT);
    println!("{moves}\n{}", counts.line());
    counts.expect_exact();
}

/// Six C files that differ, their Makefile, and a program of all of them.
const PROJECT: &str = r##"
mkdir -p /root/project && cd /root/project
for unit in 1 2 3 4 5 6; do
    {
        echo "static unsigned table[64] = {"
        for word in 1 2 3 4 5 6 7 8; do echo "    $((unit * word * 40503 % 65536)),"; done
        echo "};"
        echo "unsigned unit$unit(unsigned seed) {"
        echo "    for (int round = 0; round < 64; round++)"
        echo "        seed = (seed ^ table[(seed >> $unit) & 63]) * 2654435761u + $unit;"
        echo "    return seed;"
        echo "}"
    } > unit$unit.c
done
{
    echo "#include <stdio.h>"
    for unit in 1 2 3 4 5 6; do echo "unsigned unit$unit(unsigned);"; done
    echo "int main(void) { unsigned value = 1;"
    for unit in 1 2 3 4 5 6; do echo "value = unit$unit(value);"; done
    echo 'printf("%u", value); return 0; }'
} > main.c
{
    echo 'program: $(patsubst %.c,%.o,$(wildcard *.c))'
    echo '	gcc -o $@ $(sort $^)'
    echo '%.o: %.c'
    echo '	gcc -O2 -Wall -c -o $@ $<'
} > Makefile
"##;

/// Builds it with as many jobs as there are CPUs; returns the checksums of the results, and the program's
/// output.
#[track_caller]
fn build(vm: &Vm, meanwhile: impl FnOnce()) -> String {
    vm.sh(PROJECT);
    let script = "cd /root/project && make -j4 >/dev/null && sha256sum *.o program && ./program";
    let building = vm.exec(["sh", "-c", script]).limit(LIMIT).spawn();
    meanwhile();
    let built: Output = building.wait().expect(0);
    println!("{}: built in {:.1} s", vm.name(), built.took.as_secs_f32());
    built.text()
}

#[test]
#[ignore = "3 to 5 minutes where hosts are emulated; `make campaign NAME=wide` runs it"]
fn debian_over_four_cells_builds_what_a_plain_vm_builds() {
    let scratch = Scratch::new("builds");
    let _cluster = Cluster::up_with(4);
    let file = |name| VmFile::of(name, "debian-12").cpus(4).memory("768M");
    let plain = file("plain").key("cell", "0").start(&scratch);
    let expected = build(&plain, || ());
    plain.stop();
    assert_eq!(expected.lines().count(), 9, "{expected}");
    let spanning = file("spanning").span(&CELLS).start(&scratch);
    let found = build(&spanning, || {
        println!("{}", Moves::by_chance(&spanning, 4, repetitions(20), 73))
    });
    assert_eq!(found, expected);
    wait::until("systemd's word that all is up", LIMIT, || {
        let state = spanning.exec(["systemctl", "is-system-running"]).run().text();
        ["running", "degraded"].contains(&state.trim()).then_some(())
    });
    let stopped = spanning.stop();
    assert!(
        stopped.took < LIMIT,
        "the power button was not obeyed:\n{stopped}"
    );
}

/// Cellular Disco's experiment (section 6): a failed cell ends the VMs that use a CPU or a page of it, and no
/// other.
#[test]
fn failed_cell_ends_exactly_the_vms_that_depend_on_it() {
    let scratch = Scratch::new("fails");
    let before = Traces::now();
    let cluster = Cluster::up_with_memory(4, "600M", &scratch);
    let in_cell = |name: &str, cell: &str| VmFile::new(name).key("cell", cell);
    let over = |name: &str, cells: &[u16]| VmFile::new(name).cpus(2).memory("256M").span(cells);
    let ring = over("fails-ring", &[0, 1]).start(&scratch);
    let own_file = in_cell("fails-own", "1");
    let (own_name, own) = (own_file.name().to_owned(), own_file.write(&scratch));
    let mut own = Terminal::mirrorball(&["run", "--lab", "never", own.to_str().expect("UTF-8")]);
    own.expect("# ", BOOT_LIMIT);
    let safe_ring = over("fails-other", &[2, 3]).start(&scratch);
    let safe = in_cell("fails-safe", "0").start(&scratch);
    mirrorball(["cluster", "lend", "250M", "--from", "1", "--to", "2"]).ok();
    // It would start again after any other failure.
    let borrower = in_cell("fails-debt", "2")
        .memory("512M")
        .key("restart", "\"always\"")
        .start(&scratch);
    assert_eq!(borrower.inspect()["borrowed"][0]["cell"], 1);
    mirrorball(["cluster", "lend", "50M", "--from", "0", "--to", "1"]).ok();
    let survivors = [&safe_ring, &safe];
    let boots = survivors.map(Vm::boot_id);

    let failed = mirrorball(["cluster", "fail", "1"]).ok().text();
    print!("{failed}");
    let names = [borrower.name(), &own_name, ring.name()].join(", ");
    let told = format!("cell 1 has failed: {names} ended with it; recovery took ");
    assert!(failed.contains(&told), "{failed}");
    for ended in [&ring, &borrower] {
        assert!(ended.listed().is_none(), "{} is still listed", ended.name());
    }
    assert_eq!(own.wait(LIMIT), 73, "the terminal:\n{}", own.seen());
    let why = "cell 1, of which the VM used CPUs or memory, has failed";
    assert!(own.seen().contains(why), "{}", own.seen());
    assert_eq!(survivors.map(Vm::boot_id), boots);
    let cells = cluster.cells();
    assert_eq!(
        (&cells[1]["failed"], &cells[1]["vms"]),
        (&true.into(), &serde_json::json!([]))
    );
    assert_eq!(
        cells[0]["lent"],
        serde_json::json!([]),
        "what the failed cell had is back"
    );

    // Names are free, and nothing goes into the failed cell.
    let again = in_cell("fails-own", "0").start(&scratch);
    let refused = in_cell("fails-more", "1").write(&scratch);
    let refused = mirrorball(["run", "-d"]).args([&refused]).run().expect(1);
    assert!(
        refused.errors().contains("no cell 1 that runs; there is 0, 2, 3"),
        "{refused}"
    );
    let twice = mirrorball(["cluster", "fail", "1"]).run().expect(1);
    assert!(twice.errors().contains("cell 1 has failed already"), "{twice}");
    let nowhere = mirrorball(["cluster", "fail", "7"]).run().expect(1);
    assert!(
        nowhere
            .errors()
            .contains("this host has no cell 7; it has 0, 1, 2, 3"),
        "{nowhere}"
    );
    for vm in [&again, &safe, &safe_ring] {
        vm.kill();
    }
    drop((ring, own, safe_ring, safe, borrower, again, cluster));
    before.expect_unchanged("a failed cell");
}
