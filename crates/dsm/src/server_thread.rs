//! Thread of a page server: its CPU, priority and timers.

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Real-time priority: above every ordinary thread, so that a page is served before a thread that spins for
/// it; below the kernel's own.
const PRIORITY: libc::c_int = 10;

/// Prepares this thread: pins it to a CPU if one is named, and sets real-time priority if asked. Returns what
/// this host does not permit.
pub fn prepare_server_thread(cpu: Option<usize>, realtime: bool) -> Option<String> {
    // SAFETY: a number for this thread alone, with which its timers are as exact as they can be.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    if let Some(cpu) = cpu {
        let mut set = CpuSet::new();
        let pinned = set
            .set(cpu)
            .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
        if let Err(error) = pinned {
            return Some(format!("the lanes can't be kept on CPU {cpu}: {error}"));
        }
    }
    if realtime {
        let parameters = libc::sched_param {
            sched_priority: PRIORITY,
        };
        // SAFETY: this thread's own priority.
        if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameters) } != 0 {
            let error = std::io::Error::last_os_error();
            return Some(format!(
                "real-time priority is refused ({error}): a busy host serves faults late; run as root or \
                 raise RLIMIT_RTPRIO"
            ));
        }
    }
    None
}
