//! Risk: a command acts on other VMs than it names, or a cell takes VMs despite its cordon.

use std::time::Duration;

use guest_tests::host::Traces;
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, wait};
use serde_json::Value;

/// Time limit until a VM is gone after a command that ends it.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Promise CELL-11.
#[test]
fn cordoned_cell_takes_no_vm_and_keeps_those_that_run() {
    let scratch = Scratch::new("cordon");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let file = |name: &str| VmFile::new(name).key("cell", "1");
    let kept = file("cordon-kept").start(&scratch);
    mirrorball(["cluster", "cordon", "1"]).ok();
    let shown = mirrorball(["cluster", "status"]).ok().text();
    assert!(shown.lines().any(|line| line.contains(" cordoned ")), "{shown}");
    let new = mirrorball(["run", "-d"])
        .args([file("cordon-new").write(&scratch)])
        .run()
        .expect(1);
    assert!(
        new.errors().contains("cell 1 is cordoned") && new.errors().contains("mirrorball cluster uncordon 1"),
        "{new}"
    );
    // A clone of one that runs there is a new VM there, too: its file names the cell.
    let clone = mirrorball(["clone", kept.name()]).run().expect(1);
    assert!(clone.errors().contains("cell 1 is cordoned"), "{clone}");
    let span = VmFile::new("cordon-span").cpus(2).memory("256M").span(&[0, 1]);
    let span = mirrorball(["run", "-d"])
        .args([span.write(&scratch)])
        .run()
        .expect(1);
    assert!(span.errors().contains("cell 1 is cordoned"), "{span}");
    // Cell 0 has more vCPUs than cell 1 by the second of these.
    let others = ["cordon-a", "cordon-b"].map(|name| VmFile::new(name).start_only(&scratch));
    assert_eq!(cluster.vms(0), others.each_ref().map(|vm| vm.name()));
    mirrorball(["cluster", "lend", "128M", "--from", "1", "--to", "0"]).ok();

    let process = cluster.pid(1);
    guest_tests::host::kill9(process);
    cluster.pid_after(1, process);
    assert_eq!(cluster.cell(1)["cordoned"], true);
    assert_eq!(cluster.vms(1), [kept.name()]);
    kept.sh("echo still here");
    let still = mirrorball(["run", "-d"])
        .args([file("cordon-new").write(&scratch)])
        .run()
        .expect(1);
    assert!(still.errors().contains("cell 1 is cordoned"), "{still}");
    mirrorball(["cluster", "uncordon", "1"]).ok();
    let taken = file("cordon-new").start_only(&scratch);
    assert_eq!(taken.listed().expect("listed")["cell"], 1);
    for vm in others.iter().chain([&kept, &taken]) {
        vm.kill();
        vm.wait_ended(END_LIMIT);
    }
    mirrorball(["cluster", "down"]).ok();
    drop((others, kept, taken, cluster));
    before.expect_unchanged("a cordon");
}

