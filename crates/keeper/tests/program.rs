//! The keeper's program with real processes. Some tests start this program again, as a monitor or its
//! successor.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use keeper::client::{Exit, Keeper, Spawn, Spawned};
use keeper::message::{Message, PACKET_BYTES_MAX};
use keeper::socket::Socket;
use keeper::spawn::Namespaces;
use keeper::state::CHILDREN_MAX;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mirrorball-keeper");
/// Time for something that takes milliseconds on an idle machine.
const SOON: Duration = Duration::from_secs(20);
/// Private memory of a keeper at most. A debug build is larger, and not what users run.
const PRIVATE_KIB_MAX: u64 = if cfg!(debug_assertions) { 2048 } else { 300 };
const FILE_BYTES: u64 = 1 << 40;

fn keeper() -> Keeper {
    Keeper::start(File::open(PROGRAM).unwrap().as_fd(), "vm").unwrap()
}

/// Starts `path` without namespaces.
fn spawn(keeper: &Keeper, path: &str, words: &[&str]) -> io::Result<Spawned> {
    let null = File::options().write(true).open("/dev/null").unwrap();
    keeper.spawn(&Spawn {
        program: File::open(path).unwrap().as_fd(),
        control: null.as_fd(),
        log: null.as_fd(),
        words,
        flags: 0,
        identity: None,
        file_bytes: FILE_BYTES,
    })
}

fn sleeper(keeper: &Keeper) -> Spawned {
    spawn(keeper, "/bin/sleep", &["sleep", "100"]).unwrap()
}

