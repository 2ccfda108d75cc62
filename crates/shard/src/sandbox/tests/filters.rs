//! Tests of the system call filters of each kind of thread.

use page::PAGE_LEN;

use super::*;
use crate::memory::nodes::MPOL_MF_MOVE;

/// Flags of `mbind` that no thread may use (linux/mempolicy.h).
const MPOL_MF_STRICT: libc::c_int = 1;
const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;

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
        assert!(was_ended(status), "{kind:?}: {status:?}");
    }
}

#[test]
fn calls_filtered_by_arguments_are_in_no_list_of_calls() {
    for kind in KINDS {
        let calls = filter::calls(kind);
        // The gateway's sockets are of IPv4 and IPv6 only; the translator decides on their destinations.
        let connects = |call| kind == ThreadKind::Gateway && call == libc::SYS_connect;
        let mut others = calls.iter().filter(|call| !connects(**call));
        assert!(others.all(|call| !filter::FILTERED.contains(call)), "{kind:?}");
    }
}

#[test]
fn memory_policy_is_for_the_first_thread_which_binds_and_moves_its_own_pages_only() {
    let call = |mode: libc::c_int, flags: libc::c_int| {
        move || {
            // SAFETY: an empty range, so nothing is done.
            unsafe { libc::syscall(libc::SYS_mbind, 0, 0, mode, 0, 0, flags) };
        }
    };
    let status = |kind, call: &dyn Fn()| {
        in_child(|| {
            if filter::apply(kind).is_err() {
                return 1;
            }
            call();
            0
        })
    };
    let (bind, interleave) = (libc::MPOL_BIND, libc::MPOL_INTERLEAVE);
    for (mode, flags) in [(bind, 0), (bind, MPOL_MF_MOVE), (libc::MPOL_DEFAULT, 0)] {
        let passed = status(ThreadKind::Control, &call(mode, flags));
        assert_eq!(code(passed), 0, "{mode} {flags}");
    }
    for (mode, flags) in [
        (interleave, 0),
        (bind, MPOL_MF_MOVE_ALL),
        (bind, MPOL_MF_MOVE | MPOL_MF_STRICT),
        (libc::MPOL_DEFAULT, MPOL_MF_MOVE),
    ] {
        let ended = status(ThreadKind::Control, &call(mode, flags));
        assert!(was_ended(ended), "{mode} {flags}: {ended:?}");
    }
    for kind in KINDS.into_iter().filter(|kind| *kind != ThreadKind::Control) {
        let ended = status(kind, &call(bind, 0));
        assert!(was_ended(ended), "{kind:?}: {ended:?}");
    }
}

#[test]
fn requests_and_commands_of_the_list_pass_and_those_of_other_threads_end_the_process() {
    let every: Vec<u64> = KINDS.iter().flat_map(|&kind| filter::requests(kind)).collect();
    for kind in KINDS {
        let (requests, commands) = (filter::requests(kind), filter::commands(kind));
        let passed = in_child(|| {
            if filter::apply(kind).is_err() {
                return 1;
            }
            let calls = requests.iter().map(|request| (libc::SYS_ioctl, request));
            for (call, value) in calls.chain(commands.iter().map(|command| (libc::SYS_fcntl, command))) {
                // SAFETY: there is no such file, so nothing is done.
                unsafe { libc::syscall(call, -1, *value, 0) };
            }
            0
        });
        assert_eq!(code(passed), 0, "{kind:?}");
        for other in every.iter().filter(|request| !requests.contains(request)) {
            let status = in_child(|| {
                if filter::apply(kind).is_err() {
                    return 1;
                }
                // SAFETY: as above; the filter is expected to end the process here.
                unsafe { libc::syscall(libc::SYS_ioctl, -1, *other, 0) };
                0
            });
            assert!(was_ended(status), "{kind:?} {other:#x}: {status:?}");
        }
    }
}

/// A whole process with a closed sandbox, in which a thread of each kind makes calls that its code never
/// makes.
#[test]
fn compromised_shard_can_make_no_forbidden_call_by_any_of_its_threads() {
    for kind in KINDS {
        let status = in_child(|| {
            let Some(closed) = closed(SandboxLaunch::default()) else {
                return 254;
            };
            for (number, (name, call, arguments)) in (1..).zip(ATTACKS) {
                let tried = in_child(|| {
                    let (call, [first, second, third]) = (*call, *arguments);
                    let thread = closed.threads.spawn(kind, "taken", move || {
                        // SAFETY: none of them can do anything: there is no such file, process, or memory.
                        // The filter should end the process here.
                        unsafe { libc::syscall(call, first, second, third, 0, 0, 0) };
                    });
                    i32::from(thread.is_ok_and(|thread| thread.join().is_ok()))
                });
                if was_ended(tried) == is_needed(kind, name) {
                    return number;
                }
            }
            0
        });
        let failed = code(status);
        let name = usize::try_from(failed - 1)
            .ok()
            .and_then(|place| ATTACKS.get(place));
        assert_eq!(failed, 0, "{kind:?}: {name:?}");
    }
}

#[test]
fn gateway_makes_pairs_of_streams() {
    let status = in_child(|| {
        if filter::apply(ThreadKind::Gateway).is_err() {
            return 1;
        }
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let mut pair = [-1; 2];
        // SAFETY: the kernel writes two descriptors into the array.
        let made = unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) };
        i32::from(made != 0)
    });
    assert_eq!(code(status), 0);
}

#[test]
fn mappings_never_grow_and_the_allocator_works_without_growth() {
    for kind in KINDS {
        let status = in_child(|| {
            if filter::refuse_remapping().is_err() || filter::apply(kind).is_err() {
                return 1;
            }
            // SAFETY: fresh anonymous memory, shared as a lane's is; nothing else uses it.
            let refused = unsafe {
                let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
                let mapped = libc::mmap(std::ptr::null_mut(), PAGE_LEN, libc::PROT_READ, flags, -1, 0);
                // Growing the mapping, and doubling it.
                [PAGE_LEN, 0].iter().all(|&old| {
                    let moved = libc::mremap(mapped, old, 4 * PAGE_LEN, libc::MREMAP_MAYMOVE);
                    moved == libc::MAP_FAILED
                        && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
                })
            };
            if !refused {
                return 2;
            }
            // Large enough to be separate mappings, which glibc moves by mremap.
            let mut bytes = vec![7_u8; 1 << 20];
            for _ in 0..4 {
                bytes.reserve_exact(bytes.len());
                bytes.resize(bytes.len() * 2, 7);
            }
            i32::from(bytes.iter().any(|&byte| byte != 7)) * 3
        });
        assert_eq!(code(status), 0, "{kind:?}");
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
    assert!(was_ended(status), "{status:?}");
}
