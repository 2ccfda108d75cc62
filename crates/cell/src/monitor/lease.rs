//! The lease of a monitor: the socket to the client that started it, of which each successor of the monitor
//! has a copy.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::socket::{MsgFlags, recv, send};
use registry::monitor::{Event, LeaseOrder};

use crate::handle::VmHandle;

/// Maximum length of the order to detach, in bytes.
const DETACH_BYTES_MAX: usize = 64;
/// Number and interval of reads for the rest of an order that has arrived in part.
const DETACH_POLLS_MAX: u32 = 1000;
const DETACH_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The socket, for several threads.
pub(super) type Lease = Arc<Mutex<UnixStream>>;

/// Reads the first line, and no byte behind it: each successor finds there what the client sends later.
pub(super) fn first_line(mut lease: &UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    let mut chunk = [0; 4096];
    while line.last() != Some(&b'\n') {
        let count = match recv(lease.as_raw_fd(), &mut chunk, MsgFlags::MSG_PEEK) {
            Err(Errno::EINTR) => continue,
            count => count?,
        };
        let end = chunk[..count].iter().position(|byte| *byte == b'\n');
        let count = end.map_or(count, |end| end + 1);
        if count == 0 {
            break;
        }
        lease.read_exact(&mut chunk[..count])?;
        line.extend_from_slice(&chunk[..count]);
    }
    String::from_utf8(line).map_err(io::Error::other)
}

/// The descriptor that [`note_termination`] writes to.
static ASKED: AtomicI32 = AtomicI32::new(-1);

/// Handles the signal that orders this process to end.
extern "C" fn note_termination(_: libc::c_int) {
    let one = 1_u64;
    // SAFETY: a signal's handler may call write, which reads eight bytes of ours, and keeps the errno of the
    // thread that it interrupts.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(
            ASKED.load(Ordering::Relaxed),
            (&raw const one).cast(),
            size_of::<u64>(),
        );
        *errno = before;
    }
}

/// A descriptor that is readable once this process was ordered to end (SIGTERM). The signal is not blocked,
/// since the processes that this one starts would inherit that.
fn termination() -> io::Result<OwnedFd> {
    let asked = OwnedFd::from(EventFd::from_flags(
        EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK,
    )?);
    let watched = asked.try_clone()?;
    // The handler may write as long as this process runs.
    ASKED.store(asked.into_raw_fd(), Ordering::Relaxed);
    let handler = SigHandler::Handler(note_termination);
    let action = SigAction::new(handler, SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing that a signal's handler may not do.
    unsafe { sigaction(Signal::SIGTERM, &action)? };
    Ok(watched)
}

/// Starts a thread that ends the VM when its client is gone without detaching, or when this process is
/// ordered to end.
pub(super) fn hold(lease: &Lease, handle: VmHandle) -> io::Result<()> {
    hold_until(lease, handle, Until::Asked(termination()?))
}

/// The same in a process that has other VMs, which outlive this one. An order to end is not this VM's.
pub(super) fn hold_one(lease: &Lease, handle: VmHandle) -> io::Result<()> {
    let over = handle.over_event()?;
    hold_until(lease, handle, Until::Over(over))
}

/// The second event of a wait, beside the end of the client.
enum Until<T = OwnedFd> {
    /// This process was ordered to end.
    Asked(T),
    /// The VM has ended, or its client has detached.
    Over(T),
}

fn hold_until(lease: &Lease, handle: VmHandle, until: Until) -> io::Result<()> {
    let lease = lease.lock().unwrap_or_else(PoisonError::into_inner).try_clone()?;
    let hold = move || {
        // If the kernel refuses to wait, there is no other way to end the VM with its client.
        if wait(&lease, &until) != Ok(Over::Lease) {
            handle.kill();
        }
    };
    std::thread::Builder::new()
        .name("lease".into())
        .spawn(hold)
        .map(drop)
}

/// The end of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    /// The VM is to end.
    Vms,
    /// There is no client to wait for any more, or no VM.
    Lease,
}

/// Waits for the end of a client that has not detached, or for the event `until`. The client's messages stay
/// in the socket, for each successor of this process.
fn wait(lease: &UnixStream, until: &Until<impl AsFd>) -> nix::Result<Over> {
    let (Until::Asked(event) | Until::Over(event)) = until;
    let (mut is_detached, mut partial_polls) = (false, 0);
    loop {
        let mut files = vec![PollFd::new(event.as_fd(), PollFlags::POLLIN)];
        if !is_detached {
            files.push(PollFd::new(lease.as_fd(), PollFlags::POLLIN));
        } else if let Until::Over(_) = until {
            return Ok(Over::Lease);
        }
        match poll(&mut files, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            other => other.map(drop)?,
        }
        if files[0].any().unwrap_or(true) {
            return Ok(match until {
                Until::Asked(_) => Over::Vms,
                Until::Over(_) => Over::Lease,
            });
        }
        match word(lease) {
            Word::Detach => is_detached = true,
            Word::None => return Ok(Over::Vms),
            Word::Partial if partial_polls == DETACH_POLLS_MAX => return Ok(Over::Vms),
            Word::Partial => {
                partial_polls += 1;
                std::thread::sleep(DETACH_POLL_INTERVAL);
            }
        }
    }
}