#[track_caller]
fn wait_for<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the process runs: it is there, and no zombie.
fn is_running(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

fn gone(pid: i32) -> Option<()> {
    (!is_running(pid)).then_some(())
}

fn kill(pid: i32, signal: i32) {
    // SAFETY: sends a signal to a process that this test started.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// This program again, running the one test in another role.
fn again(test: &str, role: &str, directory: &Path) -> Vec<String> {
    let directory = format!("directory={}", directory.display());
    let program = std::env::current_exe().unwrap();
    [
        program.to_str().unwrap(),
        test,
        "--exact",
        "--nocapture",
        role,
        &directory,
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The directory that this process was started with, if it is in that role.
fn directory_of(role: &str) -> Option<PathBuf> {
    let words: Vec<String> = std::env::args().collect();
    let directory = words.iter().find_map(|word| word.strip_prefix("directory="));
    words
        .iter()
        .any(|word| word == role)
        .then(|| directory.unwrap().into())
}

fn start_monitor(test: &str, directory: &Path) -> Child {
    let words = again(test, "role=monitor", directory);
    Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// Writes a file that is whole once others see it.
fn write(directory: &Path, name: &str, text: &str) {
    let unfinished = directory.join(format!("{name}.unfinished"));
    fs::write(&unfinished, text).unwrap();
    fs::rename(unfinished, directory.join(name)).unwrap();
}

/// Waits for a file of numbers.
#[track_caller]
fn read<const N: usize>(directory: &Path, name: &str) -> [i32; N] {
    let text = wait_for(SOON, || fs::read_to_string(directory.join(name)).ok());
    let numbers: Vec<i32> = text
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    numbers.try_into().unwrap()
}

/// A monitor that waits until it is killed.
fn wait_to_be_killed() -> ! {
    std::thread::sleep(Duration::from_secs(100));
    panic!("nobody killed this monitor");
}

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
    // The monitor gets the report of the exit, and the keeper lives on for it.
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
    // One that does not watch a lease gets no message that a keeper of the release before would refuse.
    let keeper = keeper();
    keeper.note_ending();
    let process = sleeper(&keeper);
    assert!(is_running(process.pid));
}

#[test]
fn monitor_that_is_killed_without_a_slot_takes_process_and_keeper_along() {
    let test = "monitor_that_is_killed_without_a_slot_takes_process_and_keeper_along";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        keeper
            .succeed_by(File::open("/bin/true").unwrap().as_fd(), &["true"])
            .unwrap();
        let running = sleeper(&keeper);
        write(
            &directory,
            "monitor",
            &format!("{} {}", keeper.pid(), running.pid),
        );
        wait_to_be_killed();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    assert!(is_running(keeper) && is_running(running));
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    wait_for(SOON, || gone(running));
    wait_for(SOON, || gone(keeper));
}

#[test]
fn successor_gets_the_slot_and_the_exits_while_a_process_runs_on() {
    let test = "successor_gets_the_slot_and_the_exits_while_a_process_runs_on";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let (left, running) = (
            spawn(&keeper, "/bin/false", &["false"]).unwrap(),
            sleeper(&keeper),
        );
        let words = again(test, "role=successor", &directory);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        keeper
            .succeed_by(File::open(words[0]).unwrap().as_fd(), &words)
            .unwrap();
        // More than a packet takes, so that the slot comes in two parts.
        let file = File::create(directory.join("file")).unwrap();
        let mut files = vec![running.pidfd.as_fd(); 253];
        files.push(file.as_fd());
        keeper.put(&files).unwrap();
        wait_for(SOON, || keeper.exit_of(left.pid));
        write(
            &directory,
            "monitor",
            &format!("{} {} {}", keeper.pid(), left.pid, running.pid),
        );
        wait_to_be_killed();
    }
    if let Some(directory) = directory_of("role=successor") {
        // SAFETY: the keeper gave this process its socket as standard input; nothing else here reads it.
        let (keeper, slot) = Keeper::adopt(unsafe { OwnedFd::from_raw_fd(0) }).unwrap();
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
    let mut monitor = start_monitor(test, directory);
    let [keeper, left, running] = read(directory, "monitor");
    monitor.kill().unwrap();
    monitor.wait().unwrap();
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
        keeper
            .succeed_by(File::open("/bin/false").unwrap().as_fd(), &["false"])
            .unwrap();
        keeper
            .succeed_by(File::open("/bin/sh").unwrap().as_fd(), &["sh", "-c", &script])
            .unwrap();
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        write(
            &directory,
            "monitor",
            &format!("{} {}", keeper.pid(), running.pid),
        );
        wait_to_be_killed();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    wait_for(SOON, || gone(keeper));
    wait_for(SOON, || gone(running));
    fs::read_to_string(directory.path().join("starts")).unwrap()
}

#[test]
fn successor_that_ends_at_once_is_started_ten_times_before_the_vm_ends() {
    let test = "successor_that_ends_at_once_is_started_ten_times_before_the_vm_ends";
    let start = Instant::now();
    assert_eq!(end_by_successors(test, "echo x >> $starts"), "x\n".repeat(10));
    // The last delays are 1 s.
    assert!(start.elapsed() >= Duration::from_millis(5550));
}

#[test]
fn exit_between_two_monitors_is_reported_to_the_second() {
    let test = "exit_between_two_monitors_is_reported_to_the_second";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let running = sleeper(&keeper);
        let words = again(test, "role=successor", &directory);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        keeper
            .succeed_by(File::open(words[0]).unwrap().as_fd(), &words)
            .unwrap();
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        write(&directory, "monitor", &running.pid.to_string());
        wait_to_be_killed();
    }
    if let Some(directory) = directory_of("role=successor") {
        let [running] = read(&directory, "monitor");
        if !directory.join("first").exists() {
            write(&directory, "first", "");
            // The next successor starts 50 ms after this one's end. The process ends meanwhile.
            kill(running, libc::SIGKILL);
            std::process::exit(0);
        }
        // SAFETY: the keeper gave this process its socket as standard input; nothing else here reads it.
        let (keeper, _) = Keeper::adopt(unsafe { OwnedFd::from_raw_fd(0) }).unwrap();
        assert_eq!(
            wait_for(SOON, || keeper.exit_of(running)),
            Exit::Status(libc::SIGKILL)
        );
        write(&directory, "reported", "1");
        return drop(keeper);
    }
    let directory = tempfile::tempdir().unwrap();
    let mut monitor = start_monitor(test, directory.path());
    let [_] = read(directory.path(), "monitor");
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    assert_eq!(read(directory.path(), "reported"), [1]);
}

#[test]
fn cell_has_the_vm_from_the_end_of_its_monitor_until_it_lets_go() {
    let test = "cell_has_the_vm_from_the_end_of_its_monitor_until_it_lets_go";
    if let Some(directory) = directory_of("role=monitor") {
        let keeper = keeper();
        let running = sleeper(&keeper);
        let script = format!(
            "cd {} && echo $PPID > unfinished && mv unfinished successor; exec sleep 2",
            directory.display()
        );
        keeper
            .succeed_by(File::open("/bin/sh").unwrap().as_fd(), &["sh", "-c", &script])
            .unwrap();
        keeper.put(&[running.pidfd.as_fd()]).unwrap();
        let socket = Socket::bind(&directory.join("keeper.sock")).unwrap();
        keeper.listen(socket.as_fd()).unwrap();
        let pids = format!("{} {}", keeper.pid(), running.pid);
        write(&directory, "monitor", &pids);
        wait_to_be_killed();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut monitor = start_monitor(test, directory.path());
    let [keeper, running] = read(directory.path(), "monitor");
    let path = directory.path().join("keeper.sock");
    let (first, second) = (Socket::connect(&path).unwrap(), Socket::connect(&path).unwrap());
    let adopting = std::thread::spawn(|| Keeper::adopt(first).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    assert!(!adopting.is_finished(), "two monitors at once");
    monitor.kill().unwrap();
    monitor.wait().unwrap();
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
    keeper
        .succeed_by(File::open("/bin/false").unwrap().as_fd(), &["false"])
        .unwrap();
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
    let test = "successor_that_has_ended_counts_as_gone_though_another_process_has_its_socket";
    let script = "exec 9<&0; sleep 20 > /dev/null 2>&1 & echo x >> $starts";
    let start = Instant::now();
    assert_eq!(end_by_successors(test, script), "x\n".repeat(10));
    // The delays between ten starts are 5.55 s together.
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn successor_that_closes_its_socket_is_killed_before_the_next_starts() {
    let test = "successor_that_closes_its_socket_is_killed_before_the_next_starts";
    let script = "for pid in $(cat $starts); do kill -0 $pid && echo alive >> $starts; done 2> /dev/null; \
                  echo $$ >> $starts; exec < /dev/null > /dev/null 2>&1; exec sleep 5";
    let starts = end_by_successors(test, script);
    let pids: Vec<i32> = starts.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(pids.len(), 10, "{starts}");
}

#[test]
fn original_monitor_that_lost_only_its_connection_is_killed_before_its_successor_starts() {
    let test = "original_monitor_that_lost_only_its_connection_is_killed_before_its_successor_starts";
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
        keeper
            .succeed_by(File::open("/bin/sh").unwrap().as_fd(), &["sh", "-c", &script])
            .unwrap();
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

#[test]
fn signals_of_a_terminal_or_a_logout_do_not_end_a_keeper() {
    let keeper = keeper();
    // At once, and when it waits.
    kill(keeper.pid(), libc::SIGINT);
    let running = sleeper(&keeper);
    for signal in [
        libc::SIGTERM,
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGQUIT,
        libc::SIGPIPE,
        libc::SIGTSTP,
    ] {
        kill(keeper.pid(), signal);
    }
    let left = spawn(&keeper, "/bin/true", &["true"]).unwrap();
    wait_for(SOON, || keeper.exit_of(left.pid));
    assert!(is_running(running.pid));
}

/// A keeper without a client of the library.
fn bare_keeper() -> (Child, Socket) {
    let (socket, theirs) = Socket::pair().unwrap();
    let keeper = Command::new(PROGRAM)
        .arg("vm")
        .stdin(Stdio::from(theirs))
        .spawn()
        .unwrap();
    (keeper, socket)
}

#[test]
fn malformed_packet_ends_the_connection_and_with_it_the_keeper_in_good_order() {
    let null = File::open("/dev/null").unwrap();
    let bytes = |message: Message| message.write(1).unwrap();
    let words = vec!["x".to_owned()];
    let two_files_for_three = Message::Spawn {
        flags: 0,
        identity: None,
        file_bytes: 0,
        words: words.clone(),
    };
    for (packet, files) in [
        (vec![7; 5], 0),
        (vec![0; PACKET_BYTES_MAX + 100], 0),
        (bytes(Message::Done), 0),
        (bytes(Message::Take), 1),
        (bytes(Message::Successor { words }), 2),
        (bytes(two_files_for_three), 2),
        (Vec::new(), 0),
    ] {
        let (mut keeper, socket) = bare_keeper();
        socket.send(&packet, &vec![null.as_fd(); files]).unwrap();
        assert!(socket.wait_until(Instant::now() + SOON, false).unwrap());
        assert!(!matches!(socket.receive(), Ok(Some(_))), "{packet:?}");
        let status = wait_for(SOON, || keeper.try_wait().unwrap());
        assert!(status.success(), "{status} after {packet:?}");
    }
}

#[test]
fn monitor_that_reads_nothing_is_disconnected() {
    let (mut keeper, socket) = bare_keeper();
    let take = Message::Take.write(1).unwrap();
    let deadline = Instant::now() + SOON;
    let refused = loop {
        match socket.send(&take, &[]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                assert!(socket.wait_until(deadline, true).unwrap());
            }
            Err(error) => break error,
            Ok(()) => {}
        }
    };
    assert!(
        matches!(refused.raw_os_error(), Some(libc::EPIPE | libc::ECONNRESET)),
        "{refused}"
    );
    assert!(wait_for(SOON, || keeper.try_wait().unwrap()).success());
}

#[test]
fn slot_that_is_too_large_is_refused_and_the_keeper_lives_on() {
    // As many as this process may have open at most, so that the keeper may not hold as many and its own.
    let limit = 64;
    let null = File::open("/dev/null").unwrap();
    let keeper = keeper();
    let most = libc::rlimit64 {
        rlim_cur: limit,
        rlim_max: limit,
    };
    // SAFETY: sets a limit of a process that this test started, from a structure of ours.
    let set = unsafe {
        libc::prlimit64(
            keeper.pid(),
            libc::RLIMIT_NOFILE,
            &raw const most,
            std::ptr::null_mut(),
        )
    };
    assert_eq!(set, 0);
    let refused = keeper.put(&[null.as_fd(); 100]).unwrap_err();
    assert!(refused.to_string().contains("os error 24"), "{refused}");
    keeper.put(&[null.as_fd(); 10]).unwrap();
    sleeper(&keeper);
}

#[test]
fn program_without_a_monitor_names_the_command_to_use() {
    let output = Command::new(PROGRAM).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("help: start VMs with `mirrorball run`"), "{text}");
}

#[test]
fn private_memory_of_a_keeper_stays_within_its_limit() {
    let keeper = keeper();
    let running = sleeper(&keeper);
    keeper
        .succeed_by(File::open("/bin/true").unwrap().as_fd(), &["true"])
        .unwrap();
    keeper.put(&[running.pidfd.as_fd()]).unwrap();
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", keeper.pid())).unwrap();
    // `Private_Dirty` is the same, but has the pages of a program just linked, too, until they are on the
    // disk.
    let anonymous = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:"));
    let kib: u64 = anonymous.unwrap().trim().trim_end_matches(" kB").parse().unwrap();
    println!("{kib} KiB of private dirty memory");
    assert!(kib < PRIVATE_KIB_MAX, "{rollup}");
}

#[test]
fn descriptors_of_the_slot_are_not_inherited() {
    let keeper = keeper();
    let (kept, copy) = UnixStream::pair().unwrap();
    keeper.put(&[copy.as_fd()]).unwrap();
    drop(copy);
    let running = sleeper(&keeper);
    keeper.clear().unwrap();
    kept.set_read_timeout(Some(SOON)).unwrap();
    assert_eq!((&kept).read(&mut [0]).unwrap(), 0, "no copy is left");
    assert!(kept.as_raw_fd() > 2 && is_running(running.pid));
}
