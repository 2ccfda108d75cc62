//! Risk: cells disagree on the VMs that run and their cells; a cell that dies takes VMs along, or leaves its
//! resources taken.

mod observed;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_tests::command::BOOT_LIMIT;
use guest_tests::host::{self, Traces};
use guest_tests::{Cluster, Scratch, Vm, VmFile, mirrorball, wait};
use serde_json::Value;

use self::observed::{allowed, cpu_seconds, expect_service, lent_mib, record, wait_until_served};

/// Time limit until a cell's next process and the monitors of its VMs find each other.
const BACK_LIMIT: Duration = Duration::from_secs(20);

/// Time limit until a cell's hanging process is killed.
const HANG_LIMIT: Duration = Duration::from_secs(40);
/// Script that keeps a CPU busy.
const SPIN: &str = "while :; do :; done";

#[test]
fn vms_are_spread_over_cells_under_one_name_space() {
    let scratch = Scratch::new("spread");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let file = VmFile::new("spread-a");
    let vms: Vec<Vm> = vec![file.start(&scratch), VmFile::new("spread-b").start(&scratch)];
    for (number, vm) in vms.iter().enumerate() {
        let cell = cluster.cell(number);
        assert_eq!(cluster.vms(number), [vm.name()]);
        assert_eq!(cell["given_bytes"], 128 << 20);
        assert_eq!(vm.listed().expect("listed")["cell"], number);
        let cpus: Vec<String> = cell["cpus"]
            .as_array()
            .expect("an array")
            .iter()
            .map(Value::to_string)
            .collect();
        for allowed in allowed(vm.shard()) {
            assert_eq!(allowed, cpus.join(","), "cell {number}");
        }
        let node = cell["nodes"][0].as_u64().expect("a node");
        vm.expect_memory_on(node);
    }
    // The other cell has a record of the name.
    let again = file.key("cell", "1").write(&scratch);
    let again = mirrorball(["run", "-d"]).args([&again]).run().expect(1);
    assert!(
        again.errors().contains("is running already, in cell 0"),
        "{again}"
    );
    let large = VmFile::new("spread-c").memory("1000G");
    let too_large = mirrorball(["check"])
        .args([large.write(&scratch)])
        .run()
        .expect(1);
    assert!(
        too_large.errors().contains("more than the host has"),
        "{too_large}"
    );
    let nowhere = VmFile::new("spread-d").key("cell", "7").write(&scratch);
    let nowhere = mirrorball(["run", "-d"]).args([&nowhere]).run().expect(1);
    assert!(
        nowhere
            .errors()
            .contains("there is no cell 7 that runs; there is 0, 1"),
        "{nowhere}"
    );
    let down = mirrorball(["cluster", "down"]).run().expect(1);
    assert!(down.errors().contains("VMs run in the cluster"), "{down}");
    vms[0].sh("echo still here");
    vms[0].kill();
    // Its name and its memory are free as soon as its end is reported.
    assert_eq!(cluster.cell(0)["given_bytes"], 0);
    host::kill9(vms[1].shard());
    vms[1].wait_ended(Duration::from_secs(10));
    wait::until("its cell has it back", BACK_LIMIT, || {
        cluster.vms(1).is_empty().then_some(())
    });
    mirrorball(["cluster", "down"]).ok();
    let gone = mirrorball(["cluster", "status"]).run().expect(1);
    assert!(gone.errors().contains("no cluster is up here"), "{gone}");
    drop(vms);
    before.expect_unchanged("a cluster");
}

