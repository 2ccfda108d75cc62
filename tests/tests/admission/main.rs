//! Risk: of several users on one host with a cluster, one reaches another's VM, takes another's resources, or
//! keeps others out.
//!
//! The users are numbers without accounts. Their guests halt at once, so most of a test is commands.

mod host;
mod limits;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::time::{Duration, Instant};

use guest_tests::command::Output;
use guest_tests::host::{is_running, kill9, parent};
use guest_tests::wait;
use serde_json::Value;

use self::host::{ALICE, BOB, Host, MALLORY, SOON, cpus, duplicate, text_of};

/// The status, the output and the errors of a command, without the VM's name.
fn answer(output: &Output, name: &str) -> (i32, String, String) {
    let without = |text: String| text.replace(name, "VM");
    (output.status, without(output.text()), without(output.errors()))
}

/// Each command that names a VM.
fn commands(name: &str) -> Vec<Vec<String>> {
    let lines = [
        "stop VM --limit 1",
        "kill VM",
        "exec VM -- true",
        "inspect VM",
        "pause VM",
        "resume VM",
        "reset VM",
        "nmi VM",
        "wait VM --limit 1",
        "wait VM --for running --limit 1",
        "logs VM",
        "logs --follow VM",
        "console VM",
        "cp VM:/etc/passwd ./copy",
        "cp /etc/passwd VM:/copy",
        "balloon VM 16M",
        "update VM --cpu-weight 200",
        "update VM --pin 0=0",
        "move VM --vcpu 0 --cell 1",
        "snapshot VM ./snapshot",
        "clone VM",
        "heat VM",
        "cluster adopt VM",
    ];
    let words = |line: &str| line.split(' ').map(|word| word.replace("VM", name)).collect();
    // `cp` takes the words before the first colon for the name.
    let fits = |line: &&str| !(name.contains(':') && line.starts_with("cp "));
    lines.into_iter().filter(fits).map(words).collect()
}

/// Promise SHARD-31.
#[test]
fn every_command_against_another_users_vm_answers_as_for_one_that_does_not_exist() {
    let host = Host::new("strangers");
    host.up();
    host.run(ALICE, "cherry", &[]).ok();
    host.run(0, "walnut", &[]).ok();
    let (hers, roots) = (host.listed(ALICE, "cherry"), host.listed(0, "walnut"));
    let pids = |vm: &Option<Value>| {
        let vm = vm.as_ref().expect("it runs");
        (
            vm["shard_pid"].clone(),
            vm["keeper_pid"].clone(),
            vm["paused"].clone(),
        )
    };
    // All commands by one stranger, and a few in other ways.
    let answers = |uid: u32, vm: &str, count: usize| -> Vec<_> {
        let commands = commands(vm).into_iter().take(count);
        let run = commands.map(|words| host.user(uid, words.iter().map(String::as_str)).run());
        run.map(|output| (answer(&output, vm), output)).collect()
    };
    for (uid, none, others, count) in [
        (BOB, "nothing", &["cherry", "walnut"][..], usize::MAX),
        (BOB, "61001:nothing", &["61001:cherry"], 4),
        (MALLORY, "nothing", &["cherry"], 4),
    ] {
        let none = answers(uid, none, count);
        for other in others {
            for ((there, output), (none, _)) in answers(uid, other, count).iter().zip(&none) {
                assert_eq!(there, none, "{output}");
                assert_ne!(output.status, 0, "{output}");
            }
        }
    }
    for uid in [BOB, MALLORY] {
        let seen = [
            host.user(uid, ["ps"]).run(),
            host.user(uid, ["mem"]).run(),
            host.user(uid, ["cluster", "status"]).run(),
            host.user(uid, ["cluster", "status", "--json"]).run(),
            host.user(uid, ["cluster", "vcpus"]).run(),
            host.user(uid, ["top", "--json", "--count", "1", "--interval", "0.1"])
                .ok(),
        ];
        for output in seen {
            let all = format!("{}{}", output.text(), output.errors());
            assert!(!all.contains("cherry") && !all.contains("walnut"), "{output}");
        }
        // Commands that are root's alone.
        for command in [
            "lend 64M --from 0 --to 1",
            "reclaim 64M --from 1 --to 0",
            "fail 0",
            "down",
            "down --leave",
        ] {
            let output = host
                .user(uid, ["cluster"].into_iter().chain(command.split(' ')))
                .run();
            assert_ne!(output.status, 0, "{output}");
        }
    }
    assert_eq!(pids(&host.listed(ALICE, "cherry")), pids(&hers));
    assert_eq!(pids(&host.listed(0, "walnut")), pids(&roots));
    assert_eq!(host.placed(), ["61001:cherry", "walnut"]);
    // The owner's commands find it.
    host.user(ALICE, ["inspect", "cherry"]).ok();
    host.user(ALICE, ["kill", "cherry"]).ok();
    host.wait_placed(&["walnut"]);
}

