//! Linux over two hosts: memory that its CPUs share, its devices from either host, processes and threads, a
//! link that gets bad, reboot and power-off; the end of one host's part, which the others must report and not
//! outlive; a parallel build. Also over two hosts that share memory, and over three.
//!
//! A page of another host takes some 3.5 ms in the lab, and one of a sequence 1 ms. So one boot serves many
//! assertions, and a landing's run writes and repeats a tenth of a campaign's amounts.

use std::time::Duration;

use guest_tests::repetitions::in_campaign;
use guest_tests::{VmFile, repetitions, wait};
use serde_json::{Value, json};

use crate::FIND_SHARED;
use crate::guest::{ALPHA, Guest, HOSTS, Traces, expect_nothing_left, over, two_hosts};
use crate::lab::{Lab, SILENCE};

/// Time limit until the home has noticed the other's end, and ended.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the CPUs of all hosts to count on.
const COUNT_LIMIT: Duration = Duration::from_secs(300);
/// Length of a pause; a guest's kernel reports a CPU that stands still for 20 s.
const PAUSE: Duration = Duration::from_secs(4);
const SENT_BYTES: usize = 128 << 10;
const BLOCK_BYTES: usize = 32 << 10;

/// Pairs of a writer and a reader, both ways.
const WAYS: [(usize, usize); 2] = [(0, 1), (1, 0)];
/// Each CPU of three writes for another one, and reads what the third wrote.
const ROUND: [(usize, usize); 3] = [(0, 1), (1, 2), (2, 0)];
/// Blocks of 32 KiB that fill a part of the other node's memory: 200 MiB in a campaign, 40 MiB at a landing.
const MANY_BLOCKS: usize = 6400;

/// Memory of a guest that has [`MANY_BLOCKS`] in a file system in memory, which takes half of it at most.
fn roomy() -> &'static str {
    if in_campaign() { "640M" } else { "256M" }
}

/// Each writer's CPU writes `blocks`, and its reader's CPU reads them.
#[track_caller]
fn each_reads_what_another_wrote(guest: &Guest, ways: &[(usize, usize)], blocks: usize) {
    let bytes = blocks * BLOCK_BYTES;
    let works = ways.iter().flat_map(|(writer, reader)| {
        let seed = 40 + 2 * writer + reader;
        [
            (*writer, format!("fill /tmp/data {seed} {bytes}")),
            (*reader, "digest /tmp/data".to_owned()),
        ]
    });
    let said = guest.works(&works.collect::<Vec<_>>());
    for (said, (writer, reader)) in said.chunks(2).zip(ways) {
        assert!(said[0].ends_with(&format!("-{bytes}")), "{said:?}");
        assert_eq!(said[1], said[0], "written on CPU {writer}, read on CPU {reader}");
    }
    guest.told(&format!("{blocks} blocks of 32 KiB have gone each of {ways:?}"));
}

/// The same as [`each_reads_what_another_wrote`] while the link between the two hosts is bad.
#[track_caller]
fn each_reads_over_a_bad_link(lab: &Lab, guest: &Guest, blocks: usize) {
    let said = lab.link(["alpha", "beta"], &["--delay", "2ms", "--loss", "1%"]);
    assert_eq!(said, "alpha and beta, each way: delay 2ms, loss 1%");
    each_reads_what_another_wrote(guest, &WAYS, blocks);
    guest.told("all of that over a link with 2 ms of delay and 1% loss");
    lab.link(["alpha", "beta"], &["--restore"]);
}

const MOUNT: &str = "mount /dev/vda /mnt";
const UMOUNT: &str = "umount /mnt";

/// Jobs that read each CPU's file on the disk on each CPU.
fn reading() -> [(usize, String); 4] {
    [(0, 1), (1, 0), (0, 0), (1, 1)].map(|(writer, reader)| (reader, format!("digest /mnt/file{writer}")))
}