/// A VM gets at most its limit of CPUs together with its card's processes. More memory than its limit ends
/// these processes and no others.
fn expect_limits_of_a_vm_with_a_card(scratch: &Scratch) {
    let limited = VmFile::new("limited");
    let name = limited.name().to_owned();
    let file = limited
        .key("cpu_limit", "0.3")
        .key("memory_limit", "\"640M\"")
        .net("kind = \"user\"")
        .write(scratch);
    // Not detached: its command reports its end.
    let run = mirrorball(["run"]).args([file]).limit(BOOT_LIMIT * 2).spawn();
    let limited = Vm::named(&name);
    limited.wait_up();
    // Its card's passt and frame filter are limited together with its shard.
    let group = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a process");
    let of_card = limited.card_processes();
    assert_eq!(of_card.len(), 2, "a passt and a frame filter: {of_card:?}");
    for pid in &of_card {
        assert_eq!(group(*pid), group(limited.shard()));
        assert_ne!(group(*pid), group(limited.monitor()));
    }
    let own_group = group(of_card[0]);
    let of_group = |file: &str| {
        let path = own_group.trim().replacen("0::", "/sys/fs/cgroup", 1);
        PathBuf::from(path).join(file)
    };
    let limit = std::fs::read_to_string(of_group("memory.max")).expect("a limit of memory");
    assert_eq!(limit.trim(), (640_u64 << 20).to_string());
    let tasks = std::fs::read_to_string(of_group("pids.max")).expect("a limit of tasks");
    assert_ne!(tasks.trim(), "max");
    limited.background(SPIN);
    let (start, since) = (cpu_seconds(&limited), Instant::now());
    std::thread::sleep(Duration::from_secs(8));
    let part = (cpu_seconds(&limited) - start) / since.elapsed().as_secs_f64();
    assert!((0.15..0.4).contains(&part), "{part} of a CPU");
    let shard = limited.shard();
    // With a limit below its use, the kernel ends all of its processes, and no others.
    std::fs::write(of_group("memory.max"), "8M").expect("root may");
    host::wait_gone(&[&[shard], &of_card[..]].concat(), BACK_LIMIT);
    let ended = run.wait().expect(73);
    let errors = ended.errors();
    let reason = "the VM used more of the host's memory than its memory_limit";
    assert!(errors.contains(reason), "{ended}");
}

/// VMs that share one CPU get it by their weights, however many vCPUs they have, and a limited one gets at
/// most its limit.
#[test]
fn weights_and_limits_divide_a_cells_cpus() {
    let scratch = Scratch::new("weights");
    let before = Traces::now();
    // They share one of its CPUs, on a host with many, too.
    let cpus = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).expect("of this process");
    let cpu = (0..nix::sched::CpuSet::count()).find(|cpu| cpus.is_set(*cpu).unwrap_or(false));
    let cell = format!("[[cells]]\ncpus = \"{}\"\n", cpu.expect("one at least"));
    let file = scratch.write("one.toml", cell);
    let cluster = Cluster::of(&file);
    let heavy = VmFile::new("heavy").key("cpu_weight", "300").start(&scratch);
    let light = VmFile::new("light")
        .cpus(2)
        .key("cpu_weight", "100")
        .start(&scratch);
    heavy.background(SPIN);
    light.background(SPIN);
    light.background(SPIN);
    // Both have begun.
    std::thread::sleep(Duration::from_secs(3));
    let used = |time: u64| {
        let start = [cpu_seconds(&heavy), cpu_seconds(&light)];
        std::thread::sleep(Duration::from_secs(time));
        [cpu_seconds(&heavy) - start[0], cpu_seconds(&light) - start[1]]
    };
    let [heavily, lightly] = used(12);
    let ratio = heavily / lightly;
    assert!((2.0..4.5).contains(&ratio), "{heavily} s to {lightly} s");
    // Their weights change while they run, and a group is made for one that had none.
    let plain = VmFile::new("plain").start(&scratch);
    let weight = |vm: &Vm| {
        let group = std::fs::read_to_string(format!("/proc/{}/cgroup", vm.shard())).expect("a process");
        let path = group.trim().replacen("0::", "/sys/fs/cgroup", 1);
        let file = |name: &str| {
            std::fs::read_to_string(Path::new(&path).join(name))
                .expect("a limit")
                .trim()
                .to_owned()
        };
        [file("cpu.weight"), file("cpu.max"), file("memory.max")]
    };
    let update = |vm: &Vm, words: &[&str]| mirrorball(["update", vm.name()]).args(words).ok();
    update(&heavy, &["--cpu-weight", "none", "--cpu-limit", "0.5"]);
    assert_eq!(weight(&heavy), ["100", "50000 100000", "max"]);
    update(&plain, &["--cpu-weight", "7", "--memory-limit", "1G"]);
    assert_eq!(weight(&plain), ["7", "max 100000", "1073741824"]);
    let spec = &plain.inspect()["spec"];
    assert_eq!(
        (&spec["cpu_weight"], &spec["memory_limit"]),
        (&7.into(), &"1G".into()),
        "{spec:#}"
    );
    let refused = mirrorball(["update", plain.name(), "--memory-limit", "64M"])
        .run()
        .expect(1);
    assert!(
        refused.errors().contains("would be ended when it uses it"),
        "{refused}"
    );
    plain.kill();
    heavy.kill();
    light.kill();
    expect_limits_of_a_vm_with_a_card(&scratch);
    drop(cluster);
    let left = std::fs::read_dir("/sys/fs/cgroup/mirrorball")
        .expect("it stays")
        .flatten();
    let left: Vec<_> = left.filter(|entry| entry.path().is_dir()).collect();
    assert!(left.is_empty(), "{left:?}");
    before.expect_unchanged("weights");
}

