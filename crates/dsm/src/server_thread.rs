//! The thread that serves a part of a node's pages: its CPU, its priority, its timers.

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Above every ordinary thread, so that a page is served before who spins for it; below the kernel's own.
const PRIORITY: libc::c_int = 10;

/// Sets up this thread: on that CPU alone if one is named, at real-time priority if asked for. Returns what this host does not permit of it.
pub fn prepare_server_thread(cpu: Option<usize>, realtime: bool) -> Option<String> {
    // SAFETY: a number for this thread alone: its timers come as exactly as they can.
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
                "real-time priority is refused ({error}): a busy host serves faults late; run as root or raise RLIMIT_RTPRIO"
            ));
        }
    }
    None
}
