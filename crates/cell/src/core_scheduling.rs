//! Core scheduling: no two hardware threads of one core run tasks of different cookies at once, so that a
//! VM's siblings on a core are its own threads, or idle.
//!
//! Each shard gets a cookie of its own. Its passt and frame filters keep that of the host's other processes:
//! they run no code of the guest's.

use std::io;

use libc::{PR_SCHED_CORE, PR_SCHED_CORE_CREATE, PR_SCHED_CORE_GET};
use libc::{PR_SCHED_CORE_SCOPE_THREAD, PR_SCHED_CORE_SCOPE_THREAD_GROUP};

/// The reason why a VM can't have cores of its own.
#[derive(Debug, thiserror::Error)]
pub enum CoreSchedulingError {
    /// `ENODEV`: no CPUs share a core.
    #[error(
        "core_scheduling: no two CPUs of this host share a core, so there is nothing to keep apart \
         (hyper-threading is off); help: leave core_scheduling out"
    )]
    NoSiblings,
    /// `EINVAL`: the kernel lacks core scheduling.
    #[error(
        "core_scheduling: this host's kernel has no core scheduling; help: boot Linux 5.14 or later with \
         CONFIG_SCHED_CORE, or turn hyper-threading off (`nosmt`) and leave core_scheduling out"
    )]
    NotInKernel,
    /// Another error of the kernel.
    #[error(
        "core_scheduling: the kernel refuses a cookie for the VM's process: {0}; help: run as root, or leave \
         core_scheduling out"
    )]
    Refused(io::Error),
    /// The VM spans hosts.
    #[error(
        "core_scheduling: the VM spans cells of other hosts, whose shards get no cookie; help: name cells of \
         this host, or leave core_scheduling out"
    )]
    OtherHosts,
}

/// An operation of the kernel's core scheduling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    /// Makes a cookie for all threads of a process.
    Create,
    /// Reads the cookie of a thread.
    Get,
}

/// Gives a process, and all that it starts from now on, a cookie that no other has; returns it.
///
/// # Errors
/// If the kernel or the host can't.
pub fn isolate(pid: i32) -> Result<u64, CoreSchedulingError> {
    isolate_by(pid, ask_kernel)
}

fn isolate_by(
    pid: i32,
    mut ask: impl FnMut(Operation, i32) -> io::Result<u64>,
) -> Result<u64, CoreSchedulingError> {
    ask(Operation::Create, pid).map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV) => CoreSchedulingError::NoSiblings,
        Some(libc::EINVAL) => CoreSchedulingError::NotInKernel,
        _ => CoreSchedulingError::Refused(error),
    })?;
    let cookie = ask(Operation::Get, pid).map_err(CoreSchedulingError::Refused)?;
    if cookie == 0 {
        // Zero is the cookie of all processes without one of their own.
        return Err(CoreSchedulingError::Refused(io::Error::other("it made none")));
    }
    Ok(cookie)
}

fn ask_kernel(operation: Operation, pid: i32) -> io::Result<u64> {
    let mut cookie = 0_u64;
    // SAFETY: the kernel writes to `cookie` alone, and only for the operation that reads it.
    let result = unsafe {
        match operation {
            Operation::Create => libc::prctl(
                PR_SCHED_CORE,
                PR_SCHED_CORE_CREATE,
                pid,
                PR_SCHED_CORE_SCOPE_THREAD_GROUP,
                0_usize,
            ),
            Operation::Get => libc::prctl(
                PR_SCHED_CORE,
                PR_SCHED_CORE_GET,
                pid,
                PR_SCHED_CORE_SCOPE_THREAD,
                &raw mut cookie,
            ),
        }
    };
    if result == 0 {
        Ok(cookie)
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: i32 = 4711;

    /// The result of a VM's start with these answers of the kernel, and the operations that it received.
    fn isolated(
        create: Result<u64, i32>,
        get: Result<u64, i32>,
    ) -> (Result<u64, CoreSchedulingError>, Vec<(Operation, i32)>) {
        let mut asked = Vec::new();
        let result = isolate_by(PID, |operation, pid| {
            asked.push((operation, pid));
            let answer = match operation {
                Operation::Create => create,
                Operation::Get => get,
            };
            answer.map_err(io::Error::from_raw_os_error)
        });
        (result, asked)
    }

    #[test]
    fn a_cookie_is_made_for_the_process_and_read_back() {
        let (cookie, asked) = isolated(Ok(0), Ok(0x1234));
        assert_eq!(cookie.unwrap(), 0x1234);
        assert_eq!(asked, [(Operation::Create, PID), (Operation::Get, PID)]);
    }

    #[test]
    fn a_vm_without_a_cookie_does_not_start_and_one_line_names_the_help() {
        for (create, get, why) in [
            (Err(libc::ENODEV), Ok(0), "help: leave core_scheduling out"),
            (Err(libc::EINVAL), Ok(0), "CONFIG_SCHED_CORE"),
            (Err(libc::EPERM), Ok(0), "Operation not permitted"),
            (Ok(0), Err(libc::ESRCH), "No such process"),
            (Ok(0), Ok(0), "it made none"),
        ] {
            let error = isolated(create, get).0.unwrap_err().to_string();
            assert!(
                error.starts_with("core_scheduling: ") && error.contains(why),
                "{error}"
            );
            assert!(error.contains("help: ") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn this_kernel_gives_two_processes_two_cookies_or_says_why_not() {
        let mut children = [(); 2].map(|()| std::process::Command::new("sleep").arg("100").spawn().unwrap());
        let cookies = children.each_ref().map(|child| isolate(child.id().cast_signed()));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        match cookies {
            [Ok(first), Ok(second)] => assert_ne!(first, second),
            [Err(first), Err(second)] => {
                assert_eq!(first.to_string(), second.to_string());
                assert!(
                    matches!(
                        first,
                        CoreSchedulingError::NoSiblings | CoreSchedulingError::NotInKernel
                    ),
                    "{first}"
                );
                eprintln!("left out: {first}");
            }
            other => panic!("{other:?}"),
        }
    }
}
