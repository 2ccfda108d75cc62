//! Each layer is tested in a forked process, so that the test runner keeps its rights.

mod filters;

use std::fs::File;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use shard_api::control::{ControlSocket, ORDER_BYTES_MAX, PACKET_BYTES_MAX};

use super::threads::{ThreadKind, Threads};
use super::{Closed, SandboxPolicy, capabilities, close, filter, landlock, root};
use crate::launch::{Identity, SandboxLaunch};

const KINDS: [ThreadKind; 20] = [
    ThreadKind::Control,
    ThreadKind::Orders,
    ThreadKind::Vcpu,
    ThreadKind::SpanVcpu,
    ThreadKind::Link,
    ThreadKind::PageServer,
    ThreadKind::Pins,
    ThreadKind::Serial,
    ThreadKind::Block,
    ThreadKind::Net,
    ThreadKind::Relay,
    ThreadKind::Gateway,
    ThreadKind::Vsock,
    ThreadKind::Rng,
    ThreadKind::Balloon,
    ThreadKind::Pmem,
    ThreadKind::Fs,
    ThreadKind::Folder,
    ThreadKind::Sharing,
    ThreadKind::Pager,
];

/// Next steps of an attacker who runs code in a shard: calls with their first three arguments.
const ATTACKS: &[(&str, filter::Syscall, [u64; 3])] = &[
    ("KVM_CREATE_VM", libc::SYS_ioctl, [NO_FILE, 0xae01, 0]),
    ("KVM_CREATE_DEVICE", libc::SYS_ioctl, [NO_FILE, 0xc00c_aee0, 0]),
    ("KVM_SET_CPUID2", libc::SYS_ioctl, [NO_FILE, 0x4008_ae90, 0]),
    ("KVM_SET_NESTED_STATE", libc::SYS_ioctl, [NO_FILE, 0x4080_aebf, 0]),
    ("KVM_XEN_HVM_CONFIG", libc::SYS_ioctl, [NO_FILE, 0x4038_ae7a, 0]),
    ("KVM_XEN_HVM_SET_ATTR", libc::SYS_ioctl, [NO_FILE, 0x4048_aec9, 0]),
    ("KVM_ENABLE_CAP", libc::SYS_ioctl, [NO_FILE, 0x4068_aea3, 0]),
    (
        "KVM_CREATE_GUEST_MEMFD",
        libc::SYS_ioctl,
        [NO_FILE, 0xc040_aed4, 0],
    ),
    ("KVM_RESET_DIRTY_RINGS", libc::SYS_ioctl, [NO_FILE, 0xaec7, 0]),
    ("TUNSETIFF", libc::SYS_ioctl, [NO_FILE, 0x4004_54ca, 0]),
    ("TUNSETPERSIST", libc::SYS_ioctl, [NO_FILE, 0x4004_54cb, 0]),
    ("TUNSETSTEERINGEBPF", libc::SYS_ioctl, [NO_FILE, 0x8004_54e0, 0]),
    ("TUNSETFILTEREBPF", libc::SYS_ioctl, [NO_FILE, 0x8004_54e1, 0]),
    ("SIOCSIFHWADDR", libc::SYS_ioctl, [NO_FILE, 0x8924, 0]),
    ("FICLONE", libc::SYS_ioctl, [NO_FILE, 0x4004_9409, 0]),
    ("FICLONERANGE", libc::SYS_ioctl, [NO_FILE, 0x4020_940d, 0]),
    ("FS_IOC_ENABLE_VERITY", libc::SYS_ioctl, [NO_FILE, 0x4080_6685, 0]),
    ("FS_IOC_SETFLAGS", libc::SYS_ioctl, [NO_FILE, 0x4008_6602, 0]),
    ("BLKDISCARD", libc::SYS_ioctl, [NO_FILE, 0x1277, 0]),
    ("FIONBIO", libc::SYS_ioctl, [NO_FILE, 0x5421, 0]),
    ("TIOCSTI", libc::SYS_ioctl, [NO_FILE, 0x5412, 0]),
    ("USERFAULTFD_IOC_NEW", libc::SYS_ioctl, [NO_FILE, 0xaa00, 0]),
    (
        "F_SETLEASE",
        libc::SYS_fcntl,
        [NO_FILE, libc::F_SETLEASE as u64, 0],
    ),
    ("F_SETFL", libc::SYS_fcntl, [NO_FILE, libc::F_SETFL as u64, 0]),
    ("F_SETOWN", libc::SYS_fcntl, [NO_FILE, libc::F_SETOWN as u64, 1]),
    ("F_SETSIG", libc::SYS_fcntl, [NO_FILE, 10, 9]),
    (
        "F_SETLEASE",
        libc::SYS_fcntl,
        [NO_FILE, libc::F_SETLEASE as u64, 0],
    ),
    (
        "F_ADD_SEALS",
        libc::SYS_fcntl,
        [NO_FILE, libc::F_ADD_SEALS as u64, 0],
    ),
    (
        "F_OFD_SETLK",
        libc::SYS_fcntl,
        [NO_FILE, libc::F_OFD_SETLK as u64, 0],
    ),
    ("AF_UNIX", libc::SYS_socket, [libc::AF_UNIX as u64, 1, 0]),
    ("AF_INET", libc::SYS_socket, [libc::AF_INET as u64, 1, 0]),
    ("AF_NETLINK", libc::SYS_socket, [libc::AF_NETLINK as u64, 3, 0]),
    ("AF_ALG", libc::SYS_socket, [libc::AF_ALG as u64, 5, 0]),
    ("AF_VSOCK", libc::SYS_socket, [libc::AF_VSOCK as u64, 1, 0]),
    (
        "a pair of AF_INET",
        libc::SYS_socketpair,
        [libc::AF_INET as u64, 1, 0],
    ),
    (
        "a pair for datagrams",
        libc::SYS_socketpair,
        [libc::AF_UNIX as u64, libc::SOCK_DGRAM as u64, 0],
    ),
    ("connect", libc::SYS_connect, [NO_FILE, 0, 0]),
    ("bind", libc::SYS_bind, [NO_FILE, 0, 0]),
    ("open", libc::SYS_openat, [NO_FILE, 0, 0]),
    ("execute", libc::SYS_execve, [0, 0, 0]),
    ("fork", libc::SYS_fork, [0, 0, 0]),
    ("clone", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0]),
    ("ptrace", libc::SYS_ptrace, [0, 0, 0]),
    (
        "read another process's memory",
        libc::SYS_process_vm_readv,
        [1, 0, 0],
    ),
    (
        "take another process's file",
        libc::SYS_pidfd_getfd,
        [NO_FILE, 0, 0],
    ),
    ("kill", libc::SYS_kill, [1, 0, 0]),
    ("kill another process's thread", libc::SYS_tgkill, [1, 1, 0]),
    ("unshare", libc::SYS_unshare, [libc::CLONE_NEWUSER as u64, 0, 0]),
    ("make a ring", libc::SYS_io_uring_setup, [1, 0, 0]),
    ("load a program", libc::SYS_bpf, [0, 0, 0]),
    ("dump core", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0]),
    (
        "run data",
        libc::SYS_mmap,
        [0, 4096, (libc::PROT_READ | libc::PROT_EXEC) as u64],
    ),
    (
        "run memory",
        libc::SYS_mprotect,
        [0, 4096, libc::PROT_EXEC as u64],
    ),
];
const NO_FILE: u64 = u64::MAX;

