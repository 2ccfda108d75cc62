//! Risk: a host can't join or leave a cluster that runs, or a VM, a link or a name is lost by it; or names of
//! a lost host stay taken permanently, or are free while its VMs run.
//!
//! The hosts are lab hosts, wherever the test runs.

#[path = "hosts/lab.rs"]
#[allow(dead_code)]
mod lab;

use std::time::{Duration, Instant};

use guest_tests::wait;
use serde_json::Value;

use lab::{COMMAND_LIMIT, Lab, SILENCE};

/// Each host's own copy of the cluster's file, and its keys.
const FILE: &str = "/run/cluster/cluster.toml";
/// The folder of the third host's cluster file and keys.
const JOINED: &str = "/run/joined";
/// A lease of etcd, by `SILENCE`.
const LEASE: Duration = Duration::from_secs(60);
/// Time limit until a host has ended its VMs, and the others have noticed.
const MARGIN: Duration = Duration::from_secs(45);

/// A cluster of alpha and beta, whose files are on the hosts themselves: alpha has the authority's key.
fn two_up(lab: &Lab, more: &str) {
    let mut text = String::new();
    for (number, name) in (1..).zip(["alpha", "beta"]) {
        text += &format!("[[hosts]]\nname = \"{name}\"\naddress = \"10.77.0.{number}:7400\"\n");
    }
    text += "[[cells]]\nhost = \"alpha\"\n[[cells]]\nhost = \"beta\"\n";
    text += &format!("[membership]\nsilence_ms = {}\n{more}", SILENCE.as_millis());
    let folder = lab.scratch.write("cluster.toml", text);
    let folder = folder
        .parent()
        .and_then(|folder| folder.to_str())
        .expect("UTF-8")
        .to_owned();
    guest_tests::mirrorball(["cluster", "keys", &format!("{folder}/cluster.toml")]).ok();
    lab.shell(
        "alpha",
        &format!("mkdir -p /run/cluster && cp -r {folder}/cluster.toml {folder}/keys /run/cluster/"),
    );
    let own = "authority.pem revoked.crl beta.pem beta.key";
    lab.shell(
        "beta",
        &format!(
            "mkdir -p /run/cluster/keys && cp {folder}/cluster.toml /run/cluster/ && \
             cd {folder}/keys && cp {own} /run/cluster/keys/"
        ),
    );
    for host in ["alpha", "beta"] {
        lab.on(host, &["cluster", "up", FILE]).ok();
    }
    for host in ["alpha", "beta"] {
        lab.wait_for_lives(host, &[true, true]);
    }
}

/// The number of each cell, and its life, in the view of a host's cell.
fn cells(lab: &Lab, host: &str) -> Vec<(Value, Value)> {
    let status = lab.on(host, &["cluster", "status", "--json"]).ok().json();
    let cells = status.as_array().expect("an array").iter();
    cells
        .map(|cell| (cell["number"].clone(), cell["life"].clone()))
        .collect()
}

/// Invites gamma on alpha, and joins it; returns the output of `invite`.
fn join_gamma(lab: &Lab) -> String {
    let mut invite = lab.terminal("alpha", &["cluster", "invite", FILE, "gamma", "10.77.0.3"]);
    invite.expect("mirrorball cluster join ", COMMAND_LIMIT);
    let token = wait::until("a whole token", COMMAND_LIMIT, || {
        let seen = invite.seen();
        let (_, rest) = seen.split_once("mirrorball cluster join ")?;
        let (token, _) = rest.split_once('\r')?;
        Some(token.to_owned())
    });
    // It is refused for another host, and with a letter missing; afterwards it can still be used.
    let other = lab
        .on("beta", &["cluster", "join", &token])
        .run()
        .expect(1)
        .errors();
    assert!(
        other.contains("the token is for host gamma, and this is beta"),
        "{other}"
    );
    let cut = &token[..token.len() - 1];
    let cut = lab
        .on("gamma", &["cluster", "join", cut])
        .run()
        .expect(1)
        .errors();
    assert!(cut.contains("is no token"), "{cut}");
    lab.on("gamma", &["cluster", "join", &token, "--into", JOINED])
        .ok();
    assert_eq!(invite.wait(COMMAND_LIMIT), 0, "{}", invite.seen());
    // A token is for one use.
    lab.on("gamma", &["cluster", "down"]).ok();
    let again = lab
        .on("gamma", &["cluster", "join", &token, "--into", JOINED])
        .run()
        .expect(1)
        .errors();
    assert!(
        again.contains("no invitation answers at 10.77.0.1:7464"),
        "{again}"
    );
    lab.on("gamma", &["cluster", "up", &format!("{JOINED}/cluster.toml")])
        .ok();
    invite.seen()
}

