//! The filter's process as a fork of the test runner: one thread, sealed as beside a shard.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::resource::getrlimit;
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, send, shutdown, socketpair,
};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, Uid, fork, geteuid, setresuid};
use subnet::filter::Barred;
use subnet::process::message::Message;
use subnet::process::{Count, begin};

use super::*;
use crate::launch::SandboxPolicy;
use crate::sandbox::tests::{code, in_child};

const LIMIT: Duration = Duration::from_secs(20);
/// A user that no other process has.
const USER: (u32, u32) = (1_900_000_103, 1_900_000_203);
const NOBODY: u32 = 65_534;

/// A process with the other ends of its sockets.
struct Started {
    pid: Pid,
    card: UnixStream,
    passt: UnixStream,
    lists: OwnedFd,
    count: Count,
}

fn sealing(policy: SandboxPolicy, identity: Option<Identity>) -> Sealing<'static> {
    Sealing {
        kind: ThreadKind::Relay,
        policy,
        identity,
        beneath: None,
        missing: Vec::new(),
    }
}

fn start(arguments: &Arguments) -> Started {
    let (card, near_card) = UnixStream::pair().unwrap();
    let (passt, near_passt) = UnixStream::pair().unwrap();
    let kind = SockType::SeqPacket;
    let (lists, near_lists) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let count = Count::new().unwrap();
    begin(&lists, &near_card, &near_passt, &count, &Barred::default()).unwrap();
    drop((near_card, near_passt));
    for side in [&card, &passt] {
        side.set_read_timeout(Some(LIMIT)).unwrap();
    }
    // SAFETY: the child leaves without unwinding into the test runner; it takes no lock that another thread
    // of the runner might have held at the fork (the allocator's are reset by glibc's fork handlers).
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            // The other ends belong to the parent only.
            drop((card, passt, lists));
            let status = serve(near_lists, arguments).map_or(1, |end| end.status().into());
            // SAFETY: ends the child without running the runner's exit handlers.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => Started {
            pid: child,
            card,
            passt,
            lists,
            count,
        },
    }
}

/// Returns a frame of the address resolution protocol, which passes, in the sockets' format.
fn arp(bytes: u32) -> Vec<u8> {
    let mut frame = bytes.to_be_bytes().to_vec();
    frame.extend([0xff; 6]);
    frame.extend([2, 0, 0, 0, 0, 1, 0x08, 0x06]);
    frame.resize(4 + bytes as usize, 7);
    frame
}

/// Returns a frame of no protocol, which is dropped.
fn nonsense() -> Vec<u8> {
    let mut frame = 60_u32.to_be_bytes().to_vec();
    frame.resize(64, 0);
    frame
}

fn expect_to_arrive(mut from: &UnixStream, mut to: &UnixStream, message: &[u8]) {
    from.write_all(message).unwrap();
    let mut arrived = vec![0; message.len()];
    to.read_exact(&mut arrived).unwrap();
    assert!(arrived == message);
}

#[test]
fn sealed_process_moves_frames_and_takes_lists_without_any_rights() {
    let is_root = geteuid().is_root();
    let arguments = Arguments {
        user: is_root.then_some(USER),
        udp_ports: vec![53],
        ..Arguments::default()
    };
    let Started {
        pid,
        card,
        passt,
        lists,
        count,
    } = start(&arguments);
    (&card).write_all(&nonsense()).unwrap();
    expect_to_arrive(&card, &passt, &arp(60));
    expect_to_arrive(&passt, &card, &arp(65_000));
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mut wanted = vec![
        "Name:\tcard-filter\n".to_owned(),
        "Threads:\t1\n".to_owned(),
        "CapPrm:\t0000000000000000\n".to_owned(),
        "CapEff:\t0000000000000000\n".to_owned(),
        "NoNewPrivs:\t1\n".to_owned(),
        "Seccomp:\t2\n".to_owned(),
    ];
    if is_root {
        let (uid, gid) = USER;
        wanted.extend([
            format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"),
            format!("Gid:\t{gid}\t{gid}\t{gid}\t{gid}\n"),
            "CapBnd:\t0000000000000000\n".to_owned(),
        ]);
    }
    for line in wanted {
        assert!(status.contains(&line), "{line:?} in {status}");
    }
    // The list is outdated after this.
    std::thread::sleep(Duration::from_millis(1_100));
    (&card).write_all(&arp(60)).unwrap();
    assert_eq!(recv(lists.as_raw_fd(), &mut [0; 8], MsgFlags::empty()), Ok(1));
    let list = Message::list(&Barred {
        own: [[192, 0, 2, 1].into()].into(),
        ..Barred::default()
    });
    send(lists.as_raw_fd(), &list.unwrap(), MsgFlags::empty()).unwrap();
    let mut arrived = arp(60);
    (&passt).read_exact(&mut arrived).unwrap();
    close(card);
    assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, 0)));
    assert_eq!(count.get(), 1);
}