/// Promise SHARD-32.
#[test]
fn users_vms_keep_their_places_while_servers_and_cells_are_killed() {
    let host = Host::new("killed");
    host.up();
    for (uid, name) in [(ALICE, "a"), (BOB, "b")] {
        host.run(uid, name, &[]).ok();
    }
    let all = ["61001:a", "61002:b"];
    let shards = || {
        [(ALICE, "a"), (BOB, "b")].map(|(uid, vm)| host.listed(uid, vm).expect("runs")["shard_pid"].clone())
    };
    let before = shards();
    let pid = |cell: &Value| cell["pid"].as_u64().expect("a process") as u32;

    let server = host.server();
    kill9(server);
    assert_eq!(host.placed(), all, "places outlive the server");
    wait::until("the next server", SOON, || {
        (host.server() != server).then_some(())
    });
    // Longer than the cells wait for the user's monitor.
    std::thread::sleep(Duration::from_secs(7));
    assert_eq!(host.placed(), all);
    let output = host.run(ALICE, "a", &[]).run().expect(1);
    assert!(output.errors().contains("has a place"), "{output}");

    host.cells().iter().map(pid).for_each(kill9);
    host.wait_placed(&all);
    let monitor = host.listed(ALICE, "a").expect("runs")["monitor_pid"]
        .as_u64()
        .expect("a process") as u32;
    kill9(monitor);
    wait::until("the next monitor", SOON, || {
        let vm = host.listed(ALICE, "a").expect("runs");
        (vm["monitor_pid"].as_u64() != Some(monitor.into())).then_some(())
    });
    assert_eq!(host.placed(), all);
    assert_eq!(shards(), before, "the VMs are the same");
    // The end is reported by the process that serves the VM now.
    host.user(ALICE, ["kill", "a"]).ok();
    host.wait_placed(&["61002:b"]);
}

/// Promise SHARD-32.
#[test]
fn failure_of_a_cell_and_eviction_end_the_users_vms_that_are_meant_and_no_others() {
    let host = Host::new("failed");
    host.up();
    host.run(ALICE, "here", &["--cell", "0"]).ok();
    host.run(ALICE, "there", &["--cell", "1"]).ok();
    host.run(BOB, "there", &["--cell", "1"]).ok();
    host.run(0, "mine", &["--cell", "1"]).ok();
    let monitors = [ALICE, BOB].map(|uid| {
        let vm = host.listed(uid, "there").expect("runs");
        vm["shard_pid"].as_u64().expect("a process") as u32
    });
    let output = host.root(["cluster", "fail", "1"]).ok();
    for name in ["mine", "61001:there", "61002:there"] {
        assert!(output.text().contains(name), "{output}");
    }
    for shard in monitors {
        wait::until("the end of a shard", SOON, || (!is_running(shard)).then_some(()));
    }
    assert_eq!(host.placed(), ["61001:here"]);
    assert!(host.listed(ALICE, "there").is_none() && host.listed(BOB, "there").is_none());
    assert!(host.listed(ALICE, "here").is_some());
    // One by one, by root alone.
    for uid in [BOB, ALICE] {
        let output = host.user(uid, ["cluster", "evict", "61001:here"]).run();
        assert_ne!(output.status, 0, "{output}");
    }
    // Their names are free, in the cell that is left; the server runs on, though its guard's cell may be the
    // failed one.
    host.run(ALICE, "there", &[]).ok();
    assert_eq!(host.placed(), ["61001:here", "61001:there"]);
    host.root(["cluster", "evict", "61001:here"]).ok();
    host.wait_placed(&["61001:there"]);
    assert!(host.listed(ALICE, "here").is_none());
    host.root(["cluster", "evict", "61001:here"]).run().expect(1);
}

