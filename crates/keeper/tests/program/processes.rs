//! Tests of the processes that a keeper starts, and of their ends.

use super::*;

#[test]
fn exit_status_of_a_process_arrives_and_stays_until_it_is_reaped() {
    let keeper = keeper();
    let wait = |pid| wait_for(SOON, || keeper.exit_of(pid));
    let left = spawn(&keeper, "/bin/sh", &["sh", "-c", "exit 7"]).unwrap();
    assert_eq!(wait(left.pid), Exit::Status(7 << 8));
    assert_eq!(wait(left.pid), Exit::Status(7 << 8));
    assert!(
        Path::new(&format!("/proc/{}", left.pid)).exists(),
        "its number is not free"
    );
    let running = sleeper(&keeper);
    assert_eq!(keeper.exit_of(running.pid), None);
    keeper.reap(running.pid);
    assert!(is_running(running.pid), "only a process that has ended is reaped");
    kill(running.pid, libc::SIGKILL);
    assert_eq!(wait(running.pid), Exit::Status(libc::SIGKILL));
    for pid in [left.pid, running.pid] {
        keeper.reap(pid);
        assert_eq!(keeper.exit_of(pid), None);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
}

#[test]
fn process_has_its_words_its_limits_and_only_its_descriptors() {
    let keeper = keeper();
    let file = tempfile::NamedTempFile::new().unwrap();
    let log = File::options().append(true).open(file.path()).unwrap();
    let (control, theirs) = UnixStream::pair().unwrap();
    keeper.put(&[log.as_fd(), control.as_fd()]).unwrap();
    let script =
        "ulimit -f; ulimit -Hc; ls -x /proc/$$/fd; echo $0 $1; trap; echo >&3; read line; exec sleep 100";
    let spawned = keeper
        .spawn(&Spawn {
            program: File::open("/bin/sh").unwrap().as_fd(),
            control: theirs.as_fd(),
            log: log.as_fd(),
            words: &["sh", "-c", script, "zero", "one"],
            flags: 0,
            identity: None,
            file_bytes: 1 << 20,
        })
        .unwrap();
    drop(theirs);
    control.set_read_timeout(Some(SOON)).unwrap();
    (&control).read_exact(&mut [0]).unwrap();
    let text = fs::read_to_string(file.path()).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    // Blocks of 512 bytes.
    assert_eq!(words, ["2048", "0", "0", "1", "2", "3", "zero", "one"]);
    let status = fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
    assert!(status.contains("SigBlk:\t0000000000000000\n"), "{status}");
    assert!(status.contains(&format!("PPid:\t{}\n", keeper.pid())), "{status}");
}

#[test]
fn process_that_cannot_be_started_is_refused_or_exits_with_127() {
    let keeper = keeper();
    let unable = spawn(&keeper, "/dev/null", &["null"]).unwrap();
    assert_eq!(
        wait_for(SOON, || keeper.exit_of(unable.pid)),
        Exit::Status(127 << 8)
    );
    let refused = spawn(&keeper, "/bin/true", &[&"x".repeat(PACKET_BYTES_MAX)]).unwrap_err();
    assert_eq!(refused.to_string(), "keeper: the packet is too long");
    sleeper(&keeper);
}

#[test]
fn process_beyond_the_largest_number_is_refused_until_another_is_reaped() {
    let keeper = keeper();
    let start = || spawn(&keeper, "/bin/true", &["true"]);
    let first = start().unwrap();
    for _ in 1..CHILDREN_MAX {
        start().unwrap();
    }
    assert_eq!(start().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    wait_for(SOON, || keeper.exit_of(first.pid));
    keeper.reap(first.pid);
    start().unwrap();
}

#[test]
fn process_in_namespaces_ends_with_its_killed_keeper() {
    let namespaces = Namespaces::probe();
    if namespaces.flags() & libc::CLONE_NEWUSER == 0 {
        return eprintln!("left out: {}", namespaces.missing.join("; "));
    }
    let keeper = keeper();
    let null = File::options().write(true).open("/dev/null").unwrap();
    let spawned = keeper
        .spawn(&Spawn {
            program: File::open("/bin/sleep").unwrap().as_fd(),
            control: null.as_fd(),
            log: null.as_fd(),
            words: &["sleep", "100"],
            flags: namespaces.flags(),
            identity: None,
            file_bytes: FILE_BYTES,
        })
        .unwrap();
    assert!(!spawned.is_mapped);
    let own = fs::read_link("/proc/self/ns/user").unwrap();
    assert_ne!(
        fs::read_link(format!("/proc/{}/ns/user", spawned.pid)).unwrap(),
        own
    );
    kill(keeper.pid(), libc::SIGKILL);
    wait_for(Duration::from_secs(1), || gone(spawned.pid));
}

#[test]
fn killed_keeper_ends_its_process_within_a_second_and_makes_calls_fail() {
    let keeper = keeper();
    let (left, running) = (spawn(&keeper, "/bin/true", &["true"]).unwrap(), sleeper(&keeper));
    wait_for(SOON, || keeper.exit_of(left.pid));
    kill(keeper.pid(), libc::SIGKILL);
    wait_for(Duration::from_secs(1), || gone(running.pid));
    assert_eq!(wait_for(SOON, || keeper.exit_of(running.pid)), Exit::KeeperGone);
    assert_eq!(keeper.exit_of(left.pid), Some(Exit::Status(0)));
    let refused = spawn(&keeper, "/bin/true", &["true"]).unwrap_err().to_string();
    assert!(
        refused.contains(&format!("keeper (process {}) is gone", keeper.pid())),
        "{refused}"
    );
    assert!(keeper.clear().is_err());
    keeper.reap(left.pid);
}

#[test]
fn all_processes_have_ended_when_they_were_killed_together() {
    let keeper = keeper();
    let (first, second) = (sleeper(&keeper), sleeper(&keeper));
    keeper.kill_all().unwrap();
    assert!(!is_running(first.pid) && !is_running(second.pid));
    for pid in [first.pid, second.pid] {
        assert_eq!(
            wait_for(SOON, || keeper.exit_of(pid)),
            Exit::Status(libc::SIGKILL)
        );
    }
    keeper.kill_all().unwrap();
    keeper.reap_all();
    assert!(is_running(sleeper(&keeper).pid), "the next one is not killed");
}

#[test]
fn dropped_keeper_ends_its_process_and_itself_although_it_has_a_slot() {
    let keeper = keeper();
    keeper
        .succeed_by(File::open("/bin/true").unwrap().as_fd(), &["true"])
        .unwrap();
    keeper.put(&[File::open("/dev/null").unwrap().as_fd()]).unwrap();
    let (pid, running) = (keeper.pid(), sleeper(&keeper));
    drop(keeper);
    assert!(!is_running(pid) && !is_running(running.pid));
}

#[test]
fn vm_ends_within_a_second_of_its_lease_though_its_monitor_does_nothing() {
    const DETACH: &str = "\"detach\"\n";
    let (keeper, (client, lease)) = (keeper(), UnixStream::pair().unwrap());
    keeper.watch(lease.as_fd(), DETACH).unwrap();
    let process = sleeper(&keeper);
    std::thread::sleep(Duration::from_millis(700));
    assert!(is_running(process.pid), "the client is there");
    let begun = Instant::now();
    drop(client);
    wait_for(SOON, || gone(process.pid));
    let took = begun.elapsed();
    assert!(
        (keeper::state::NOTICE_TIMEOUT..Duration::from_secs(1)).contains(&took),
        "{took:?}"
    );
    // The monitor receives the report of the exit, and the keeper stays for it.
    let exit = wait_for(SOON, || keeper.exit_of(process.pid));
    assert_eq!(exit, Exit::Status(libc::SIGKILL));
    assert!(keeper.is_alive());
}

#[test]
fn keeper_leaves_a_detached_vm_alone_and_one_whose_monitor_ends_it() {
    const DETACH: &str = "\"detach\"\n";
    for is_detached in [true, false] {
        let (keeper, (mut client, lease)) = (keeper(), UnixStream::pair().unwrap());
        keeper.watch(lease.as_fd(), DETACH).unwrap();
        let process = sleeper(&keeper);
        if is_detached {
            client.write_all(DETACH.as_bytes()).unwrap();
        } else {
            keeper.note_ending();
        }
        drop(client);
        std::thread::sleep(keeper::state::NOTICE_TIMEOUT * 3);
        assert!(is_running(process.pid), "detached: {is_detached}");
    }
    // A keeper without a lease to watch receives no message, which one of the previous release would refuse.
    let keeper = keeper();
    keeper.note_ending();
    let process = sleeper(&keeper);
    assert!(is_running(process.pid));
}