/// Returns whether one kind of thread needs the call: the first thread freezes the VM's memory and makes
/// pairs of sockets, a folder's process opens the folder's files, and the gateway of a subnet, which is no
/// part of a shard, connects to the outside.
fn is_needed(kind: ThreadKind, attack: &str) -> bool {
    match kind {
        ThreadKind::Control => ["F_ADD_SEALS", "a pair for datagrams"].contains(&attack),
        ThreadKind::Folder => ["open", "F_SETFL", "F_SETLEASE"].contains(&attack),
        ThreadKind::Gateway => ["AF_INET", "connect", "bind"].contains(&attack),
        _ => false,
    }
}

/// Runs `work` in a child process and returns how that ended.
pub(crate) fn in_child(work: impl FnOnce() -> i32) -> WaitStatus {
    // SAFETY: the child runs `work` and leaves without unwinding into the test runner; it takes no lock that
    // another thread of the runner might have held at the fork (the allocator's are reset by glibc's fork
    // handlers).
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let status = work();
            // SAFETY: ends the child without running the runner's exit handlers.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => waitpid(child, None).expect("waitpid"),
    }
}

fn was_ended(status: WaitStatus) -> bool {
    matches!(
        status,
        WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGSYS, _)
    )
}

/// Closes the sandbox around this process. An ordinary user needs a user namespace for that.
fn closed(launch: SandboxLaunch) -> Option<Closed> {
    if !nix::unistd::geteuid().is_root() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER).ok()?;
    }
    let closed = close(launch).ok()?;
    closed.missing.is_empty().then_some(closed)
}