#[test]
fn cell_serves_its_vms_and_its_next_process_or_monitors_go_on() {
    let scratch = Scratch::new("served");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let idle = cluster.pid(1);
    let in_cell = |name: &str| VmFile::new(name).key("cell", "1");
    let first = in_cell("served-a").start(&scratch);
    let second = in_cell("served-b").start(&scratch);
    let both = [&first, &second];
    wait_until_served(&both, idle);
    let boots = both.map(Vm::boot_id);
    let cpus = cluster.cell(1)["cpus"].clone();
    for vm in both {
        let [vcpu] = &cluster.vcpus(vm)[..] else {
            panic!("{:?}", cluster.vcpus(vm));
        };
        assert_eq!((&vcpu["cell"], &vcpu["cpus"]), (&1.into(), &cpus), "{vcpu}");
        assert_eq!(vcpu["shard_pid"], vm.shard());
        assert!(vcpu["ran_ms"].as_u64() > Some(0), "{vcpu}");
        assert!(vcpu["waited_ms"].is_u64(), "{vcpu}");
        assert!(vcpu["kvm"]["halts"].as_u64() > Some(0), "{vcpu}");
    }
    let given = cluster.given_bytes(1);
    let prints = "i=0; while [ ! -e /tmp/stop ]; do i=$((i + 1)); echo $i; sleep 0.1; done";
    let session = first
        .exec(["sh", "-c", prints])
        .limit(Duration::from_secs(300))
        .spawn();

    // Its next process serves both. They never moved, so their cell's memory is theirs all the time.
    host::kill9(idle);
    let next = cluster.pid_after(1, idle);
    wait_until_served(&both, next);
    both.iter().for_each(|vm| expect_service(vm));
    wait::until("both VMs in their cell", BACK_LIMIT, || {
        (cluster.vms(1).len() == 2 && cluster.given_bytes(1) == given).then_some(())
    });
    assert!(cluster.vms(0).is_empty());

    // The guard kills a process that hangs.
    host::stop(next);
    host::wait_gone(&[next], HANG_LIMIT);
    // Its VMs may have monitors in between.
    let next = cluster.pid_after(1, next);
    wait_until_served(&both, next);
    both.iter().for_each(|vm| expect_service(vm));

    // Without a cell each VM has a monitor, which transfers it to the next cell.
    cluster.kill_for_good(1);
    let monitors = wait::until("a monitor for each", BACK_LIMIT, || {
        let pids = both.map(|vm| vm.listed().map(|record| record["monitor_pid"].clone()));
        let [Some(one), Some(other)] = pids else {
            return None;
        };
        (one != next && other != next && one != other).then_some([one, other])
    });
    println!("monitors {monitors:?}");
    both.iter().for_each(|vm| expect_service(vm));
    let status = mirrorball(["cluster", "status"]).ok().text();
    assert!(
        status.contains(&format!("{}: served by process", first.name())),
        "{status}"
    );
    mirrorball(["cluster", "down", "--leave"]).ok();
    let cluster = Cluster::up(&scratch);
    let last = cluster.pid(1);
    let new = (host::descriptors(last), host::threads(last));
    wait_until_served(&both, last);
    both.iter().for_each(|vm| expect_service(vm));
    first.sh("touch /tmp/stop");
    let printed = session.wait().expect(0).text();
    let numbers: Vec<usize> = printed.lines().filter_map(|line| line.parse().ok()).collect();
    assert!(
        numbers.len() > 10 && numbers.iter().copied().eq(1..=numbers.len()),
        "the session of exec: {numbers:?}"
    );
    assert_eq!(both.map(Vm::boot_id), boots);

    // A VM leaves nothing in the process that served it.
    first.reboot();
    assert_eq!(first.monitor(), last, "it rebooted in its cell");
    first.stop();
    second.kill();
    wait::until("the empty cell", BACK_LIMIT, || {
        cluster.vms(1).is_empty().then_some(())
    });
    let now = wait::within(BACK_LIMIT, || {
        let now = (host::descriptors(last), host::threads(last));
        (now.0 <= new.0 && now.1 <= new.1).then_some(())
    });
    assert!(
        now.is_some(),
        "{new:?} descriptors and threads with its VMs, {:?} without",
        (host::descriptors(last), host::threads(last))
    );
    drop((first, second, cluster));
    before.expect_unchanged("VMs that their cell served");
}