/// Checks that both CPUs have read the writes of each.
#[track_caller]
fn both_have_read(read: &[String], written: &[String; 2]) {
    let [first, second] = written;
    assert_eq!(
        read,
        [first, second, first, second].map(String::clone),
        "files of CPUs 0, 1, 0, 1 on CPUs 1, 0, 0, 1"
    );
}

/// Writes a file on the disk by each CPU, and reads them from the disk again by both. Returns their digests.
#[track_caller]
fn the_disk_serves_both(guest: &Guest) -> [String; 2] {
    let fill = |cpu: usize| {
        (
            cpu,
            format!("fill /mnt/file{cpu} {} {}", 50 + cpu, 8 * BLOCK_BYTES),
        )
    };
    let word = |cpu: usize, work: &str| (cpu, work.to_owned());
    // Between two mounts the files leave the page cache.
    let before = [word(0, MOUNT), fill(0), fill(1), word(1, UMOUNT), word(1, MOUNT)];
    let works = [&before[..], &reading(), &[word(1, UMOUNT)]].concat();
    let said = guest.works(&works);
    let written = [said[1].clone(), said[2].clone()];
    assert_ne!(written[0], written[1]);
    both_have_read(&said[before.len()..][..4], &written);
    guest.told("both CPUs have written to the disk and read from it");
    written
}

/// Checks that the files are on the disk in another boot.
#[track_caller]
fn the_files_are_there(guest: &Guest, written: &[String; 2]) {
    let word = |cpu: usize, work: &str| (cpu, work.to_owned());
    let works = [&[word(1, MOUNT)][..], &reading(), &[word(0, UMOUNT)]].concat();
    both_have_read(&guest.works(&works)[1..5], written);
    guest.told("both CPUs have read from the disk");
}

/// Sends bytes to and from programs on alpha, by each CPU.
#[track_caller]
fn the_network_serves_both(lab: &Lab, guest: &Guest) {
    let tool = guest_tests::command::built("guest-tool");
    let tool = tool.to_str().expect("UTF-8");
    let bytes = repetitions(SENT_BYTES).to_string();
    let mut peers = Vec::new();
    let mut works = Vec::new();
    for (cpu, ports) in [(0, ["7000", "7001"]), (1, ["7002", "7003"])] {
        let seed = (30 + cpu).to_string();
        let [to, from] = ports.map(|port| format!("{ALPHA}:{port}"));
        for (there, here) in [
            (&["receive", ports[0]][..], format!("send {to} {seed} {bytes}")),
            (&["serve", ports[1], &seed, &bytes], format!("fetch {from}")),
        ] {
            let mut peer = lab.exec("alpha", &[&[tool], there].concat()).spawn();
            peer.wait_for("listening", Duration::from_secs(30));
            peers.push(peer);
            works.push((cpu, here));
        }
    }
    let said = guest.works(&works);
    for ((peer, said), (cpu, here)) in peers.into_iter().zip(&said).zip(&works) {
        let told = peer.wait().expect(0).text();
        assert_eq!(told.lines().last(), Some(said.as_str()), "{here} on CPU {cpu}");
        assert!(said.ends_with(&format!("-{bytes}")), "{said}");
    }
    guest.told("both CPUs have sent and received");
}

/// Runs processes on all CPUs at the same time.
#[track_caller]
fn processes_come_and_go(guest: &Guest) {
    let count = repetitions(10);
    let forks = format!(
        "i=0; while [ $i -lt {count} ]; do i=$((i+1)); [ $(/bin/echo $i) = $i ]; (exit 0); done; echo $i"
    );
    assert_eq!(guest.on_each(&forks), vec![count.to_string(); guest.cpus]);
    guest.told(&format!(
        "{count} programs have run on each CPU, and {count} subshells"
    ));
}

/// Runs threads that interrupt, signal and wake each other, and compare clocks.
#[track_caller]
fn threads_meet(guest: &Guest) {
    let cpus = &guest.cpus.to_string();
    let [seconds, hand_overs] = [3, 50].map(|full| repetitions(full).to_string());
    let works = [
        format!("ipi {cpus} {seconds}"),
        format!("clock {cpus} {hand_overs}"),
    ];
    let said = guest.works(&works.clone().map(|work| (0, work)));
    guest.told(&format!("{works:?}: {said:?}"));
}

