//! The seccomp filters: an allow-list for each kind of thread. Any other call ends the process with SIGSYS.
//!
//! `ioctl`, `fcntl`, `socketpair`, `prctl`, `tgkill`, `mbind`, `mmap` and `mprotect` are allowed with some
//! arguments only ([`FILTERED`]). Threads may neither create nor connect sockets: the monitor passes
//! connected ones ([`crate::ports`]).

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use super::threads::ThreadKind;
use crate::memory::nodes::MPOL_MF_MOVE;

/// One entry of an allow-list: a system call number.
pub type Syscall = i64;

/// System calls of the Rust runtime, the allocator and the event loop, in every thread.
const EVERY_THREAD: &[Syscall] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_madvise,
    // Returns an error: see `refuse_remapping`.
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// Calls that are allowed by their arguments only, and are in no list of calls.
#[cfg(test)]
pub(super) const FILTERED: [Syscall; 10] = [
    libc::SYS_connect,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_mbind,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_prctl,
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_tgkill,
];

/// System calls of a subnet's gateway: its clients, cards, and sockets to the outside. The kinds of new
/// sockets are filtered.
const GATEWAY: &[Syscall] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getrandom,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// Families of sockets that the gateway creates.
const GATEWAY_FAMILIES: &[u64] = &[libc::AF_INET as u64, libc::AF_INET6 as u64];

/// Commands of `fcntl` in every thread: duplicating a descriptor, and reading its flags.
const EVERY_FCNTL: &[libc::c_int] = &[libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_GETFL];

/// Further command of the first thread, which freezes the VM.
const FREEZE_FCNTL: &[libc::c_int] = &[libc::F_ADD_SEALS];

/// Further commands of a folder's process: a guest's program changes the flags of its open file, and a file
/// whose pages are shared is leased.
const FOLDER_FCNTL: &[libc::c_int] = &[libc::F_SETFL, libc::F_SETLEASE];

/// KVM's `ioctl`s of a running vCPU's thread: to run, and to change interrupt routes, notification addresses
/// and memory slots when the guest programs its PCI devices. From `linux/kvm.h`.
const VCPU_IOCTLS: &[u32] = &[
    0xae80,      // KVM_RUN
    0x4020_ae46, // KVM_SET_USER_MEMORY_REGION
    0x4008_ae6a, // KVM_SET_GSI_ROUTING
    0x4020_ae76, // KVM_IRQFD
    0x4040_ae79, // KVM_IOEVENTFD
    0x8090_ae81, // KVM_GET_REGS, to say where a guest was when KVM could not go on
    0x8138_ae83, // KVM_GET_SREGS
];

/// Further `ioctl`s of the thread of a vCPU that may migrate between shards: interrupts and all registers.
const SPAN_IOCTLS: &[u32] = &[
    0x4004_ae86, // KVM_INTERRUPT
    0x4018_aee1, // KVM_SET_DEVICE_ATTR, for the offset of the TSC
    0xae9a,      // KVM_NMI
    0x4090_ae82, // KVM_SET_REGS
    0x4138_ae84, // KVM_SET_SREGS
    0xc008_ae88, // KVM_GET_MSRS
    0x4008_ae89, // KVM_SET_MSRS
    0x9000_aea4, // KVM_GET_XSAVE
    0x5000_aea5, // KVM_SET_XSAVE
    0x8188_aea6, // KVM_GET_XCRS
    0x4188_aea7, // KVM_SET_XCRS
    0x8080_aea1, // KVM_GET_DEBUGREGS
    0x4080_aea2, // KVM_SET_DEBUGREGS
    0x8040_ae9f, // KVM_GET_VCPU_EVENTS
    0x4040_aea0, // KVM_SET_VCPU_EVENTS
];

/// KVM's `ioctl`s of the first thread while the VM is paused: they read the state of vCPUs, interrupt chips
/// and clock, and send non-maskable interrupts.
const PAUSED_IOCTLS: &[u32] = &[
    0xae9a,      // KVM_NMI
    0xc008_ae88, // KVM_GET_MSRS
    0xc008_ae91, // KVM_GET_CPUID2
    0x8400_ae8e, // KVM_GET_LAPIC
    0x9000_aea4, // KVM_GET_XSAVE
    0x8188_aea6, // KVM_GET_XCRS
    0x8080_aea1, // KVM_GET_DEBUGREGS
    0x8004_ae98, // KVM_GET_MP_STATE
    0x8040_ae9f, // KVM_GET_VCPU_EVENTS
    0xaea3,      // KVM_GET_TSC_KHZ
    0xaead,      // KVM_KVMCLOCK_CTRL
    0xc208_ae62, // KVM_GET_IRQCHIP
    0x8030_ae7c, // KVM_GET_CLOCK
];