/// The message of a client on its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// The VMs outlive the client.
    Detach,
    /// The beginning of an order. The rest is on its way, or the client is gone.
    Partial,
    /// No message, and the client is gone; or a message that is no order.
    None,
}

/// The message of the client on a lease that is readable.
fn word(lease: &UnixStream) -> Word {
    let mut line = [0; DETACH_BYTES_MAX];
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let count = recv(lease.as_raw_fd(), &mut line, flags).unwrap_or(0);
    match serde_json::from_slice(&line[..count]) {
        Ok(LeaseOrder::Detach) => Word::Detach,
        Err(_) if count == 0 || count == line.len() || line[..count].contains(&b'\n') => Word::None,
        Err(_) => Word::Partial,
    }
}

/// Reports to the client.
pub(super) fn tell(lease: &Lease, event: &Event) {
    let Some(line) = line(event) else { return };
    // A command that has gone needs no report.
    let _ = lease
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .write_all(&line);
}

/// Reports to the client, unless the socket has no room for the whole report.
pub(super) fn try_tell(lease: &Lease, event: &Event) {
    let Some(line) = line(event) else { return };
    let lease = lease.lock().unwrap_or_else(PoisonError::into_inner);
    // The kernel takes all of a short message or nothing of it.
    let _ = send(
        lease.as_raw_fd(),
        &line,
        MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL,
    );
}

fn line(event: &Event) -> Option<Vec<u8>> {
    let mut line = serde_json::to_vec(event).ok()?;
    line.push(b'\n');
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the VMs of this lease are to end within a moment.
    fn ends(lease: &UnixStream) -> bool {
        // This process is never ordered to end.
        let (_asks, signals) = UnixStream::pair().unwrap();
        let lease = lease.try_clone().unwrap();
        let waiting = std::thread::spawn(move || wait(&lease, &Until::Asked(signals)));
        std::thread::sleep(Duration::from_millis(100));
        waiting.is_finished()
    }

    #[test]
    fn client_that_has_detached_is_known_to_each_successor_and_one_that_is_gone_too() {
        let (mut client, lease) = UnixStream::pair().unwrap();
        let batch = "x".repeat(10_000);
        client.write_all(format!("{batch}\n").as_bytes()).unwrap();
        assert_eq!(first_line(&lease).unwrap(), format!("{batch}\n"));
        assert!(!ends(&lease), "the client is there");
        let mut order = serde_json::to_vec(&LeaseOrder::Detach).unwrap();
        order.push(b'\n');
        client.write_all(&order).unwrap();
        assert!(!ends(&lease) && !ends(&lease));
        drop(client);
        assert!(!ends(&lease), "it detached before it went");

        let (client, lease) = UnixStream::pair().unwrap();
        drop(client);
        assert!(ends(&lease));
        let (mut client, lease) = UnixStream::pair().unwrap();
        client.write_all(b"\"stay\"\n").unwrap();
        assert!(ends(&lease), "it says something else");
    }

    #[test]
    fn order_to_detach_may_come_in_parts() {
        let (mut client, lease) = UnixStream::pair().unwrap();
        client.write_all(b"\"det").unwrap();
        assert_eq!(word(&lease), Word::Partial);
        assert!(!ends(&lease));
        client.write_all(b"ach\"\n").unwrap();
        assert_eq!(word(&lease), Word::Detach);
    }

    #[test]
    fn monitor_that_receives_sigterm_ends_its_vm_though_the_client_has_detached() {
        let (_client, lease) = UnixStream::pair().unwrap();
        let (mut asks, signals) = UnixStream::pair().unwrap();
        let waiting = std::thread::spawn(move || wait(&lease, &Until::Asked(signals)));
        asks.write_all(b"x").unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(Over::Vms));
    }

    #[test]
    fn wait_of_a_process_with_other_vms_is_over_when_the_client_detaches_or_is_gone_or_the_vm_has_ended() {
        let handle = VmHandle::default();
        let over = handle.over_event().unwrap();
        let until = || Until::Over(over.try_clone().unwrap());
        let wait = |lease| {
            let until = until();
            std::thread::spawn(move || wait(&lease, &until))
        };
        let (mut client, lease) = UnixStream::pair().unwrap();
        let waiting = wait(lease);
        client.write_all(b"\"detach\"\n").unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(Over::Lease));
        let (client, lease) = UnixStream::pair().unwrap();
        let waiting = wait(lease);
        drop(client);
        assert_eq!(waiting.join().unwrap(), Ok(Over::Vms));
        let (_client, lease) = UnixStream::pair().unwrap();
        let waiting = wait(lease);
        handle.over();
        assert_eq!(waiting.join().unwrap(), Ok(Over::Lease));
    }
}
