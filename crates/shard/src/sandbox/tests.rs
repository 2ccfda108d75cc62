//! Each layer is tried in a forked process of its own, so that the test runner keeps its rights.

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use super::threads::{ThreadKind, Threads};
use super::{SandboxPolicy, capabilities, close, filter, root};

const KINDS: [ThreadKind; 10] = [
    ThreadKind::Lane,
    ThreadKind::Control,
    ThreadKind::Vcpu,
    ThreadKind::Serial,
    ThreadKind::Block,
    ThreadKind::Net,
    ThreadKind::Vsock,
    ThreadKind::Rng,
    ThreadKind::Balloon,
    ThreadKind::Pmem,
];

/// Runs `work` in a child and gives its end.
fn in_child(work: impl FnOnce() -> i32) -> WaitStatus {
    // SAFETY: the child runs `work` and leaves without unwinding into the test runner; it takes no lock that another
    // thread of the runner might have held at the fork (the allocator's are reset by glibc's fork handlers).
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let status = work();
            // SAFETY: ends the child without running the runner's exit handlers.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => waitpid(child, None).expect("waitpid"),
    }
}

fn code(status: WaitStatus) -> i32 {
    match status {
        WaitStatus::Exited(_, code) => code,
        other => panic!("the child did not exit: {other:?}"),
    }
}

#[test]
fn every_kind_of_thread_has_a_filter_that_the_kernel_takes() {
    for kind in KINDS {
        let status = in_child(|| i32::from(filter::apply(kind).is_err()));
        assert_eq!(code(status), 0, "{kind:?}");
    }
}

#[test]
fn a_call_outside_the_list_ends_the_process() {
    for kind in KINDS {
        let status = in_child(|| {
            if filter::apply(kind).is_err() {
                return 1;
            }
            // SAFETY: a harmless call that no thread of a shard needs.
            unsafe { libc::syscall(libc::SYS_setuid, 0) };
            0
        });
        assert!(
            matches!(
                status,
                WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGSYS, _)
            ),
            "{kind:?}: {status:?}"
        );
    }
}

#[test]
fn memory_never_becomes_executable() {
    let status = in_child(|| {
        if filter::apply(ThreadKind::Vcpu).is_err() {
            return 1;
        }
        // SAFETY: asks for fresh anonymous memory; the filter is expected to end the process here.
        unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        0
    });
    assert!(
        matches!(
            status,
            WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGSYS, _)
        ),
        "{status:?}"
    );
}

#[test]
fn no_capability_is_left() {
    let status = in_child(|| {
        if capabilities::drop_all().is_err() {
            return 1;
        }
        let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let empty = |set: &str| {
            text.lines()
                .any(|line| line.starts_with(set) && line.trim_end().ends_with("\t0000000000000000"))
        };
        if empty("CapEff:") && empty("CapPrm:") && empty("CapInh:") && text.contains("NoNewPrivs:\t1") {
            0
        } else {
            2
        }
    });
    assert_eq!(code(status), 0);
}

#[test]
fn the_root_is_empty_but_for_the_ports() {
    let ports = tempfile::tempdir().expect("tempdir");
    std::fs::write(ports.path().join("5000"), b"").expect("write");
    let status = in_child(|| {
        // An ordinary user needs a user namespace to make a mount namespace.
        // SAFETY: takes no argument.
        if unsafe { libc::geteuid() } != 0
            && nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER).is_err()
        {
            return 1;
        }
        if !matches!(root::enter_empty(Some(ports.path())), Ok(None)) {
            return 2;
        }
        let names: Vec<_> = match std::fs::read_dir("/") {
            Ok(entries) => entries.flatten().map(|entry| entry.file_name()).collect(),
            Err(_) => return 3,
        };
        if names != ["ports"] || !std::path::Path::new("/ports/5000").exists() {
            return 4;
        }
        if std::fs::write("/new", b"").is_ok() { 5 } else { 0 }
    });
    assert_eq!(code(status), 0);
}

#[test]
fn require_refuses_what_the_monitor_could_not_do() {
    let status = in_child(|| {
        match close(
            SandboxPolicy::Require,
            vec!["network namespace: not permitted".to_owned()],
            None,
        ) {
            Err(error) if error.to_string().contains("network namespace") => 0,
            _ => 1,
        }
    });
    assert_eq!(code(status), 0);
}

#[test]
fn sealed_threads_work_and_are_sealed() {
    let status = in_child(|| {
        let threads = Threads::sealed();
        let (send, receive) = std::sync::mpsc::channel();
        let spawned = threads.spawn(ThreadKind::Rng, "rng", move || {
            let boxed: Vec<u8> = vec![7; 1 << 20];
            let _ = send.send(boxed[9]);
        });
        match spawned.map(|thread| thread.join()) {
            Ok(Ok(())) if receive.recv() == Ok(7) => 0,
            _ => 1,
        }
    });
    assert_eq!(code(status), 0);
}