/// Promise SHARD-32.
#[test]
fn cluster_goes_down_under_users_vms_only_when_it_leaves_them() {
    let host = Host::new("down");
    host.up();
    host.run(ALICE, "web", &[]).ok();
    let output = host.root(["cluster", "down"]).run().expect(1);
    assert!(
        output.errors().contains("61001:web") && output.errors().contains("--leave"),
        "{output}"
    );
    host.root(["cluster", "down", "--leave"]).ok();
    assert!(!host.users().join("admission.sock").exists());
    let shard = host.listed(ALICE, "web").expect("runs")["shard_pid"].clone();
    // Without a cluster a run is alone.
    host.run(BOB, "alone", &[]).ok();
    assert_eq!(
        host.listed(BOB, "alone").expect("runs")["host_place"],
        Value::Null
    );
    host.up();
    host.wait_placed(&["61001:web"]);
    assert_eq!(host.listed(ALICE, "web").expect("runs")["shard_pid"], shard);
    host.user(ALICE, ["kill", "web"]).ok();
    host.wait_placed(&[]);
    host.root(["cluster", "down"]).ok();
}

/// Promise SHARD-32.
#[test]
fn user_who_floods_the_server_keeps_neither_root_nor_other_users_out() {
    let host = Host::new("flood");
    host.up();
    let mut held = Vec::new();
    for uid in [BOB, MALLORY] {
        for number in 0..200 {
            let Ok(mut stream) = host.connect_as(uid) else {
                continue;
            };
            stream
                .set_write_timeout(Some(Duration::from_secs(1)))
                .expect("a limit");
            let bytes: &[u8] = match number % 4 {
                0 => b"",
                1 => b"{\"request\":",
                2 => &[b'x'; 8192],
                _ => b"\xff\xfe{}\n{}\n",
            };
            // It may have been closed.
            let _ = stream.write_all(bytes);
            held.push(stream);
        }
    }
    let begun = Instant::now();
    host.run(ALICE, "web", &[]).ok();
    host.run(0, "web", &[]).ok();
    assert_eq!(host.placed(), ["61001:web", "web"]);
    println!("beside {} connections after {:?}", held.len(), begun.elapsed());
    // All silent connections are closed in time, though they were never given up here.
    wait::until("the end of idle connections", SOON, || {
        let open = held.iter().filter(|stream| {
            stream.set_nonblocking(true).expect("a socket");
            let mut bytes = [0; 512];
            loop {
                match std::io::Read::read(&mut &**stream, &mut bytes) {
                    Ok(0) => return false,
                    Ok(_) => {}
                    Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
                }
            }
        });
        (open.count() == 0).then_some(())
    });
    assert_eq!(
        parent(host.server()),
        parent(host.cells()[0]["pid"].as_u64().expect("a process") as u32)
    );
    host.run(BOB, "web", &[]).ok();
}