/// Promise HOSTILE-30.
#[test]
fn labels_select_the_vms_that_a_command_acts_on() {
    let scratch = Scratch::new("labels");
    let mine = format!("run-{}", std::process::id());
    let file = |name: &str, tier: &str| {
        let labels = format!("{{ \"example.com/of\" = \"{mine}\", tier = \"{tier}\" }}");
        VmFile::new(name).key("labels", &labels)
    };
    let a = file("labels-a", "1").start(&scratch);
    let b = file("labels-b", "1").start_only(&scratch);
    let other = file("labels-c", "2").start_only(&scratch);
    let of_mine = format!("example.com/of={mine}");
    let listed = |words: &[&str]| -> Vec<String> {
        let records = mirrorball(["ps", "--json"]).args(words).ok().json();
        let records = records.as_array().expect("an array").iter();
        records
            .map(|record| record["name"].as_str().expect("a name").to_owned())
            .collect()
    };
    assert_eq!(listed(&["--label", &of_mine]), [a.name(), b.name(), other.name()]);
    assert_eq!(
        listed(&["--label", &of_mine, "--label", "tier=2"]),
        [other.name()]
    );
    assert_eq!(listed(&["--label", &of_mine, "--label", "tier"]).len(), 3);
    // A clone has its parent's labels.
    mirrorball(["clone", a.name(), "--name", "t-labels-copy"]).ok();
    let copy = Vm::named("t-labels-copy");
    let inspected = mirrorball(["inspect", copy.name()]).ok().json();
    assert_eq!(inspected["spec"]["labels"]["example.com/of"], mine.as_str());

    let first = ["--label", &of_mine[..], "--label", "tier=1"];
    let paused = mirrorball(["pause"]).args(first).ok().text();
    let lines: Vec<&str> = paused.lines().collect();
    assert_eq!(lines.len(), 3, "{paused}");
    for vm in [&a, &b, &copy] {
        assert!(lines.contains(&&format!("{}: paused", vm.name())[..]), "{paused}");
        assert_eq!(vm.listed().expect("listed")["paused"], true);
    }
    assert_eq!(other.listed().expect("listed")["paused"], false);
    mirrorball(["resume"]).args(first).ok();
    mirrorball(["wait", "--for", "running", "--limit", "60"])
        .args(first)
        .ok();
    let late = mirrorball(["wait", "--limit", "1"]).args(first).run().expect(124);
    assert_eq!(late.errors().lines().count(), 3, "{late}");
    mirrorball(["kill"]).args(first).ok();
    assert_eq!(listed(&["--label", &of_mine]), [other.name()]);
    let none = mirrorball(["kill"]).args(first).run().expect(1);
    assert!(none.errors().contains("no running VM has the label"), "{none}");
    let both = mirrorball(["kill", other.name(), "--label", "tier"])
        .run()
        .expect(2);
    assert!(both.errors().contains("cannot be used with"), "{both}");
    other.kill();
    for vm in [a, b, copy, other] {
        vm.wait_ended(END_LIMIT);
    }
}

