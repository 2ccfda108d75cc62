//! Parts of a remote page access, measured by themselves: a fault that is served at once, and a request for 4
//! KiB over a stream.

pub mod memory;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, Ordering};

use coherence::Right;
use dsm::{
    FRAME_BYTES, FaultDelivery, PAGE_FRAME_BYTES, Region, RegionError, RegionOptions, now_ns,
    prepare_server_thread, touch, with_fault_server,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use urpc::poll::PollTime;

/// Cost of a sleep for a thread that polls first, nanoseconds (as in the page server).
const SLEEP_NS: u64 = 25_000;
/// Time after which a reply is missing, milliseconds.
const REPLY_TIMEOUT_MS: u16 = 20_000;

/// Thread that answers a fault in the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultResponder {
    /// A thread on the same CPU, which sleeps until then.
    SameCpu,
    /// A thread on another CPU, which sleeps until then.
    OtherCpu(usize),
    /// A thread on another CPU, which polls.
    OtherCpuPolling(usize),
    /// The faulting thread itself, in a signal handler.
    Itself,
}

/// Measures `count` faults. Returns the time of each, nanoseconds.
///
/// # Errors
/// If there is no userfaultfd.
pub fn faults_ns(count: u32, answers: FaultResponder, realtime: bool) -> Result<Vec<u64>, RegionError> {
    let delivery = if answers == FaultResponder::Itself {
        FaultDelivery::Thread
    } else {
        FaultDelivery::Reader
    };
    let options = RegionOptions {
        delivery,
        ..RegionOptions::default()
    };
    let region = Region::with(count, 1, None, options)?;
    // The contents are there: only the fault is measured.
    (0..region.pages()).for_each(|page| region.clear(page));
    let touch_all = || -> Vec<u64> {
        let timed = |page| {
            let before = now_ns();
            touch(&region, page);
            now_ns() - before
        };
        (0..region.pages()).map(timed).collect()
    };
    Ok(std::thread::scope(|scope| {
        let region = &region;
        let measured = scope.spawn(move || match answers {
            FaultResponder::SameCpu => {
                prepare_server_thread(None, realtime);
                with_fault_server(region, false, || {
                    drop_realtime();
                    touch_all()
                })
            }
            FaultResponder::OtherCpu(cpu) | FaultResponder::OtherCpuPolling(cpu) => {
                let polls = matches!(answers, FaultResponder::OtherCpuPolling(_));
                let here = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).ok();
                prepare_server_thread(Some(cpu), false);
                with_fault_server(region, polls, || {
                    if let Some(here) = here {
                        let _ = nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &here);
                    }
                    touch_all()
                })
            }
            FaultResponder::Itself => with_signal_handler(region, touch_all),
        });
        measured
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }))
}

/// Gives up real-time priority, which threads inherit.
fn drop_realtime() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: this thread's own priority.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &parameters) };
}

/// Region whose faults the signal handler serves.
static SIGNALLED: AtomicPtr<Region> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn answer_signal(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: set while `with_signal_handler` runs, which keeps the region; only system calls are made here.
    let region = unsafe { SIGNALLED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the kernel's information about a SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let answered = region
        .and_then(|region| {
            region
                .page_at(address)
                .map(|page| region.open(page, Right::Write))
        })
        .is_some_and(|result| result.is_ok());
    if !answered {
        // SAFETY: no thread can continue.
        unsafe { libc::abort() };
    }
}

/// Runs `work` while faults in the region are served on the faulting thread.
fn with_signal_handler<T>(region: &Region, work: impl FnOnce() -> T) -> T {
    SIGNALLED.store(std::ptr::from_ref(region).cast_mut(), Ordering::Release);
    // SAFETY: a zeroed action is a default one; the handler makes system calls only, and the old one is
    // restored.
    let old = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = answer_signal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, &action, &mut old);
        old
    };
    let result = work();
    // SAFETY: the old action.
    unsafe { libc::sigaction(libc::SIGBUS, &old, std::ptr::null_mut()) };
    SIGNALLED.store(std::ptr::null_mut(), Ordering::Release);
    result
}

/// How the two ends of a stream wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum WaitMode {
    /// Poll before sleeping, as page servers do.
    Polling,
    /// Sleep in the system call, without polling first.
    Sleeping,
}

/// Replies to `count` requests with a page each.
///
/// # Errors
/// If the connection is closed.
pub fn answer_requests(stream: &OwnedFd, count: u32, waits: WaitMode) -> io::Result<()> {
    let mut poll_time = PollTime::new(SLEEP_NS);
    let (mut request, page) = ([0; FRAME_BYTES], [7; PAGE_FRAME_BYTES]);
    for _ in 0..count {
        receive(stream, &mut request, waits, &mut poll_time)?;
        send(stream, &page)?;
    }
    Ok(())
}

/// Sends `count` requests for a page. Returns the time of each, nanoseconds.
///
/// # Errors
/// If the connection is closed.
pub fn requests_ns(stream: &OwnedFd, count: u32, waits: WaitMode) -> io::Result<Vec<u64>> {
    let mut poll_time = PollTime::new(SLEEP_NS);
    let (request, mut page) = ([1; FRAME_BYTES], [0; PAGE_FRAME_BYTES]);
    (0..count)
        .map(|_| {
            let before = now_ns();
            send(stream, &request)?;
            receive(stream, &mut page, waits, &mut poll_time)?;
            Ok(now_ns() - before)
        })
        .collect()
}

fn send(stream: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: pointer and length are those of a live slice. A page fits any socket's buffer, so it is sent
    // whole.
    let count = unsafe {
        libc::send(
            stream.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            libc::MSG_NOSIGNAL,
        )
    };
    match count {
        count if count == bytes.len().cast_signed() => Ok(()),
        0.. => Err(io::ErrorKind::WriteZero.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn receive(stream: &OwnedFd, bytes: &mut [u8], waits: WaitMode, poll_time: &mut PollTime) -> io::Result<()> {
    let mut came = 0;
    let since = now_ns();
    let mut blocked = false;
    while came < bytes.len() {
        let rest = &mut bytes[came..];
        // SAFETY: pointer and length are those of a live slice that no other code uses.
        let count = unsafe {
            libc::recv(
                stream.as_raw_fd(),
                rest.as_mut_ptr().cast(),
                rest.len(),
                libc::MSG_DONTWAIT,
            )
        };
        match count {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            1.. => came += count as usize,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::WouldBlock {
                    return Err(error);
                }
                if waits == WaitMode::Sleeping || now_ns() - since > poll_time.poll_ns() {
                    let mut wait = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
                    if poll(&mut wait, PollTimeout::from(REPLY_TIMEOUT_MS)) == Ok(0) {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    blocked = true;
                }
            }
        }
    }
    poll_time.waited(now_ns() - since, blocked);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn faults_are_served_by_a_thread_and_by_a_signal_handler() {
        for answers in [FaultResponder::SameCpu, FaultResponder::Itself] {
            let times = faults_ns(64, answers, false).unwrap();
            assert!(
                times.len() >= 64 && times.iter().all(|time| *time > 100),
                "{answers:?} {times:?}"
            );
        }
    }

    #[test]
    fn every_request_gets_its_page_by_a_stream() {
        for waits in [WaitMode::Polling, WaitMode::Sleeping] {
            let (near, far) = UnixStream::pair().unwrap();
            let answering = std::thread::spawn(move || answer_requests(&far.into(), 50, waits));
            assert_eq!(requests_ns(&near.into(), 50, waits).unwrap().len(), 50);
            answering.join().unwrap().unwrap();
        }
    }
}