pub(crate) fn code(status: WaitStatus) -> i32 {
    match status {
        WaitStatus::Exited(_, code) => code,
        other => panic!("the child did not exit: {other:?}"),
    }
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
fn the_root_is_empty() {
    let status = in_child(|| {
        // An ordinary user needs a user namespace to create a mount namespace.
        // SAFETY: takes no argument.
        if unsafe { libc::geteuid() } != 0
            && nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER).is_err()
        {
            return 1;
        }
        if root::enter_empty().is_err() {
            return 2;
        }
        match std::fs::read_dir("/").map(Iterator::count) {
            Ok(0) => i32::from(std::fs::write("/new", b"").is_ok()) * 5,
            _ => 3,
        }
    });
    assert_eq!(code(status), 0);
}

#[test]
fn require_refuses_missing_layers_and_accepts_noted_ones() {
    let closes = |missing: &[&str], notes: &[&str]| {
        let owned = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect();
        let launch = SandboxLaunch {
            policy: SandboxPolicy::Require,
            identity: None,
            missing: owned(missing),
            notes: owned(notes),
        };
        in_child(|| match close(launch) {
            Err(error) if error.to_string().contains("network namespace") => 1,
            Err(_) => 2,
            Ok(closed) if closed.notes.iter().any(|note| note.contains("user id")) => 0,
            Ok(_) => 3,
        })
    };
    assert_eq!(code(closes(&["network namespace: not permitted"], &[])), 1);
    if nix::unistd::geteuid().is_root() {
        assert_eq!(code(closes(&[], &["user id of its own: no range"])), 0);
    }
}

/// On hosts that refuse user namespaces, a shard that root starts begins as root, in the host's network.
#[test]
fn without_namespaces_root_becomes_the_given_user_irrevocably_and_leaves_no_dumps() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("left out: it takes root");
    }
    let identity = Identity {
        uid: 1_900_000_003,
        gid: 1_900_000_004,
    };
    let status = in_child(|| {
        let Ok(mut status) = File::open("/proc/self/status") else {
            return 1;
        };
        let launch = SandboxLaunch {
            identity: Some(identity),
            ..SandboxLaunch::default()
        };
        if closed(launch).is_none() {
            return 2;
        }
        let mut text = [0; 4096];
        let count = status.read(&mut text).unwrap_or(0);
        let text = String::from_utf8_lossy(&text[..count]);
        let (uid, gid) = (identity.uid, identity.gid);
        let wanted = [
            format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"),
            format!("Gid:\t{gid}\t{gid}\t{gid}\t{gid}\n"),
            "Groups:\t \n".to_owned(),
            "CapBnd:\t0000000000000000\n".to_owned(),
            "CapPrm:\t0000000000000000\n".to_owned(),
            "CapEff:\t0000000000000000\n".to_owned(),
        ];
        if !wanted.iter().all(|line| text.contains(line.as_str())) {
            eprintln!("{text}");
            return 3;
        }
        if nix::unistd::setuid(nix::unistd::Uid::from_raw(0)).is_ok() {
            return 4;
        }
        if !matches!(nix::sys::prctl::get_dumpable(), Ok(false))
            || getrlimit(Resource::RLIMIT_CORE) != Ok((0, 0))
        {
            return 5;
        }
        match nix::sys::prctl::get_pdeathsig() {
            Ok(Some(nix::sys::signal::Signal::SIGKILL)) => 0,
            _ => 6,
        }
    });
    assert_eq!(code(status), 0);
}