#[test]
fn cells_write_their_logs_as_the_environment_says() {
    let up = |level, format| {
        let up = mirrorball(["cluster", "up", "--cells", "2"]);
        up.env("MIRRORBALL_LOG", level)
            .env("MIRRORBALL_LOG_FORMAT", format)
            .run()
    };
    let refused = up("loud", "json").expect(1);
    assert!(
        refused.errors().contains("MIRRORBALL_LOG=loud: no level"),
        "{refused}"
    );
    up("debug", "json").expect(0);
    let log = Cluster::log(0);
    mirrorball(["cluster", "down"]).ok();
    let lines: Vec<Value> = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    for (level, message) in [("INFO", "cell 0.1 runs"), ("DEBUG", "a client asks")] {
        let is_it = |line: &&Value| line["level"] == level && line["message"] == message;
        let found = lines.iter().find(is_it);
        let found = found.unwrap_or_else(|| panic!("no {message} in {log}"));
        assert!(
            found["timestamp"].is_string() && found["target"].is_string(),
            "{found}"
        );
    }
}

#[test]
fn vm_whose_cell_is_killed_in_its_first_boot_is_booted_by_the_next_process() {
    let scratch = Scratch::new("begun");
    let before = Traces::now();
    let cluster = Cluster::up(&scratch);
    let mut starting = 0;
    for (name, delay_ms) in [("begun-0", 0), ("begun-1", 100), ("begun-2", 300)] {
        let cell = cluster.pid(1);
        let file = VmFile::new(name).key("cell", "1");
        let name = file.name();
        let vm = std::thread::scope(|scope| {
            let started = scope.spawn(|| file.start(&scratch));
            let deadline = Instant::now() + BOOT_LIMIT;
            while record(name).is_none_or(|record| record["monitor_pid"] != cell) {
                assert!(Instant::now() < deadline, "{name} is not adopted");
                std::thread::sleep(Duration::from_millis(2));
            }
            std::thread::sleep(Duration::from_millis(delay_ms));
            starting += u32::from(record(name).is_some_and(|record| record["state"] == "starting"));
            host::kill9(cell);
            started.join().expect("the VM starts")
        });
        let next = cluster.pid_after(1, cell);
        wait_until_served(&[&vm], next);
        expect_service(&vm);
        assert!(vm.listed().expect("listed")["boots"].as_u64() <= Some(1));
        vm.stop();
    }
    println!("killed before the VM ran: {starting} of 3");
    assert!(starting > 0, "no kill came in a first boot");
    drop(cluster);
    before.expect_unchanged("VMs whose first boot was cut off");
}

/// Both adoptions of a VM end the cell's process, as by a fault in it: the third is not tried.
#[test]
fn vm_whose_adoption_has_ended_two_processes_of_its_cell_is_set_aside() {
    let scratch = Scratch::new("aside");
    let cluster = Cluster::up(&scratch);
    let vm = VmFile::new("aside").key("cell", "0").start(&scratch);
    wait_until_served(&[&vm], cluster.pid(0));
    // As two processes that died during the adoption leave it.
    std::fs::write(vm.folder().join("adoptions"), "2").expect("root may");
    let first = cluster.pid(0);
    host::kill9(first);
    let monitor = wait::until("a monitor", BACK_LIMIT, || {
        let pid = vm.listed()?["monitor_pid"].as_u64()?;
        (pid != u64::from(first)).then_some(pid)
    });
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(vm.listed().expect("listed")["monitor_pid"], monitor);
    assert_ne!(u64::from(cluster.pid(0)), monitor);
    expect_service(&vm);
    let elsewhere = mirrorball(["cluster", "adopt", "nobody"]).run().expect(1);
    assert!(elsewhere.errors().contains("no VM named nobody"), "{elsewhere}");
    mirrorball(["cluster", "adopt", vm.name()]).ok();
    wait_until_served(&[&vm], cluster.pid(0));
    expect_service(&vm);
    vm.stop();
}