/// Loses the host `beta`, and has a person declare it fenced: its VM's name is free only then.
fn forget_lost_beta(lab: &Lab) {
    lab.shell(
        "beta",
        "echo 0 > /proc/sys/kernel/panic; (sleep 1; echo c > /proc/sysrq-trigger) >/dev/null 2>&1 &",
    );
    lab.wait_for_lives("alpha", &[true, false]);
    let taken = lab.start_vm("alpha", "far", 0).expect(1).errors();
    assert!(taken.contains("is running already, in cell 1"), "{taken}");
    let unsaid = lab
        .on("alpha", &["cluster", "forget", "beta"])
        .run()
        .expect(1)
        .errors();
    assert!(unsaid.contains("say so with `--fenced`"), "{unsaid}");
    let forgotten = lab
        .on("alpha", &["cluster", "forget", "beta", "--fenced"])
        .ok()
        .text();
    assert!(forgotten.contains("names that are free: far"), "{forgotten}");
    lab.start_vm("alpha", "far", 0).expect(0);
}

#[test]
fn host_joins_a_cluster_that_runs_gets_a_vm_and_leaves_while_another_vm_runs_on() {
    let lab = Lab::linked("joins", &["alpha", "beta", "gamma"], "");
    two_up(&lab, "");
    lab.start_vm("alpha", "far", 1).expect(0);
    let before = cells(&lab, "alpha");
    let shard = |lab: &Lab| lab.on("beta", &["inspect", "far"]).ok().json()["shard_pid"].clone();
    let first_shard = shard(&lab);

    let said = join_gamma(&lab);
    assert!(said.contains("gamma is host of cell 2"), "{said}");
    for host in ["alpha", "beta", "gamma"] {
        lab.wait_for_lives(host, &[true; 3]);
    }
    // No process of the others' cells has ended because of it.
    assert_eq!(cells(&lab, "beta")[..2], before[..]);
    lab.shell(
        "alpha",
        "grep -q '^gamma ' /run/cluster/keys/issued.txt && ! test -e /run/cluster/keys/gamma.key",
    );
    lab.shell(
        "gamma",
        &format!("test -e {JOINED}/keys/gamma.key && ! test -e {JOINED}/keys/authority.key"),
    );
    let there = lab
        .on("alpha", &["cluster", "invite", FILE, "gamma", "10.77.0.3"])
        .run()
        .expect(1)
        .errors();
    assert!(
        there.contains("host gamma is in /run/cluster/cluster.toml already"),
        "{there}"
    );

    lab.start_vm("alpha", "new", 2).expect(0);
    let uname = lab.on("beta", &["exec", "-T", "new", "--", "uname"]).ok();
    assert_eq!(uname.text().trim(), "Linux");
    let taken = lab.start_vm("gamma", "far", 2).expect(1).errors();
    assert!(taken.contains("is running already, in cell 1"), "{taken}");

    let stays = lab
        .on("gamma", &["cluster", "leave", "--within", "1"])
        .run()
        .expect(1)
        .errors();
    assert!(stays.contains("VMs still run on gamma: new"), "{stays}");
    lab.on("gamma", &["cluster", "leave", "--stop"]).ok();
    for host in ["alpha", "beta"] {
        wait::until(
            &format!("{host} has a record of two cells"),
            SILENCE + COMMAND_LIMIT,
            || (cells(&lab, host) == before).then_some(()),
        );
        assert_eq!(lab.names(host), [("far".to_owned(), Value::from(1))]);
        let file = lab.shell(host, &format!("cat {FILE}"));
        assert!(
            !file.contains("\"gamma\"\naddress") && file.contains("left = true"),
            "{file}"
        );
    }
    lab.on("gamma", &["cluster", "status"]).run().expect(1);

    // It joins again, with a number that no cell has had, and is removed.
    let said = join_gamma(&lab);
    assert!(said.contains("gamma is host of cell 3"), "{said}");
    lab.wait_for_lives("beta", &[true; 3]);
    let removed = Instant::now();
    lab.on("alpha", &["cluster", "remove", FILE, "gamma"]).ok();
    for host in ["alpha", "beta"] {
        wait::until("the removed host is gone", COMMAND_LIMIT, || {
            (cells(&lab, host) == before).then_some(())
        });
    }
    eprintln!("a removed host was gone everywhere after {:?}", removed.elapsed());
    let lists = ["alpha", "beta"].map(|host| lab.shell(host, "cat /run/cluster/keys/revoked.crl"));
    assert_eq!(lists[0], lists[1]);

    assert_eq!(shard(&lab), first_shard, "the VM has been the same all the time");
    let answer = lab
        .on("alpha", &["exec", "-T", "far", "--", "echo", "answers"])
        .ok();
    assert_eq!(answer.text().trim(), "answers");

    forget_lost_beta(&lab);
    lab.on("alpha", &["kill", "far"]).ok();
    lab.on("alpha", &["cluster", "down"]).ok();
}