/// Reports on the VM's coherent memory, of the shard on each host.
#[track_caller]
fn shards(guest: &Guest) -> Vec<Value> {
    let told = guest.inspect();
    let shards = told["status"]["span"]["coherence"]["shards"].as_array();
    let shards = shards.unwrap_or_else(|| panic!("no shards in {told:#}"));
    assert_eq!(shards.len(), guest.cpus, "{told:#}");
    shards.clone()
}

/// Checks that no word of a page table was changed on both hosts.
#[track_caller]
fn tables_had_no_conflicts(guest: &Guest) {
    for shard in shards(guest) {
        assert_eq!(shard["tables"]["conflicts"], 0, "{shard:#}");
    }
}

/// Checks that pages go by the memory that both hosts see.
#[track_caller]
fn pages_go_by_shared_memory(guest: &Guest) {
    let ways: Vec<Value> = shards(guest).iter().map(|shard| shard["ways"].clone()).collect();
    assert_eq!(json!(ways), json!([[null, "shared"], ["shared", null]]));
}

#[test]
#[ignore = "6 to 15 minutes where hosts are emulated; `make campaign NAME=hosts` runs it"]
fn linux_over_two_hosts_works_over_a_bad_link_too_reboots_and_powers_off() {
    let lab = two_hosts("two");
    let before = HOSTS.iter().map(|host| Traces::of(&lab, host));
    let before: Vec<Traces> = before.collect();
    let mut guest = Guest::boot(&lab, "two", roomy());
    for (host, before) in HOSTS.iter().zip(&before) {
        Traces::of(&lab, host).expect_vm(before);
    }
    guest.connect();
    guest.equip();
    each_reads_what_another_wrote(&guest, &WAYS[..1], repetitions(32));
    each_reads_what_another_wrote(&guest, &WAYS[1..], repetitions(MANY_BLOCKS));
    guest.sh(0, "rm /tmp/data");
    let written = the_disk_serves_both(&guest);
    the_network_serves_both(&lab, &guest);
    processes_come_and_go(&guest);
    threads_meet(&guest);

    each_reads_over_a_bad_link(&lab, &guest, repetitions(8));
    tables_had_no_conflicts(&guest);

    guest.reboot(1);
    guest.equip();
    the_files_are_there(&guest, &written);
    guest.last_words(1, "poweroff -f");
    let status = guest.terminal.wait(END_LIMIT);
    assert_eq!(status, 0, "exit status; the terminal:\n{}", guest.terminal.seen());
    guest.told("it has powered off");
    for (host, before) in HOSTS.iter().zip(&before) {
        expect_nothing_left(&lab, host, before);
    }
    lab.shell("alpha", "e2fsck -fn /run/hosts.ext4 >&2");

    if in_campaign() {
        the_last_host_is_lost(&lab, Guest::boot(&lab, "lost", "256M"), &before);
    }
    lab.cluster_down();
}

/// Uses connections with TLS, which carry doorbells only here.
#[test]
#[ignore = "5 minutes where hosts are emulated; `make campaign NAME=hosts` runs it"]
fn linux_over_two_hosts_that_share_memory_goes_by_it_in_each_boot() {
    let shared = format!("[[shared]]\nsize = \"2M\"\nhosts = {HOSTS:?}\n");
    let lab = Lab::linked("sharing", HOSTS, &shared);
    let paths: Vec<String> = HOSTS.iter().map(|host| lab.shell(host, FIND_SHARED)).collect();
    assert_eq!(paths[0], paths[1]);
    lab.cluster_up(Some(&paths[0]), "");
    let before: Vec<Traces> = HOSTS.iter().map(|host| Traces::of(&lab, host)).collect();
    let file = over(VmFile::new("sharing").memory("256M"), HOSTS.len());
    let mut guest = Guest::of(&lab, &file, HOSTS.len());
    pages_go_by_shared_memory(&guest);
    guest.equip();
    each_reads_what_another_wrote(&guest, &WAYS, repetitions(32));
    threads_meet(&guest);
    tables_had_no_conflicts(&guest);
    guest.reboot(1);
    guest.equip();
    pages_go_by_shared_memory(&guest);
    each_reads_what_another_wrote(&guest, &WAYS, repetitions(8));
    the_last_host_is_lost(&lab, guest, &before);
    lab.cluster_down();
}