#[test]
fn a_cell_that_dies_costs_no_vm() {
    let scratch = Scratch::new("dies");
    let cluster = Cluster::up(&scratch);
    let vm = VmFile::new("dies").key("cell", "1").start(&scratch);
    let boot = vm.boot_id();
    let first = cluster.pid(1);

    // Killed: it starts anew, and serves its VM again.
    host::kill9(first);
    wait::until("the cell starts anew and has its VM", BACK_LIMIT, || {
        let cell = cluster.cell(1);
        (Cluster::is_new(&cell) && cell["pid"] != first && cell["vms"][0] == vm.name()).then_some(())
    });
    // Longer than VMs whose monitors don't come are waited for.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(cluster.vms(1), [vm.name()]);
    assert_eq!(vm.boot_id(), boot);

    // Killed with its guard: the other cells notice, and go on.
    let second = cluster.pid(1);
    host::kill9(host::parent(second));
    let killed = Instant::now();
    host::kill9(second);
    let noticed = wait::within(Duration::from_secs(5), || {
        cluster.cell(1)["life"].is_null().then(|| killed.elapsed())
    });
    let noticed = noticed.expect("a dead cell is shown as dead");
    println!("a dead cell was noticed within {noticed:?}");
    let into_dead = VmFile::new("dies-b").key("cell", "1").write(&scratch);
    let into_dead = mirrorball(["run", "-d"]).args([&into_dead]).run().expect(1);
    assert!(into_dead.errors().contains("no cell 1 that runs"), "{into_dead}");
    let same_name = VmFile::new("dies").write(&scratch);
    let same_name = mirrorball(["run", "-d"]).args([&same_name]).run().expect(1);
    assert!(
        same_name.errors().contains("running already, in cell 1"),
        "{same_name}"
    );
    let other = VmFile::new("dies-c").start(&scratch);
    assert_eq!(other.listed().expect("listed")["cell"], 0);
    assert_eq!(vm.boot_id(), boot);

    // Ended and begun again under running VMs: they join.
    mirrorball(["cluster", "down", "--leave"]).ok();
    assert_eq!(vm.boot_id(), boot);
    let cluster = Cluster::up(&scratch);
    wait::until("the VMs join", BACK_LIMIT, || {
        (cluster.vms(0) == [other.name()] && cluster.vms(1) == [vm.name()]).then_some(())
    });
    assert_eq!(vm.boot_id(), boot);
    vm.stop();
    other.kill();
    wait::until("the cells are empty", BACK_LIMIT, || {
        (cluster.vms(0).is_empty() && cluster.vms(1).is_empty()).then_some(())
    });

    // With all of them dead, VMs run as without a cluster.
    let cells = [cluster.pid(0), cluster.pid(1)];
    for cell in cells {
        host::kill9(host::parent(cell));
        host::kill9(cell);
    }
    let dead = VmFile::new("dies-d").write(&scratch);
    let dead = mirrorball(["run", "-d"]).args([&dead]).run().expect(1);
    assert!(
        dead.errors().contains("none of the cluster's cells runs"),
        "{dead}"
    );
}

