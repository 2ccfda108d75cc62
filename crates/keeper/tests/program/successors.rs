//! Tests of a monitor's end, its successors, and the VM between them.

use super::*;

/// Names the program at `path` as the successor of the keeper's monitor.
fn succeed_by(keeper: &Keeper, path: &str, words: &[&str]) {
    let program = File::open(path).unwrap();
    keeper.succeed_by(program.as_fd(), words).unwrap();
}

/// Names this test in the role of a successor.
fn succeed_by_this_test(keeper: &Keeper, test: &str, directory: &Path) {
    let words = again(test, "role=successor", directory);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    succeed_by(keeper, words[0], &words);
}

/// Names a command line of a shell as the successor.
fn succeed_by_script(keeper: &Keeper, script: &str) {
    succeed_by(keeper, "/bin/sh", &["sh", "-c", script]);
}

/// Reports process ids to the test as a monitor, and waits to be killed.
fn report_and_wait(directory: &Path, pids: &[i32]) -> ! {
    let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
    write(directory, "monitor", &pids.join(" "));
    wait_to_be_killed()
}

/// Kills a monitor, and waits until it has ended.
fn end(mut monitor: Child) {
    monitor.kill().unwrap();
    monitor.wait().unwrap();
}

/// Takes over the keeper that has started this process as a successor, with the files of its slot.
fn adopt() -> (Keeper, Vec<OwnedFd>) {
    // SAFETY: the keeper gave this process its socket as standard input; nothing else here reads it.
    Keeper::adopt(unsafe { OwnedFd::from_raw_fd(0) }).unwrap()
}

#[test]
fn monitor_killed_without_a_slot_ends_process_and_keeper() {
    let test = "successors::monitor_killed_without_a_slot_ends_process_and_keeper";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        succeed_by(&keeper, "/bin/true", &["true"]);
        let running = sleeper(&keeper);
        report_and_wait(&directory, &[keeper.pid(), running.pid]);
    }
    let directory = tempfile::tempdir().unwrap();
    let monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    assert!(is_running(keeper) && is_running(running));
    end(monitor);
    wait_for(SOON, || gone(running));
    wait_for(SOON, || gone(keeper));
}

#[test]
fn successor_receives_the_slot_and_the_exits_while_a_process_runs_on() {
    let test = "successors::successor_receives_the_slot_and_the_exits_while_a_process_runs_on";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let (left, running) = (
            spawn(&keeper, "/bin/false", &["false"]).unwrap(),
            sleeper(&keeper),
        );
        succeed_by_this_test(&keeper, test, &directory);
        // More than fits into a packet, so that the slot is sent in two parts.
        let file = File::create(directory.join("file")).unwrap();
        let mut files = vec![running.pidfd.as_fd(); 253];
        files.push(file.as_fd());
        keeper.put(&files).unwrap();
        wait_for(SOON, || keeper.exit_of(left.pid));
        report_and_wait(&directory, &[keeper.pid(), left.pid, running.pid]);
    }
    if let Some(directory) = directory_of("role=successor") {
        let (keeper, slot) = adopt();
        let [of_keeper, left, running] = read(&directory, "monitor");
        assert_eq!((keeper.pid(), slot.len()), (of_keeper, 254));
        assert_eq!(wait_for(SOON, || keeper.exit_of(left)), Exit::Status(1 << 8));
        keeper.reap(left);
        assert_eq!(keeper.exit_of(running), None);
        File::from(slot.into_iter().next_back().unwrap())
            .write_all(b"by the successor")
            .unwrap();
        let blocked = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert!(blocked.contains("SigBlk:\t0000000000000000\n"), "{blocked}");
        write(&directory, "successor", &std::process::id().to_string());
        wait_for(SOON, || directory.join("end").exists().then_some(()));
        // It ends the VM.
        return drop(keeper);
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let monitor = start_monitor(test, directory);
    let [keeper, left, running] = read(directory, "monitor");
    end(monitor);
    let [successor] = read(directory, "successor");
    assert!(is_running(running) && is_running(keeper));
    assert!(
        !Path::new(&format!("/proc/{left}")).exists(),
        "the successor acknowledged it"
    );
    assert_eq!(fs::read(directory.join("file")).unwrap(), b"by the successor");
    write(directory, "end", "");
    for pid in [running, keeper, successor] {
        wait_for(SOON, || gone(pid));
    }
}