#[test]
fn linux_over_two_hosts_is_one_machine_and_ends_as_one() {
    is_one_machine_and_ends_as_one(&Lab::linked("pair", HOSTS, ""), &WAYS);
}

#[test]
#[ignore = "8 minutes where hosts are emulated; `make campaign NAME=hosts` runs it"]
fn linux_over_three_hosts_is_one_machine_and_ends_as_one() {
    is_one_machine_and_ends_as_one(&Lab::linked("three", super::HOSTS, ""), &ROUND);
}

/// Runs Linux over all hosts of a lab.
#[track_caller]
fn is_one_machine_and_ends_as_one(lab: &Lab, ways: &[(usize, usize)]) {
    lab.cluster_up(None, "spans = \"plain\"\n");
    let before = lab.hosts.iter().map(|host| Traces::of(lab, host));
    let before: Vec<Traces> = before.collect();
    let cpus = lab.hosts.len();
    let file = over(VmFile::new("one").memory("256M"), cpus);
    let guest = Guest::of(lab, &file, cpus);
    let nodes = guest.sh(0, "cat /sys/devices/system/node/node*/cpulist");
    let each_host: Vec<String> = (0..cpus).map(|cpu| cpu.to_string()).collect();
    assert_eq!(nodes, each_host.join("\n"), "each host is a node");
    guest.equip();
    each_reads_what_another_wrote(&guest, ways, 2);
    threads_meet(&guest);
    the_last_vcpu_moves_home_and_back(&guest);
    all_hosts_stand_still_in_a_pause(&guest);
    vcpus_of_all_hosts_are_stopped_pinned_and_limited(lab, &guest);
    tables_had_no_conflicts(&guest);
    the_last_host_is_lost(lab, guest, &before);
    lab.cluster_down();
}

/// Stops a vCPU on each host, has their monitors count and pin them, and gives all hosts another weight.
#[track_caller]
fn vcpus_of_all_hosts_are_stopped_pinned_and_limited(lab: &Lab, guest: &Guest) {
    let (last, host) = (guest.cpus - 1, *lab.hosts.last().expect("several hosts"));
    let count = |known: &Value, vcpu: usize| known["status"]["stops"][vcpu]["count"].as_u64();
    let before = guest.inspect();
    for vcpu in 0..guest.cpus {
        let vcpu = vcpu.to_string();
        guest.command(&["pause", "--vcpu", &vcpu, "--for", "100ms"]).ok();
    }
    let known = guest.inspect();
    for vcpu in 0..guest.cpus {
        let expected = count(&before, vcpu).map(|count| count + 1);
        assert!(expected.is_some(), "{before:#}");
        assert_eq!(count(&known, vcpu), expected, "stops of vCPU {vcpu}");
        let of_vcpu = &known["status"]["vcpus"][vcpu];
        assert_eq!((&of_vcpu["vcpu"], &of_vcpu["cell"]), (&vcpu.into(), &vcpu.into()));
        assert!(of_vcpu["ran_ms"].as_u64() > Some(0), "{of_vcpu}");
        assert!(of_vcpu["kvm"]["halts"].as_u64() > Some(0), "{of_vcpu}");
    }
    // The guest still answers on each.
    assert_eq!(guest.on_each("echo well"), vec!["well"; guest.cpus]);

    let pin = |cpus: &str| guest.command(&["update", "--pin", &format!("{last}={cpus}")]);
    let refused = pin("63").run();
    assert_ne!(refused.status, 0, "{refused}");
    let why = format!("cell {last} on host {host}: vCPU {last} is in cell {last}, which has no CPU 63");
    assert!(refused.errors().contains(&why), "{refused}");
    // A host with one CPU may have it under another number than 0.
    let own = known["status"]["vcpus"][last]["cpus"][0].clone();
    pin(&own.to_string()).ok();
    let known = guest.inspect();
    assert_eq!(known["pins"][&last.to_string()], json!([own]), "{known:#}");
    pin("all").ok();

    let controllers = lab.shell(host, "cat /sys/fs/cgroup/cgroup.controllers");
    let has = |wanted| controllers.split_whitespace().any(|known| known == wanted);
    let changed = guest.command(&["update", "--cpu-weight", "300"]);
    if ["cpu", "memory", "pids"].into_iter().all(has) {
        changed.ok();
        for (host, of_vcpu) in lab
            .hosts
            .iter()
            .zip(known["status"]["vcpus"].as_array().expect("vCPUs"))
        {
            let group = format!("$(cut -d: -f3 /proc/{}/cgroup)", of_vcpu["shard_pid"]);
            let weight = lab.shell(host, &format!("cat /sys/fs/cgroup{group}/cpu.weight"));
            assert_eq!(weight, "300", "on host {host}");
        }
        assert_eq!(guest.inspect()["spec"]["cpu_weight"], 300);
    } else {
        let refused = changed.run();
        let why = "cannot limit what the VM uses of the host";
        assert!(refused.errors().contains(why), "{refused}");
    }
    guest.told(
        "vCPUs of all hosts were stopped, the last one was pinned, and its hosts were to share otherwise",
    );
}