#[test]
fn memory_that_is_lent_is_used_and_given_back_when_it_is_not() {
    let scratch = Scratch::new("loans");
    // Two cells as ever, that give out 200 MiB each.
    let file = Cluster::file(&scratch).map_or_else(
        || "[[cells]]\nnodes = [0]\n[[cells]]\nnodes = [1]\n".to_owned(),
        |file| std::fs::read_to_string(file).expect("just written"),
    );
    let file = file.replace("[[cells]]\n", "[[cells]]\nmemory = \"200M\"\n");
    let file = format!("{file}[borrowing]\nautomatic = false\n");
    let cluster = Cluster::of(&scratch.write("loans.toml", file));
    let large = VmFile::new("loans").memory("256M").key("cell", "1");
    let refused = mirrorball(["run", "-d"])
        .args([large.write(&scratch)])
        .run()
        .expect(1);
    assert!(refused.errors().contains("cell 1 has 200 MiB"), "{refused}");

    let lend = |size, to| mirrorball(["cluster", "lend", size, "--from", "0", "--to", to]);
    let too_much = lend("300M", "1").run().expect(1);
    assert!(
        too_much.errors().contains("cell 0 has only 200 MiB"),
        "{too_much}"
    );
    let nobody = lend("100M", "7").run().expect(1);
    assert!(nobody.errors().contains("there is no cell 7"), "{nobody}");
    let itself = lend("100M", "0").run().expect(1);
    assert!(itself.errors().contains("its own memory"), "{itself}");
    lend("120M", "1").ok();
    assert_eq!(lent_mib(&cluster), 120);

    let vm = large.start(&scratch);
    let record = vm.inspect();
    assert_eq!(record["borrowed"][0]["cell"], 0, "{record}");
    assert_eq!(record["borrowed"][0]["bytes"], 56 << 20, "{record}");
    let reclaim = |size| mirrorball(["cluster", "reclaim", size, "--from", "1", "--to", "0"]);
    let in_use = reclaim("120M").run().expect(1);
    let expected = format!("of which {} uses 56 MiB", vm.name());
    assert!(in_use.errors().contains(&expected), "{in_use}");
    reclaim("64M").ok();
    assert_eq!(lent_mib(&cluster), 56);
    let into_lent = VmFile::new("loans-b").memory("160M").key("cell", "0");
    let into_lent = mirrorball(["run", "-d"])
        .args([into_lent.write(&scratch)])
        .run()
        .expect(1);
    assert!(into_lent.errors().contains("cell 0 has 144 MiB"), "{into_lent}");

    // Both die, and no record is lost.
    let boot = vm.boot_id();
    let pids = [cluster.pid(0), cluster.pid(1)];
    pids.into_iter().for_each(host::kill9);
    wait::until("both start anew and have the VM", BACK_LIMIT, || {
        let cells = mirrorball(["cluster", "status", "--json"]).run();
        if cells.status != 0 {
            return None;
        }
        let cells = cells.json();
        (Cluster::is_new(&cells[0]) && Cluster::is_new(&cells[1]) && cells[1]["vms"][0] == vm.name())
            .then_some(())
    });
    assert_eq!(lent_mib(&cluster), 56);
    assert_eq!(vm.boot_id(), boot);
    let in_use = reclaim("56M").run().expect(1);
    assert!(in_use.errors().contains(&expected), "{in_use}");
    vm.kill();
    wait::until("its cell has its memory back", BACK_LIMIT, || {
        cluster.vms(1).is_empty().then_some(())
    });
    reclaim("56M").ok();
    assert_eq!(lent_mib(&cluster), 0);
    VmFile::new("loans-c")
        .memory("200M")
        .key("cell", "0")
        .start(&scratch)
        .kill();
}

#[test]
fn a_cell_that_hangs_holds_up_no_other() {
    let scratch = Scratch::new("hangs");
    let cluster = Cluster::up(&scratch);
    let vm = VmFile::new("hangs").key("cell", "1").start(&scratch);
    let hung = nix::unistd::Pid::from_raw(cluster.pid(1) as i32);
    nix::sys::signal::kill(hung, nix::sys::signal::Signal::SIGSTOP).expect("ours");
    // Its vote is missing: it is dead to the other, and its VM's name is still taken.
    let other = VmFile::new("hangs-b").key("cell", "0").start_only(&scratch);
    assert_eq!(other.listed().expect("listed")["cell"], 0);
    assert!(cluster.cell(1)["life"].is_null());
    let taken = VmFile::new("hangs").key("cell", "0").write(&scratch);
    let taken = mirrorball(["run", "-d"]).args([&taken]).run().expect(1);
    assert!(taken.errors().contains("running already, in cell 1"), "{taken}");
    vm.sh("echo still here");
    // Awake again, it sees that it was given up, and starts anew. On a slow host its guard has replaced it by
    // now.
    let awake = nix::sys::signal::kill(hung, nix::sys::signal::Signal::SIGCONT);
    assert!(matches!(awake, Ok(()) | Err(nix::Error::ESRCH)), "{awake:?}");
    wait::until("the cell starts anew and has its VM", BACK_LIMIT, || {
        let cell = cluster.cell(1);
        (Cluster::is_new(&cell) && cell["vms"][0] == vm.name()).then_some(())
    });
    vm.sh("echo still here");
}

#[test]
fn cell_without_a_cluster_is_refused_and_wrong_cluster_files_are_reported() {
    let scratch = Scratch::new("none");
    let file = VmFile::new("none").key("cell", "0").write(&scratch);
    let refused = mirrorball(["run", "-d"]).args([&file]).run().expect(1);
    assert!(
        refused
            .errors()
            .contains("no cluster is up here; start one with `mirrorball cluster up`"),
        "{refused}"
    );
    let wrong = scratch.write("wrong.toml", "[[cells]]\ncpus = \"0-\"\n");
    let wrong = mirrorball(["cluster", "up", "--lab", "never"])
        .args([&wrong])
        .run()
        .expect(1);
    assert!(wrong.errors().contains("wrong.toml:2"), "{wrong}");
}
