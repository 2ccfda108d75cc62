//! Bad input: refused at once, in one line with the remedy, without any resource taken.

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::span::{cells_are_empty, two_cells};
use guest_tests::{Cluster, Output, Scratch, VmFile, mirrorball};

const AT_ONCE: Duration = Duration::from_secs(20);

#[track_caller]
fn says(output: &Output, words: &[&str]) {
    let said = output.errors();
    for word in words {
        assert!(said.contains(word), "does not say {word:?}:\n{output}");
    }
    let lines = said.lines().filter(|line| !line.trim().is_empty()).count();
    let in_its_place = said.matches("  × ").count() == 1 && said.matches("help: ").count() == 1;
    assert!(in_its_place || lines <= 2, "not one line:\n{output}");
    assert!(!said.contains("panicked"), "a riddle:\n{output}");
}

#[track_caller]
fn refused(file: &VmFile, scratch: &Scratch, words: &[&str]) {
    let output = mirrorball(["run", "-d"])
        .args([file.write(scratch)])
        .limit(AT_ONCE)
        .run();
    says(&output.expect(1), words);
}

#[test]
fn impossible_spans_are_refused_with_help() {
    let scratch = Scratch::new("refused");
    let without = Traces::now();
    refused(
        &two_cells("alone"),
        &scratch,
        &["no cluster is up here; start one with `mirrorball cluster up`"],
    );
    let cluster = Cluster::up(&scratch);
    let span = |cells: &[u16]| two_cells("span").span(cells);
    refused(
        &span(&[0, 0]),
        &scratch,
        &["cell 0 is named twice", "name it once"],
    );
    refused(&span(&[]), &scratch, &["no cells to span", "span = \"auto\""]);
    refused(
        &span(&[0, 7]),
        &scratch,
        &["there is no cell 7 to span; there is 0, 1"],
    );
    refused(
        &span(&[0, 1]).key("cell", "1"),
        &scratch,
        &["leave out `cell`, or `span`"],
    );
    let node = |cpus: &str| format!("[[nodes]]\ncpus = \"{cpus}\"\nmemory = \"128M\"");
    let nodes = span(&[0, 1]).table(&node("0-1")).table(&node("2-3"));
    refused(&nodes, &scratch, &["leave out `nodes`, or `span`"]);
    refused(
        &span(&[0, 1]).cpus(1),
        &scratch,
        &["need a vCPU each", "cpus = 2"],
    );
    refused(&span(&[0, 1]).memory("96M"), &scratch, &["memory = \"128M\""]);
    refused(
        &span(&[0, 1]).key("share", "\"adaptive\""),
        &scratch,
        &["leave out `share`"],
    );
    refused(&span(&[0, 1]).key("span", "\"all\""), &scratch, &["auto"]);

    // More than one of the cells has; memory taken in the other is given back.
    let room = |cell: usize| cluster.cell(cell)["memory_bytes"].as_u64().expect("bytes") >> 20;
    let less = room(0).min(room(1));
    let other = VmFile::new("other")
        .memory("512M")
        .key("cell", "1")
        .start_only(&scratch);
    let too_much = span(&[0, 1]).memory(&format!("{}M", 2 * (less - 256)));
    refused(
        &too_much,
        &scratch,
        &["cell 1 has", "MiB of its own memory", "give the VM less"],
    );
    assert_eq!(cluster.given_bytes(0), 0);
    other.kill();
    cells_are_empty(&cluster);

    let flags = [
        "run", "--image", "tiny", "--cpus", "2", "--memory", "256M", "--net", "none", "-d",
    ];
    let twice = mirrorball(flags)
        .args(["--span", "1,1"])
        .limit(AT_ONCE)
        .run()
        .expect(1);
    says(&twice, &["cell 1 is named twice"]);
    let word = mirrorball(flags)
        .args(["--span", "both"])
        .limit(AT_ONCE)
        .run()
        .expect(2);
    assert!(
        word.errors().contains("`auto`, or their numbers, as 0,1"),
        "{word}"
    );
    cells_are_empty(&cluster);
    drop(cluster);
    without.expect_unchanged("what was refused");
}

#[test]
fn impossible_moves_are_refused_and_change_nothing() {
    let scratch = Scratch::new("moves");
    let _cluster = Cluster::up(&scratch);
    let vm = two_cells("moves").start(&scratch);
    let boot = vm.boot_id();
    let places = vm.places();
    says(
        &vm.move_vcpu(1, 7).run().expect(1),
        &["spans the cells 0, 1, not 7"],
    );
    says(&vm.move_vcpu(4, 1).run().expect(1), &["has no such vCPU"]);
    says(&vm.move_vcpu(200, 1).run().expect(1), &["has no such vCPU"]);
    vm.move_vcpu(300, 1).run().expect(2);
    let stays = vm.move_vcpu(0, places[0]).ok().text();
    assert!(stays.contains("stood still for 0 us"), "{stays}");
    assert_eq!(vm.places(), places);
    let plain = VmFile::new("plain").start(&scratch);
    says(
        &plain.move_vcpu(0, 1).run().expect(1),
        &["does not span cells", "--span 0,1"],
    );
    plain.kill();
    for [command, word] in [["clone", "clone"], ["snapshot", "snapshot"]] {
        let target = scratch.join("kept");
        let call = mirrorball([command, vm.name()]);
        let call = if command == "snapshot" {
            call.args([&target])
        } else {
            call
        };
        let output = call.limit(AT_ONCE).run().expect(1);
        says(&output, &["spans cells", word]);
        assert!(!target.exists(), "a snapshot was begun");
    }
    assert_eq!(vm.boot_id(), boot);
    vm.stop();
    vm.wait_ended(AT_ONCE);
    let gone = vm.move_vcpu(0, 1).run().expect(1);
    says(&gone, &[vm.name()]);
}

#[test]
fn automatic_span_has_the_fewest_cells() {
    let scratch = Scratch::new("auto");
    let cluster = Cluster::up(&scratch);
    let own = |name: &str, memory: &str, cpus: u8| {
        VmFile::new(name)
            .cpus(cpus)
            .memory(memory)
            .key("span", "\"auto\"")
    };
    let small = own("small", "128M", 1).start(&scratch);
    assert_eq!(small.places(), [0]);
    small.kill();
    let room = cluster.cell(0)["memory_bytes"].as_u64().expect("bytes") >> 20;
    // More than one cell has: the host spends no memory that the guest does not touch.
    let large = own("large", &format!("{}M", room + 64), 2).start(&scratch);
    assert_eq!(large.places().len(), 2);
    assert_ne!(large.places()[0], large.places()[1]);
    large.kill();
    cells_are_empty(&cluster);
}