/// Has a monitor name a shell's command line as its successor, kills it, and waits until the VM has ended.
/// Returns the text that the successors wrote.
fn end_by_successors(test: &str, script: &str) -> String {
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let running = sleeper(&keeper);
        let script = format!("starts={}; {script}", directory.join("starts").display());
        // The program that is named last takes the place of those before.
        succeed_by(&keeper, "/bin/false", &["false"]);
        succeed_by_script(&keeper, &script);
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        report_and_wait(&directory, &[keeper.pid(), running.pid]);
    }
    let directory = tempfile::tempdir().unwrap();
    let monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    end(monitor);
    wait_for(SOON, || gone(keeper));
    wait_for(SOON, || gone(running));
    fs::read_to_string(directory.path().join("starts")).unwrap()
}

#[test]
fn successor_that_ends_at_once_is_started_ten_times_before_the_vm_ends() {
    let test = "successors::successor_that_ends_at_once_is_started_ten_times_before_the_vm_ends";
    let start = Instant::now();
    assert_eq!(end_by_successors(test, "echo x >> $starts"), "x\n".repeat(10));
    // The last delays are 1 s.
    assert!(start.elapsed() >= Duration::from_millis(5550));
}

#[test]
fn exit_between_two_monitors_is_reported_to_the_second() {
    let test = "successors::exit_between_two_monitors_is_reported_to_the_second";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let running = sleeper(&keeper);
        succeed_by_this_test(&keeper, test, &directory);
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        report_and_wait(&directory, &[running.pid]);
    }
    if let Some(directory) = directory_of("role=successor") {
        let [running] = read(&directory, "monitor");
        if !directory.join("first").exists() {
            write(&directory, "first", "");
            // The next successor starts 50 ms after this one's end. The process ends meanwhile.
            kill(running, libc::SIGKILL);
            std::process::exit(0);
        }
        let (keeper, _) = adopt();
        assert_eq!(
            wait_for(SOON, || keeper.exit_of(running)),
            Exit::Status(libc::SIGKILL)
        );
        write(&directory, "reported", "1");
        return drop(keeper);
    }
    let directory = tempfile::tempdir().unwrap();
    let monitor = start_monitor(test, directory.path());
    let [_] = read(directory.path(), "monitor");
    end(monitor);
    assert_eq!(read(directory.path(), "reported"), [1]);
}

#[test]
fn cell_serves_the_vm_from_the_end_of_its_monitor_until_it_releases_it() {
    let test = "successors::cell_serves_the_vm_from_the_end_of_its_monitor_until_it_releases_it";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let running = sleeper(&keeper);
        let script = format!(
            "cd {} && echo $PPID > unfinished && mv unfinished successor; exec sleep 2",
            directory.display()
        );
        succeed_by_script(&keeper, &script);
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        let socket = Socket::bind(&directory.join("keeper.sock")).unwrap();
        keeper.listen(socket.as_fd()).unwrap();
        report_and_wait(&directory, &[keeper.pid(), running.pid]);
    }
    let directory = tempfile::tempdir().unwrap();
    let monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    let path = directory.path().join("keeper.sock");
    let (first, second) = (Socket::connect(&path).unwrap(), Socket::connect(&path).unwrap());
    let adopting = std::thread::spawn(|| Keeper::adopt(first).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    assert!(!adopting.is_finished(), "two monitors at once");
    end(monitor);
    let (cell, slot) = adopting.join().unwrap();
    assert_eq!((cell.pid(), slot.len()), (keeper, 1));
    kill(running, libc::SIGKILL);
    let killed = Exit::Status(libc::SIGKILL);
    assert_eq!(wait_for(SOON, || cell.exit_of(running)), killed);
    cell.release();
    // The one that waited longer than the successor would have.
    let (cell, _) = Keeper::adopt(second).unwrap();
    assert_eq!(wait_for(SOON, || cell.exit_of(running)), killed);
    cell.reap(running);
    assert!(!directory.path().join("successor").exists());
    cell.release();
    // No other has connected.
    assert_eq!(read(directory.path(), "successor"), [keeper]);
    kill(keeper, libc::SIGKILL);
    wait_for(SOON, || gone(keeper));
    assert!(Socket::connect(&path).is_err());
}