/// Promise SHARD-32.
#[test]
fn users_request_ends_no_other_users_place_and_names_no_other_user() {
    let host = Host::new("word");
    host.up();
    host.run(ALICE, "web", &[]).ok();
    let ask = |uid: u32, request: &str| {
        let mut stream = host.connect_as(uid).expect("a server");
        stream.set_read_timeout(Some(SOON)).expect("a limit");
        writeln!(stream, "{request}").expect("a server");
        let mut line = String::new();
        // An invalid request has no reply.
        let _ = BufReader::new(std::os::unix::net::UnixStream::from(duplicate(&stream))).read_line(&mut line);
        line
    };
    let leave = r#"{"request":"leave","name":"web"}"#;
    let reply = ask(BOB, leave);
    assert!(
        reply.contains(r#""reply":"done""#),
        "as for a VM that does not exist: {reply}"
    );
    let reply = ask(MALLORY, leave);
    assert!(reply.contains(r#""reply":"not-admitted""#), "{reply}");
    for forged in [
        r#"{"request":"leave","name":"web","uid":61001}"#,
        r#"{"request":"leave","name":"61001:web"}"#,
        r#"{"request":"leave","name":"../61001:web"}"#,
        r#"{"ask":"leave","name":"61001:web"}"#,
        r#"{"ask":"end"}"#,
        r#"{"ask":"host","name":"61001:web","share":{"vcpus":1,"memory_bytes":1},"sent":false,"runs":true}"#,
        r#"{"request":"place","name":"61001:x","share":{"vcpus":1,"memory_bytes":67108864},"cell":null}"#,
        concat!(
            r#"{"request":"place","name":"x","#,
            r#""share":{"vcpus":4294967295,"memory_bytes":18446744073709551615},"cell":null}"#
        ),
        r#"{"request":"place","name":"x/1","share":{"vcpus":1,"memory_bytes":67108864},"cell":null}"#,
    ] {
        let reply = ask(BOB, forged);
        assert!(!reply.contains("placed"), "{forged}: {reply}");
    }
    assert_eq!(host.placed(), ["61001:web"]);
    let status = ask(BOB, r#"{"request":"status"}"#);
    assert!(status.contains("\"vms\":[]"), "{status}");
}

#[test]
fn only_root_admits_users_and_only_in_a_directory_that_is_roots() {
    let host = Host::new("squat");
    let cpus = cpus();
    let cell = |cpu: usize, memory: &str| format!("[[cells]]\ncpus = \"{cpu}\"\nmemory = \"{memory}\"\n");
    let users = format!("[[users]]\nuid = {ALICE}\ncpus = 1\nmemory = \"64M\"\n");
    let file = host.write("cluster.toml", &format!("{}{users}", cell(cpus[0], "128M")));
    let up = ["cluster", "up", "--lab", "never", text_of(&file)];
    let refused = |output: Output, why: &str| {
        let output = output.expect(1);
        let words = output.errors().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(why), "{output}");
    };
    refused(
        host.user(ALICE, up).run(),
        "only root's cluster can admit other users",
    );

    // The name is taken: by a directory, by a link, and by a directory that is open to others.
    fs::create_dir(host.users()).expect("our own directory");
    chown(host.users(), Some(MALLORY), None).expect("root gives files away");
    refused(host.root(up).run(), "belongs to another user");
    // A user's run believes no server there.
    let socket =
        std::os::unix::net::UnixListener::bind(host.users().join("admission.sock")).expect("a socket");
    host.run(ALICE, "alone", &[]).ok();
    refused(
        host.run(ALICE, "in", &["--cell", "0"]).run(),
        "belongs to another user",
    );
    drop(socket);
    fs::remove_dir_all(host.users()).expect("our own directory");
    std::os::unix::fs::symlink(host.path("home-61003"), host.users()).expect("our own directory");
    refused(host.root(up).run(), "symbolic link");
    assert!(!host.path("home-61003/admission.sock").exists());
    fs::remove_file(host.users()).expect("our own link");
    fs::create_dir(host.users()).expect("our own directory");
    fs::set_permissions(host.users(), fs::Permissions::from_mode(0o777)).expect("our own directory");
    refused(host.root(up).run(), "written by other users");
    fs::remove_dir(host.users()).expect("our own directory");

    host.root(up).ok();
    let mode = |name: &str| fs::metadata(host.users().join(name)).expect("it is there").mode() & 0o777;
    assert_eq!(
        [mode(""), mode("admission.sock"), mode("lock")],
        [0o755, 0o666, 0o600]
    );
    // A second cluster of root's does not take over the users of the first.
    refused(
        host.root(up).env("MIRRORBALL_RUNTIME", host.path("second")).run(),
        "admits users already",
    );

    // A user's own cluster has CPUs and memory of its own.
    let own = host.write("own.toml", &cell(cpus[0], "64M"));
    refused(
        host.user(BOB, ["cluster", "up", "--lab", "never", text_of(&own)])
            .run(),
        "the same resources: CPU",
    );
    refused(
        host.user(BOB, ["cluster", "up", "--lab", "never"]).run(),
        "the same resources: CPU",
    );
    let own = host.write("own.toml", &cell(cpus[1], "128M"));
    host.user(BOB, ["cluster", "up", "--lab", "never", text_of(&own)])
        .ok();
    host.run(BOB, "own", &["--cell", "0"]).ok();
    let vm = host.listed(BOB, "own").expect("runs");
    assert_eq!((&vm["cell"], &vm["host_place"]), (&0.into(), &Value::Null));
    assert!(host.placed().is_empty());
}