/// Moves the last vCPU to the home's cell, where it runs processes, and back to its own.
#[track_caller]
fn the_last_vcpu_moves_home_and_back(guest: &Guest) {
    let last = guest.cpus - 1;
    for cell in [0, last] {
        guest.move_vcpu(last, cell);
        assert_eq!(guest.places()[last], cell);
        let ran_on = guest.sh(last, "cut -d ' ' -f 39 /proc/self/stat");
        assert_eq!(ran_on, last.to_string(), "vCPU {last} in cell {cell}");
        guest.told(&format!("vCPU {last} runs in cell {cell}"));
    }
}

/// Pauses the VM for some seconds: the CPUs of all hosts count on afterwards, and the guest's kernel reports
/// nothing.
#[track_caller]
fn all_hosts_stand_still_in_a_pause(guest: &Guest) {
    let last = guest.cpus - 1;
    let read = format!("for cpu in $(seq 0 {last}); do cat /tmp/count$cpu 2>/dev/null || echo 0; done");
    let counts = || -> Vec<u64> {
        let said = guest.sh(0, &read);
        said.lines()
            .map(|count| count.parse().expect("a number"))
            .collect()
    };
    let complaints = || guest.sh(0, "dmesg | grep -cE 'stall|lockup' || true");
    // Each round starts a program, whose kernel data go from host to host, a page in some milliseconds. With
    // five rounds a second the CPUs of a slow lab wait for pages only, and count once in ten seconds.
    for cpu in 0..guest.cpus {
        let count = "i=0; while [ ! -e /tmp/enough ]; do i=$((i + 1)); echo $i >/tmp/next; \
                     mv /tmp/next /tmp/count; sleep 2; done"
            .replace("/tmp/next", &format!("/tmp/next{cpu}"))
            .replace("/tmp/count", &format!("/tmp/count{cpu}"));
        guest.sh(cpu, &format!("({count}) </dev/null >/dev/null 2>&1 &"));
    }
    let before = complaints();
    let count_on = |what: &str| {
        let since = counts();
        assert_eq!(since.len(), guest.cpus);
        wait::until(what, COUNT_LIMIT, || {
            let now = counts();
            since
                .iter()
                .zip(&now)
                .all(|(since, now)| now > since)
                .then_some(())
        });
    };
    count_on("the CPUs of all hosts count");
    guest.order("pause");
    assert_eq!(guest.inspect()["paused"], true);
    std::thread::sleep(PAUSE);
    guest.order("resume");
    assert_eq!(guest.inspect()["paused"], false);
    count_on("the CPUs of all hosts count on after a pause");
    assert_eq!(complaints(), before);
    guest.sh(0, "touch /tmp/enough");
    guest.told("it has gone on after a pause");
}

