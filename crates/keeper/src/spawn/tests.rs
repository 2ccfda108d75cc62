use std::process::Command;
use std::time::Instant;

use super::id_map::{end_helper, wait_within};
use super::namespaces::all_flags;
use super::*;

const NO_LIMIT: u64 = 1 << 40;

fn start(path: &str, words: &[&str], flags: c_int, identity: Option<Identity>) -> io::Result<Child> {
    let null = File::options().write(true).open("/dev/null").unwrap();
    spawn(&Spawn {
        program: File::open(path).unwrap().as_fd(),
        control: null.as_fd(),
        log: null.as_fd(),
        words,
        flags,
        identity,
        file_bytes: NO_LIMIT,
    })
}

#[test]
fn process_has_the_user_and_group_that_it_was_given() {
    let namespaces = Namespaces::probe();
    if !nix::unistd::geteuid().is_root() || !namespaces.missing.is_empty() {
        return eprintln!("left out: the test takes root and all namespaces");
    }
    let identity = Identity {
        uid: 1_900_000_003,
        gid: 1_900_000_004,
    };
    let spawned = start(
        "/bin/sleep",
        &["sleep", "100"],
        namespaces.flags(),
        Some(identity),
    )
    .unwrap();
    assert!(spawned.is_mapped);
    let wanted = [("Uid", identity.uid), ("Gid", identity.gid)]
        .map(|(field, id)| format!("{field}:\t{id}\t{id}\t{id}\t{id}\n"));
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", spawned.pid)).unwrap();
        if wanted.iter().all(|line| status.contains(line.as_str())) {
            break;
        }
        assert!(Instant::now() < deadline, "{status}");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_and_reap(spawned.pid);
}

#[test]
fn helper_that_does_not_end_in_time_is_killed_and_reaped() {
    let mut helper = Command::new("sleep").arg("100").spawn().unwrap();
    let limit = Duration::from_millis(5);
    assert!(wait_within(&mut helper, limit).unwrap().is_none());
    end_helper(&mut helper);
    let entry = format!("/proc/{}", helper.id());
    assert!(!std::path::Path::new(&entry).exists(), "no zombie is left");
}

#[test]
fn namespaces_take_no_other_flags_of_a_clone() {
    assert!(Namespaces::of_flags(all_flags()).is_some_and(|all| all.flags() == all_flags()));
    assert!(Namespaces::of_flags(0).is_some());
    for other in [libc::CLONE_VM, libc::CLONE_FILES, libc::SIGKILL, -1] {
        assert!(Namespaces::of_flags(other).is_none(), "{other:#x}");
    }
}

#[test]
fn child_whose_parent_ends_before_the_reply_executes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let made = directory.path().join("made");
    let (ours, theirs) = UnixStream::pair().unwrap();
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let program = File::open("/bin/sh").unwrap();
    let script = format!("echo > {}", made.display());
    let argv = Argv::new(["sh", "-c", &script]).unwrap();
    let kept = [&program, &null].map(|file| high(file.as_fd()).unwrap());
    let go = high(theirs.as_fd()).unwrap();
    drop(theirs);
    let prepared = Prepared {
        program: kept[0].as_raw_fd(),
        control: kept[1].as_raw_fd(),
        null: kept[1].as_raw_fd(),
        log: kept[1].as_raw_fd(),
        go: go.as_raw_fd(),
        parents_go: ours.as_raw_fd(),
        argv: argv.as_ptr(),
        envp: [std::ptr::null(); 2],
        user: false,
    };
    // SAFETY: as fork; the child goes straight into `child`.
    let pid = unsafe { raw_clone(0) };
    if pid == 0 {
        // SAFETY: in the child, with everything prepared alive in its copy of the memory.
        unsafe { child(&prepared) }
    }
    drop(go);
    (&ours).write_all(b"m").unwrap();
    ours.set_read_timeout(Some(READY_TIMEOUT)).unwrap();
    (&ours).read_exact(&mut [0]).unwrap();
    // The child waits for the reply; the end of its parent is this end of file.
    drop(ours);
    let mut status = 0;
    // SAFETY: waits for our own child; status is a valid place.
    let waited = unsafe { libc::waitpid(pid as i32, &raw mut status, 0) };
    assert_eq!(i64::from(waited), pid);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == NOT_PREPARED,
        "{status:#x}"
    );
    assert!(!made.exists());
}