/// Objects that a shard without namespaces could reach by name.
#[test]
fn landlock_restricts_files_tcp_abstract_sockets_and_signals_as_reported() {
    let directory = tempfile::tempdir().expect("tempdir");
    let path = directory.path().join("secret");
    std::fs::write(&path, b"x").expect("write");
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = tcp.local_addr().expect("its address").port();
    let name = format!("mirrorball-landlock-{}", std::process::id());
    let abstract_name = SocketAddr::from_abstract_name(name).expect("a name");
    let _listener = UnixListener::bind_addr(&abstract_name).expect("a socket");
    let parent = nix::unistd::getpid();
    let status = in_child(|| {
        let Ok(mut open) = File::open(&path) else {
            return 1;
        };
        let Ok(lacking) = landlock::restrict(None) else {
            return 2;
        };
        let restricts = |what: &str| {
            !lacking
                .iter()
                .any(|line| line.contains(what) || line.starts_with("Landlock:"))
        };
        if !matches!(open.read(&mut [0]), Ok(1)) {
            return 3;
        }
        if File::open(&path).is_ok() == restricts("opening") {
            return 4;
        }
        if TcpStream::connect(("127.0.0.1", port)).is_ok() == restricts("TCP") {
            return 5;
        }
        if UnixStream::connect_addr(&abstract_name).is_ok() == restricts("abstract") {
            return 6;
        }
        i32::from(nix::sys::signal::kill(parent, None).is_ok() == restricts("signals")) * 7
    });
    assert_eq!(code(status), 0);
}

#[test]
fn no_thread_runs_the_guest_before_the_first_is_sealed() {
    let status = in_child(|| {
        let threads = Threads::sealed();
        let Ok(mut first) = File::open("/proc/thread-self/status") else {
            return 1;
        };
        let (send, receive) = std::sync::mpsc::channel();
        let held = threads.spawn_held(ThreadKind::Vcpu, "vcpu0", move || {
            let mut text = [0; 4096];
            let count = first.read(&mut text).unwrap_or(0);
            let text = String::from_utf8_lossy(&text[..count]);
            let _ = send.send(text.contains("Seccomp:\t2"));
        });
        if held.is_err() || receive.recv_timeout(Duration::from_millis(100)).is_ok() {
            return 2;
        }
        if threads.seal_first().is_err() {
            return 3;
        }
        match receive.recv_timeout(Duration::from_secs(10)) {
            Ok(true) => 0,
            Ok(false) => 4,
            Err(_) => 5,
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

#[test]
fn sealed_first_thread_uses_its_control_socket() {
    let (monitor, shard) = ControlSocket::pair().expect("sockets");
    let order = "an order";
    monitor.try_send(&order).expect("room");
    // In several packets, all of which fit the socket.
    let report = "x".repeat(PACKET_BYTES_MAX + 1);
    let status = in_child(|| {
        if Threads::sealed().seal_first().is_err() {
            return 1;
        }
        let received = shard.receive_packet(ORDER_BYTES_MAX);
        let is_whole = |packet: &[u8]| packet.ends_with(b"\"an order\"");
        if !matches!(received, Ok(Some(packet)) if is_whole(&packet)) {
            return 2;
        }
        i32::from(shard.send(&report, &[]).is_err()) * 3
    });
    assert_eq!(code(status), 0);
    let (message, _) = monitor.receive_with_files().expect("a report");
    assert_eq!(message.len(), report.len() + 2);
}

/// Tests are linked like the command.
#[test]
fn program_has_a_random_address_and_no_segment_is_writable_and_executable() {
    use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PF_W, PF_X, PT_LOAD};
    const ET_DYN: u16 = 3;
    const PT_GNU_RELRO: u32 = 0x6474_e552;
    const PT_GNU_STACK: u32 = 0x6474_e551;
    let mut program = File::open("/proc/self/exe").expect("this program");
    let mut bytes = Vec::new();
    program.read_to_end(&mut bytes).expect("this program");
    let at = |offset: usize, count: usize| &bytes[offset..offset + count];
    // SAFETY: plain numbers, of which any bytes are some; the slice is as long as the structure.
    let header = unsafe {
        at(0, size_of::<Elf64_Ehdr>())
            .as_ptr()
            .cast::<Elf64_Ehdr>()
            .read_unaligned()
    };
    assert_eq!(header.e_type, ET_DYN, "a program of fixed addresses");
    let segments: Vec<Elf64_Phdr> = (0..usize::from(header.e_phnum))
        .map(|number| {
            let size = size_of::<Elf64_Phdr>();
            let segment = at(header.e_phoff as usize + number * size, size);
            // SAFETY: as above.
            unsafe { segment.as_ptr().cast::<Elf64_Phdr>().read_unaligned() }
        })
        .collect();
    assert!(segments.iter().any(|segment| segment.p_type == PT_GNU_RELRO));
    for segment in segments
        .iter()
        .filter(|segment| [PT_LOAD, PT_GNU_STACK].contains(&segment.p_type))
    {
        assert_ne!(segment.p_flags & (PF_W | PF_X), PF_W | PF_X);
    }
}