/// The events that are kept, behind a token if one is given.
fn events(after: Option<&str>) -> Vec<Value> {
    let mut call = mirrorball(["events", "--json", "--no-follow"]);
    if let Some(token) = after {
        call = call.args(["--after", token]);
    }
    let text = call.ok().text();
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// The kinds of the events of a VM, in order.
fn of_vm(events: &[Value], vm: &Vm) -> Vec<String> {
    let own = events.iter().filter(|event| event["vm"] == vm.name());
    own.map(|event| event["event"].as_str().expect("text").to_owned())
        .collect()
}

/// Promise HOSTILE-29.
#[test]
fn events_list_the_life_of_a_vm_and_of_its_cell_from_a_token_on() {
    let scratch = Scratch::new("events");
    let cluster = Cluster::up(&scratch);
    let mut follower = mirrorball(["events"]).limit(Duration::from_secs(300)).spawn();
    let vm = VmFile::new("events").key("cell", "1").start(&scratch);
    follower.wait_for(&format!("vm-running       {}", vm.name()), END_LIMIT);
    let first = events(None);
    assert_eq!(of_vm(&first, &vm), ["vm-starting", "vm-adopted", "vm-running"]);
    let ups = first
        .iter()
        .filter(|event| event["event"] == "cell-up" && event["cell"] == 1);
    assert!(ups.count() >= 1, "{first:?}");
    let token = first.last().expect("an event")["token"]
        .as_str()
        .expect("text")
        .to_owned();

    mirrorball(["pause", vm.name()]).ok();
    mirrorball(["resume", vm.name()]).ok();
    vm.reboot();
    let process = cluster.pid(1);
    guest_tests::host::kill9(process);
    cluster.pid_after(1, process);
    let adopted = || {
        let events = events(Some(&token));
        (of_vm(&events, &vm).last()? == "vm-adopted").then_some(events)
    };
    let between = wait::until("the next process has the VM", END_LIMIT, adopted);
    assert_eq!(
        of_vm(&between, &vm),
        ["vm-paused", "vm-resumed", "vm-rebooted", "vm-adopted"],
        "nothing twice and nothing missing"
    );
    let cell: Vec<&Value> = between
        .iter()
        .filter(|event| event["cell"] == 1 && event["vm"].is_null())
        .collect();
    assert_eq!(cell[0]["event"], "cell-died", "{cell:?}");
    assert_eq!(cell[1]["event"], "cell-up", "{cell:?}");
    assert_ne!(cell[1]["pid"], process);
    vm.kill();
    let last = events(between.last().expect("an event")["token"].as_str());
    assert_eq!(of_vm(&last, &vm), ["vm-ended"]);
    assert_eq!(last[0]["status"], 74, "{last:?}");
    follower.wait_for("vm-ended", END_LIMIT);
    follower.signal(nix::sys::signal::Signal::SIGKILL);
    drop(follower.wait());

    // A position that never existed.
    let gone = events(Some("1-1-30"));
    assert_eq!(gone[0]["event"], "gap");
    assert!(gone.len() > first.len() + between.len(), "then all that is kept");
    let wrong = mirrorball(["events", "--after", "yesterday"]).run().expect(2);
    assert!(wrong.errors().contains("is no token"), "{wrong}");
    mirrorball(["cluster", "down"]).ok();
}

/// Promise HOSTILE-28.
#[test]
fn defined_vms_start_with_the_cluster_in_their_order() {
    let scratch = Scratch::new("defined");
    // No other test's cluster may start them.
    let data = scratch.join("data");
    std::fs::create_dir(&data).expect("our own directory");
    let images = guest_tests::host::data_directory().join("images");
    std::os::unix::fs::symlink(images, data.join("images")).expect("our own directory");
    let vm = |words: &[&str]| mirrorball([&["vm"], words].concat()).env("MIRRORBALL_DATA", &data);
    let define = |file: &VmFile| vm(&["define"]).args([file.write(&scratch)]).run();
    let db = VmFile::new("defined-z-db");
    let after = |name: &str, other: &VmFile| VmFile::new(name).key("after", &format!("[{:?}]", other.name()));
    let web = after("defined-a-web", &db);
    let unknown = define(&web).expect(1);
    assert!(unknown.errors().contains("which is not defined"), "{unknown}");
    define(&db).expect(0);
    define(&web).expect(0);
    let circle = define(&db.clone().key("after", &format!("[{:?}]", web.name()))).expect(1);
    assert!(circle.errors().contains("in a circle"), "{circle}");
    // Nothing of a refused definition is kept.
    let broken = after("defined-b-broken", &db).key("cell", "7");
    define(&broken).expect(0);
    let kept = vm(&["undefine", db.name()]).run().expect(1);
    assert!(kept.errors().contains("starts after"), "{kept}");

    let cluster = Cluster;
    let begun = events(None)
        .last()
        .map(|event| event["token"].as_str().expect("text").to_owned());
    let up = mirrorball(["cluster", "up", "--lab", "never", "--cells", "2"])
        .env("MIRRORBALL_DATA", &data)
        .limit(Duration::from_secs(120))
        .ok();
    let vms = [Vm::named(db.name()), Vm::named(web.name())];
    assert!(
        up.errors()
            .contains(&format!("{}: there is no cell 7", broken.name())),
        "{up}"
    );
    let running: Vec<String> = events(begun.as_deref())
        .iter()
        .filter(|event| event["event"] == "vm-running")
        .map(|event| event["vm"].as_str().expect("a name").to_owned())
        .collect();
    assert_eq!(running, [db.name(), web.name()], "in order of `after`");
    let listed = vm(&["ls", "--json"]).ok().json();
    let states: Vec<(&str, bool)> = listed
        .as_array()
        .expect("an array")
        .iter()
        .map(|vm| (vm["name"].as_str().expect("a name"), vm["running"] == true))
        .collect();
    assert_eq!(
        states,
        [(web.name(), true), (broken.name(), false), (db.name(), true)]
    );
    assert_eq!(cluster.cells().len(), 2);

    vms[1].kill();
    vms[1].wait_ended(END_LIMIT);
    vm(&["start", web.name(), "--lab", "never"])
        .limit(Duration::from_secs(120))
        .ok();
    // Dropping it would end the VM.
    let started = Vm::named(web.name());
    assert!(started.listed().is_some());
    // Those that run are left alone, also by the next cluster.
    mirrorball(["cluster", "down", "--leave"]).ok();
    let again = mirrorball(["cluster", "up", "--lab", "never", "--cells", "2"])
        .env("MIRRORBALL_DATA", &data)
        .limit(Duration::from_secs(120))
        .ok();
    assert!(!again.text().contains(": started"), "{again}");
    for name in [web.name(), broken.name(), db.name()] {
        vm(&["undefine", name]).ok();
        let _ = mirrorball(["kill", name]).run();
    }
    assert_eq!(vm(&["ls", "--json"]).ok().text().trim(), "[]");
    vms[0].wait_ended(END_LIMIT);
    started.wait_ended(END_LIMIT);
    mirrorball(["cluster", "down"]).ok();
}
