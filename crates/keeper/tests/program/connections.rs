//! Tests of a keeper's connection, its slot, its signals and its memory.

use super::*;

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