/// Checks that this kernel supports seccomp filters.
pub fn supported() -> io::Result<()> {
    // SAFETY: asks whether an action is known; reads four bytes from a live variable.
    let answer = unsafe {
        let action = libc::SECCOMP_RET_KILL_PROCESS;
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &action)
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Makes `mremap` fail with `ENOMEM` in the calling thread and in all threads that it starts.
///
/// A shared mapping that grows would map later parts of its file without a descriptor of the file. The
/// allocator copies instead. This is a separate filter because a filter has one action; of two actions the
/// kernel takes the stricter.
pub fn refuse_remapping() -> io::Result<()> {
    let program = remapping().map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

fn remapping() -> Result<BpfProgram, seccompiler::BackendError> {
    SeccompFilter::new(
        BTreeMap::from([(libc::SYS_mremap, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOMEM as u32),
        TargetArch::x86_64,
    )?
    .try_into()
}

/// Seals the calling thread.
pub fn apply(kind: ThreadKind) -> io::Result<()> {
    let program = program(kind).map_err(io::Error::other)?;
    seccompiler::apply_filter(&program).map_err(io::Error::other)
}

/// Returns the calls of a kind of thread that are allowed with any arguments.
pub(super) fn calls(kind: ThreadKind) -> Vec<Syscall> {
    let mut calls: Vec<Syscall> = EVERY_THREAD.iter().chain(of_kind(kind)).copied().collect();
    // The first thread closes the disks at the end of the VM, when a qcow2 file writes its tables.
    if kind == ThreadKind::Control {
        calls.extend(crate::virtio::block::SYSCALLS);
    }
    calls
}

/// Returns the requests of a kind of thread by `ioctl`.
pub(super) fn requests(kind: ThreadKind) -> Vec<u64> {
    let kvm = |lists: &[&[u32]]| lists.concat().into_iter().map(u64::from).collect();
    match kind {
        ThreadKind::Vcpu => kvm(&[VCPU_IOCTLS]),
        ThreadKind::SpanVcpu => kvm(&[VCPU_IOCTLS, SPAN_IOCTLS]),
        // It resets the devices at the end of the VM, which unbinds their interrupts and addresses.
        ThreadKind::Control => kvm(&[VCPU_IOCTLS, PAUSED_IOCTLS]),
        ThreadKind::PageServer | ThreadKind::Pager => dsm::USERFAULT_SERVING.to_vec(),
        ThreadKind::Net => crate::virtio::net::REQUESTS.to_vec(),
        ThreadKind::Orders
        | ThreadKind::Link
        | ThreadKind::Pins
        | ThreadKind::Serial
        | ThreadKind::Block
        | ThreadKind::Relay
        | ThreadKind::Gateway
        | ThreadKind::Vsock
        | ThreadKind::Rng
        | ThreadKind::Balloon
        | ThreadKind::Pmem
        | ThreadKind::Fs
        | ThreadKind::Folder
        | ThreadKind::Sharing => Vec::new(),
    }
}

/// Returns the commands of a kind of thread by `fcntl`.
pub(super) fn commands(kind: ThreadKind) -> Vec<u64> {
    let more = match kind {
        ThreadKind::Control => FREEZE_FCNTL,
        ThreadKind::Folder => FOLDER_FCNTL,
        ThreadKind::Fs | ThreadKind::Sharing => crate::sharing::LEASE_COMMANDS,
        _ => &[],
    };
    // Commands are small and positive.
    EVERY_FCNTL
        .iter()
        .chain(more)
        .map(|&command| command as u64)
        .collect()
}

/// Returns the filter of a kind of thread of this process.
pub(super) fn program(kind: ThreadKind) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<Syscall, Vec<SeccompRule>> =
        calls(kind).into_iter().map(|call| (call, Vec::new())).collect();
    // Memory can't become executable.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let executable = libc::PROT_EXEC as u64;
        let writable = condition(2, SeccompCmpOp::MaskedEq(executable), 0)?;
        rules.insert(call, vec![SeccompRule::new(vec![writable])?]);
    }
    let mut allow = |call: Syscall, argument: u8, values: &[u64]| {
        let rules_of_call: Result<Vec<_>, _> = values
            .iter()
            .map(|&value| SeccompRule::new(vec![condition(argument, SeccompCmpOp::Eq, value)?]))
            .collect();
        rules_of_call.map(|rules_of_call| {
            // A call with no rule would be allowed with all arguments.
            if !rules_of_call.is_empty() {
                rules.insert(call, rules_of_call);
            }
        })
    };
    allow(libc::SYS_ioctl, 1, &requests(kind))?;
    allow(libc::SYS_fcntl, 1, &commands(kind))?;
    // Only a thread's name may be set.
    allow(libc::SYS_prctl, 0, &[libc::PR_SET_NAME as u64])?;
    // Signals may be sent to threads of this process only.
    allow(libc::SYS_tgkill, 0, &[std::process::id().into()])?;
    if kind == ThreadKind::Gateway {
        allow(libc::SYS_socket, 0, GATEWAY_FAMILIES)?;
    }
    if kind == ThreadKind::Control {
        allow(libc::SYS_socketpair, 0, &[libc::AF_UNIX as u64])?;
        rules.insert(libc::SYS_mbind, memory_policies()?);
    }
    if kind == ThreadKind::Gateway {
        rules.insert(libc::SYS_socketpair, vec![stream_pairs()?]);
    }
    SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?
    .try_into()
}

/// Returns the allowed calls of `socketpair` of the gateway: for streams. A datagram socket of a pair could
/// be connected to another program's address.
fn stream_pairs() -> Result<SeccompRule, seccompiler::BackendError> {
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    SeccompRule::new(vec![
        condition(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?,
        condition(1, SeccompCmpOp::Eq, kind as u64)?,
    ])
}

/// Returns the allowed calls of `mbind` ([`crate::memory::nodes`]): to bind guest memory, to move pages, and
/// to remove the binding. Without `MPOL_MF_MOVE_ALL` a thread moves no page that another process maps.
fn memory_policies() -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let calls = [
        (libc::MPOL_BIND, 0),
        (libc::MPOL_BIND, MPOL_MF_MOVE),
        (libc::MPOL_DEFAULT, 0),
    ];
    let rule = |(mode, flags): (libc::c_int, libc::c_int)| {
        SeccompRule::new(vec![
            condition(2, SeccompCmpOp::Eq, mode as u64)?,
            condition(5, SeccompCmpOp::Eq, flags as u64)?,
        ])
    };
    calls.into_iter().map(rule).collect()
}

fn condition(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

/// Returns the calls of a kind of thread beyond [`EVERY_THREAD`].
fn of_kind(kind: ThreadKind) -> &'static [Syscall] {
    match kind {
        ThreadKind::Control => &[
            libc::SYS_recvfrom,
            libc::SYS_recvmsg,
            libc::SYS_sendto,
            libc::SYS_sendmsg,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_shutdown,
            // Checks of the disks' bases.
            libc::SYS_fstat,
            libc::SYS_newfstatat,
            libc::SYS_statx,
            // A freeze turns memory and temporary overlays into files.
            libc::SYS_copy_file_range,
            libc::SYS_ftruncate,
            libc::SYS_lseek,
            libc::SYS_memfd_create,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            // Compares copies with their images.
            libc::SYS_preadv2,
        ],
        ThreadKind::Orders => crate::process::order_reader::SYSCALLS,
        ThreadKind::Vcpu => &[libc::SYS_eventfd2, libc::SYS_sendto],
        ThreadKind::SpanVcpu => &[
            libc::SYS_eventfd2,
            libc::SYS_sendto,
            // The thread's alarm.
            libc::SYS_timer_create,
            libc::SYS_timer_settime,
            libc::SYS_timer_delete,
        ],
        ThreadKind::Link | ThreadKind::Pins => &[],
        ThreadKind::PageServer => &[
            libc::SYS_recvmsg,
            libc::SYS_sendmsg,
            // Removes a page from memory.
            libc::SYS_fallocate,
        ],
        ThreadKind::Serial => &[
            libc::SYS_recvfrom,
            libc::SYS_sendto,
            libc::SYS_readv,
            libc::SYS_writev,
        ],
        ThreadKind::Block => crate::virtio::block::SYSCALLS,
        ThreadKind::Net => crate::virtio::net::SYSCALLS,
        ThreadKind::Relay => crate::card::SYSCALLS,
        ThreadKind::Gateway => GATEWAY,
        ThreadKind::Vsock => crate::virtio::vsock::SYSCALLS,
        ThreadKind::Rng => crate::virtio::rng::SYSCALLS,
        ThreadKind::Balloon => crate::virtio::balloon::SYSCALLS,
        ThreadKind::Pmem => crate::virtio::pmem::SYSCALLS,
        ThreadKind::Fs => crate::virtio::fs::SYSCALLS,
        ThreadKind::Folder => crate::folder::SYSCALLS,
        ThreadKind::Sharing => crate::sharing::SYSCALLS,
        ThreadKind::Pager => crate::paging::SYSCALLS,
    }
}