#[test]
fn monitor_that_leaves_its_vm_to_a_cell_runs_on() {
    let keeper = keeper();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper.sock");
    let running = sleeper(&keeper);
    succeed_by(&keeper, "/bin/false", &["false"]);
    keeper.put(&[running.pidfd.as_fd()]).unwrap();
    keeper.listen(Socket::bind(&path).unwrap().as_fd()).unwrap();
    let cell = Socket::connect(&path).unwrap();
    keeper.leave().unwrap();
    // This process is the monitor, and would have been killed.
    let (cell, slot) = Keeper::adopt(cell).unwrap();
    assert_eq!(slot.len(), 1);
    assert_eq!(cell.exit_of(running.pid), None);
    // It ends the VM.
    let pid = cell.pid();
    drop(cell);
    wait_for(SOON, || gone(running.pid));
    wait_for(SOON, || gone(pid));
}

#[test]
fn successor_that_has_ended_counts_as_gone_though_another_process_has_its_socket() {
    let test = "successors::successor_that_has_ended_counts_as_gone_though_another_process_has_its_socket";
    let script = "exec 9<&0; sleep 20 > /dev/null 2>&1 & echo x >> $starts";
    let start = Instant::now();
    assert_eq!(end_by_successors(test, script), "x\n".repeat(10));
    // The delays between ten starts are 5.55 s together.
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn successor_that_closes_its_socket_is_killed_before_the_next_starts() {
    let test = "successors::successor_that_closes_its_socket_is_killed_before_the_next_starts";
    let script = "for pid in $(cat $starts); do kill -0 $pid && echo alive >> $starts; done 2> /dev/null; \
                  echo $$ >> $starts; exec < /dev/null > /dev/null 2>&1; exec sleep 5";
    let starts = end_by_successors(test, script);
    let pids: Vec<i32> = starts.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(pids.len(), 10, "{starts}");
}

#[test]
fn original_monitor_that_lost_only_its_connection_is_killed_before_its_successor_starts() {
    let test =
        "successors::original_monitor_that_lost_only_its_connection_is_killed_before_its_successor_starts";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let running = sleeper(&keeper);
        // The third word of the file is the state of the process.
        let script = format!(
            "cd {}; echo $$ $(cut -d' ' -f3 /proc/{}/stat) > unfinished; mv unfinished successor; \
             exec sleep 100 > /dev/null 2>&1",
            directory.display(),
            std::process::id()
        );
        succeed_by_script(&keeper, &script);
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        write(
            &directory,
            "monitor",
            &format!("{} {}", keeper.pid(), running.pid),
        );
        let connection = keeper.connection().unwrap();
        // SAFETY: ends the connection, whose descriptors stay open.
        let ended = unsafe { libc::shutdown(connection.as_raw_fd(), libc::SHUT_RDWR) };
        assert_eq!(ended, 0);
        wait_to_be_killed();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    let successor = directory.path().join("successor");
    let text = wait_for(SOON, || fs::read_to_string(&successor).ok());
    let (pid, state) = text.trim().split_once(' ').unwrap();
    // It is this test's child, and not reaped yet.
    assert_eq!(state, "Z", "the original monitor runs beside its successor");
    assert_eq!(monitor.wait().unwrap().signal(), Some(libc::SIGKILL));
    let pid = pid.parse().unwrap();
    assert!(is_running(keeper) && is_running(running) && is_running(pid));
    kill(keeper, libc::SIGKILL);
    kill(pid, libc::SIGKILL);
    wait_for(SOON, || gone(running));
}