#[test]
fn vms_of_a_host_that_lost_its_membership_stop_and_their_names_are_free_only_then() {
    let lab = Lab::linked("lapses", &["alpha", "beta"], "");
    two_up(&lab, "on_lost = \"stop\"\n");
    lab.start_vm("alpha", "far", 1).expect(0);
    let refused = lab
        .on("beta", &["cluster", "down", "--leave"])
        .run()
        .expect(1)
        .errors();
    assert!(refused.contains("no VM runs on without its cell"), "{refused}");

    let cut = Instant::now();
    lab.shell("beta", "ip link set eth1 down");
    lab.wait_for_lives("alpha", &[true, false]);
    let taken = lab.start_vm("alpha", "far", 0).expect(1).errors();
    assert!(taken.contains("is running already, in cell 1"), "{taken}");
    let runs = || {
        !lab.shell("beta", "ls /run/mirrorball/vms 2>/dev/null || true")
            .is_empty()
    };
    assert!(runs(), "it runs on at first");
    wait::until("the VM has ended on its host", LEASE + MARGIN, || {
        (!runs()).then_some(())
    });
    let ended = cut.elapsed();
    assert!(ended >= LEASE - SILENCE, "too early: after {ended:?}");
    wait::until("the name is free", LEASE + MARGIN, || {
        let started = lab.start_vm("alpha", "far", 0);
        (started.status == 0).then_some(())
    });
    eprintln!(
        "the VM ended after {ended:?}, and its name was free after {:?}",
        cut.elapsed()
    );
    lab.shell(
        "beta",
        "ip link set eth1 up && ip addr add 10.77.0.2/24 dev eth1 2>/dev/null; true",
    );
    for host in ["alpha", "beta"] {
        lab.wait_for_lives(host, &[true, true]);
    }
    assert_eq!(lab.names("beta"), [("far".to_owned(), Value::from(0))]);
    lab.on("beta", &["kill", "far"]).ok();
    for host in ["alpha", "beta"] {
        lab.on(host, &["cluster", "down"]).ok();
    }
}