/// A program of two modules; the CPU that compiles each is given, as each has to compile one.
const MAKEFILE: &str = "hello: hello.o main.o
\tgcc -o $@ $^
hello.o: CPU = $(FIRST)
main.o: CPU = $(SECOND)
%.o: %.c
\ttaskset -c $(CPU) gcc -O2 -c -o $@ $<
";
const HELLO: &str = r#"#include <stdio.h>
void hello(const char *whom) { printf("hello, %s\n", whom); }
"#;
const MAIN: &str = r#"void hello(const char *whom);
int main(void) { hello("hosts"); return 0; }
"#;

/// Builds it in parallel on those CPUs; returns the checksums of all files.
#[track_caller]
fn built_on(guest: &Guest, cpus: [usize; 2]) -> String {
    let file = |name: &str, text: &str| format!("cat >{name} <<'END'\n{text}END\n");
    let files = [("Makefile", MAKEFILE), ("hello.c", HELLO), ("main.c", MAIN)];
    let files: String = files.iter().map(|(name, text)| file(name, text)).collect();
    guest.sh(0, &format!("mkdir /root/hello; cd /root/hello\n{files}"));
    let [first, second] = cpus;
    let said = guest.sh(
        0,
        &format!("cd /root/hello; make -s -j2 FIRST={first} SECOND={second} && ./hello"),
    );
    assert_eq!(said, "hello, hosts");
    guest.told("it has built a program");
    guest.sh(0, "cd /root/hello; sha256sum hello hello.o main.o")
}

#[test]
#[ignore = "11 minutes where hosts are emulated; `make campaign NAME=hosts` runs it"]
fn debian_builds_on_both_hosts_what_a_plain_vm_builds() {
    let lab = two_hosts("builds");
    let debian = |name: &str| VmFile::of(name, "debian-12").memory("640M");
    let plain = {
        let guest = Guest::of(&lab, &debian("plain").cpus(1), 1);
        built_on(&guest, [0, 0])
    };
    let guest = Guest::of(&lab, &over(debian("both"), HOSTS.len()), HOSTS.len());
    // Services waited at home while the second CPU came, and were let go; udev was not.
    let allowed = |process: &str| {
        guest.sh(
            0,
            &format!("sed -n 's/^Cpus_allowed_list:\\t//p' /proc/{process}/status"),
        )
    };
    assert_eq!(allowed("1"), "0-1");
    assert_eq!(allowed("$(pgrep -o systemd-udevd)"), "0");
    assert_eq!(built_on(&guest, [0, 1]), plain);
    tables_had_no_conflicts(&guest);
    drop(guest);
    lab.cluster_down();
}

/// Kills the part's monitor on the last of the hosts. The VM ends, reports the host, and leaves nothing on
/// any of them.
fn the_last_host_is_lost(lab: &Lab, mut guest: Guest, before: &[Traces]) {
    for (host, before) in lab.hosts.iter().zip(before) {
        Traces::of(lab, host).expect_vm(before);
    }
    let last = lab.hosts.last().expect("hosts");
    // Few programs: each takes a fifth of a second to start there.
    let killed = lab.shell(
        last,
        "for file in $(grep -laE '^mirrorball.part-monitor' /proc/[0-9]*/cmdline); do \
         file=${file#/proc/}; kill -9 ${file%/cmdline} && echo killed; done",
    );
    assert_eq!(killed, "killed", "one monitor on {last}");
    let status = guest.terminal.wait(SILENCE + END_LIMIT);
    let told = guest.terminal.seen();
    assert_eq!(status, 73, "exit status; the terminal:\n{told}");
    let place = format!("on host {last}");
    assert!(told.contains(&place), "the host is not named:\n{told}");
    guest.told(&format!("it has ended with the part {place}"));
    for (host, before) in lab.hosts.iter().zip(before) {
        expect_nothing_left(lab, host, before);
    }
}