#[test]
fn sealed_process_ends_with_passt_and_reports_it_by_its_status() {
    let Started { pid, card, passt, .. } = start(&Arguments::default());
    expect_to_arrive(&card, &passt, &arp(60));
    close(passt);
    let status = i32::from(End::Passt.status());
    assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, status)));
    assert_eq!((&card).read(&mut [0]).unwrap(), 0);
}

/// Closes a socket, although a process that another test has just forked may hold it for a while.
fn close(side: UnixStream) {
    side.shutdown(std::net::Shutdown::Both).unwrap();
}

/// Waits until the process has ended by itself. Returns its exit status.
fn expect_end(pid: Pid, limit: Duration) -> i32 {
    let deadline = Instant::now() + limit;
    loop {
        match waitpid(pid, Some(WaitPidFlag::WNOHANG)).unwrap() {
            WaitStatus::Exited(_, status) => return status,
            WaitStatus::StillAlive => assert!(Instant::now() < deadline, "it runs on after {limit:?}"),
            status => panic!("{status:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn process_outlives_its_starter_and_ends_within_a_second_of_its_sockets() {
    let is_root = geteuid().is_root();
    for (user, closes_card) in [(None, true), (is_root.then_some(USER), true), (None, false)] {
        let arguments = Arguments {
            user,
            ..Arguments::default()
        };
        // A parent-death signal would arrive at the end of this thread.
        let started = std::thread::spawn(move || start(&arguments));
        let Started { pid, card, passt, .. } = started.join().unwrap();
        expect_to_arrive(&card, &passt, &arp(60));
        expect_to_arrive(&passt, &card, &arp(60));
        let (closed, end) = if closes_card {
            (card, End::Card)
        } else {
            (passt, End::Passt)
        };
        close(closed);
        assert_eq!(expect_end(pid, Duration::from_secs(1)), i32::from(end.status()));
    }
}

#[test]
fn process_that_receives_no_sockets_ends_with_its_standard_input() {
    let kind = SockType::SeqPacket;
    let (lists, near) = socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    shutdown(lists.as_raw_fd(), Shutdown::Both).unwrap();
    let status = in_child(|| match serve(near, &Arguments::default()) {
        Err(SealedProcessError::Host(_)) => 0,
        Err(SealedProcessError::Sandbox(_)) | Ok(_) => 1,
    });
    assert_eq!(code(status), 0);
}

#[test]
fn incomplete_seal_is_refused_if_required_and_ignored_if_off() {
    let sealed = |policy: SandboxPolicy| {
        let status = in_child(|| {
            if geteuid().is_root() {
                let user = Uid::from_raw(NOBODY);
                if setresuid(user, user, user).is_err() {
                    return 100;
                }
            }
            // Only root may change its user.
            let (uid, gid) = USER;
            let refused = seal_alone(sealing(policy, Some(Identity { uid, gid })));
            match refused {
                Err(error) if error.to_string().contains("user id of its own") => 1,
                Err(_) => 2,
                Ok(()) => 0,
            }
        });
        code(status)
    };
    assert_eq!(sealed(SandboxPolicy::Require), 1);
    assert_eq!(sealed(SandboxPolicy::Auto), 0);
    assert_eq!(sealed(SandboxPolicy::Off), 0);
    let stays_open = in_child(|| {
        let done = seal_alone(sealing(SandboxPolicy::Off, None));
        // A call that ends a sealed process.
        i32::from(done.is_err() || nix::unistd::getppid().as_raw() == 0)
    });
    assert_eq!(code(stays_open), 0);
}

#[test]
fn process_is_bounded_in_memory_files_and_descriptors() {
    let status = in_child(|| {
        if limit().is_err() {
            return 1;
        }
        let is = |resource, most| getrlimit(resource) == Ok((most, most));
        let all = is(Resource::RLIMIT_DATA, DATA_BYTES_MAX)
            && is(Resource::RLIMIT_AS, SPACE_BYTES_MAX)
            && is(Resource::RLIMIT_FSIZE, FILE_BYTES_MAX)
            && is(Resource::RLIMIT_NOFILE, FILES_MAX);
        if all { 0 } else { 2 }
    });
    assert_eq!(code(status), 0);
}
