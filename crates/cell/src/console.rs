//! A VM's serial console: the last bytes are kept, and each listener reads them at its own speed.
//!
//! A flooding guest costs bounded memory. A listener that is too slow misses bytes and receives their number;
//! it never delays the guest or another listener.

mod ring;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use locks::IgnorePoison;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use registry::console::{ATTACH, JOIN, LOG};

use self::ring::Ring;
use crate::socket::Served;

/// Number of past bytes that a new listener receives.
const CONTEXT_BYTES: u64 = 16 << 10;
/// Maximum number of bytes that are sent to a listener at once.
const CHUNK_BYTES: u64 = 16 << 10;
/// Time after which a listener that does not read is dropped.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two checks whether a listener that waits for bytes has gone.
const GONE_INTERVAL: Duration = Duration::from_secs(1);

/// The console. Cheap to clone; all clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Console(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The kept bytes; none before the first, and on a host that has no file for them.
    ring: Option<Ring>,
    /// Whether the VM has ended: no further byte comes.
    closed: bool,
    /// The socket for the guest's input, while it runs.
    input: Option<UnixStream>,
}

impl State {
    fn total(&self) -> u64 {
        self.ring.as_ref().map_or(0, Ring::total)
    }

    /// The bytes from number `from` on, `most` at most, and the number of lost bytes before them.
    fn after(&self, from: u64, most: u64) -> (Vec<u8>, u64) {
        self.ring
            .as_ref()
            .map_or_else(Default::default, |ring| ring.after(from, most))
    }
}

impl Console {
    /// Takes output of the guest.
    pub fn output(&self, bytes: &[u8]) {
        let mut state = self.state();
        if state.ring.is_none() {
            state.ring = Ring::new().ok();
        }
        if let Some(ring) = &mut state.ring {
            ring.add(bytes);
        }
        self.0.more.notify_all();
    }

    /// The file of the kept bytes, for a successor of this process.
    ///
    /// # Errors
    /// If the host has no files left.
    pub fn kept(&self) -> io::Result<OwnedFd> {
        let mut state = self.state();
        let ring = match state.ring.take() {
            Some(ring) => ring,
            None => Ring::new()?,
        };
        state.ring.insert(ring).as_fd().try_clone_to_owned()
    }

    /// Takes over the bytes that a predecessor kept.
    ///
    /// # Errors
    /// If the file is not that of a console.
    pub fn adopt(&self, kept: OwnedFd) -> io::Result<()> {
        self.state().ring = Some(Ring::adopt(kept)?);
        Ok(())
    }

    /// Connects the console to the guest's input; `None` when the guest is gone.
    pub fn set_input(&self, input: Option<UnixStream>) {
        self.state().input = input;
    }

    /// Closes the console: listeners receive the rest and are dropped.
    pub fn close(&self) {
        self.state().closed = true;
        self.0.more.notify_all();
    }

    /// Serves listeners on `listener` until the result is dropped.
    ///
    /// # Errors
    /// If the host has no threads or descriptors left.
    pub(crate) fn serve(&self, listener: UnixListener) -> io::Result<Served> {
        let console = self.clone();
        Served::begin(listener, ("console", "listener"), move |client| {
            console.listener(client);
        })
    }

    /// The last lines, made safe to print: without control characters but tabs.
    pub fn last_lines(&self, count: usize) -> Vec<String> {
        let lines = self.lines();
        lines[lines.len().saturating_sub(count)..].to_vec()
    }

    /// `count` lines from the last one with `text` on, or the last ones when no line has it.
    pub fn lines_from(&self, text: &str, count: usize) -> Vec<String> {
        let lines = self.lines();
        let start = lines.iter().rposition(|line| line.contains(text));
        let start = start.unwrap_or(lines.len().saturating_sub(count));
        lines[start..].iter().take(count).cloned().collect()
    }

    fn lines(&self) -> Vec<String> {
        let (bytes, _) = self.state().after(0, u64::MAX);
        let printable = |line: &str| {
            line.chars()
                .filter(|&c| c == '\t' || !c.is_control())
                .collect::<String>()
        };
        let text = String::from_utf8_lossy(&bytes);
        text.lines()
            .map(printable)
            .filter(|line| !line.trim().is_empty())
            .collect()
    }

    fn listener(&self, mut client: UnixStream) {
        let mut mode = [0];
        let asked = client
            .set_read_timeout(Some(READ_TIMEOUT))
            .and_then(|()| client.read_exact(&mut mode));
        if asked.is_err() || client.set_write_timeout(Some(READ_TIMEOUT)).is_err() {
            return;
        }
        let from = match mode[0] {
            ATTACH => self.state().total().saturating_sub(CONTEXT_BYTES),
            JOIN => self.state().total(),
            _ => 0,
        };
        if matches!(mode[0], ATTACH | JOIN)
            && let Ok(input) = client.try_clone()
        {
            let console = self.clone();
            let typist = move || console.typist(input);
            if std::thread::Builder::new()
                .name("typist".into())
                .spawn(typist)
                .is_err()
            {
                return;
            }
        }
        // The listener went away, or did not read.
        let _ = self.copy_to(&mut client, from, mode[0] != LOG);
        let _ = client.shutdown(std::net::Shutdown::Both);
    }

    /// Copies the console's bytes from `from` on, and with `follow` those to come, until the client has gone
    /// or the console is closed.
    fn copy_to(&self, client: &mut UnixStream, mut from: u64, follow: bool) -> io::Result<()> {
        loop {
            let (bytes, lost) = {
                let mut state = self.state();
                while state.total() <= from && follow && !state.closed {
                    let waited = self.0.more.wait_timeout(state, GONE_INTERVAL);
                    let (next, wait) = waited.ignore_poison();
                    state = next;
                    // A guest may print nothing for days, and many clients may come and go meanwhile.
                    if wait.timed_out() && has_gone(client) {
                        return Ok(());
                    }
                }
                state.after(from, CHUNK_BYTES)
            };
            if bytes.is_empty() {
                return Ok(());
            }
            if lost > 0 && from > 0 {
                write!(client, "\r\n[{lost} bytes of the console lost]\r\n")?;
            }
            client.write_all(&bytes)?;
            from += lost + bytes.len() as u64;
        }
    }

    /// Passes a listener's input to the guest.
    fn typist(&self, mut client: UnixStream) {
        let mut buffer = [0; 1024];
        let _ = client.set_read_timeout(None);
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            let input = self.state().input.as_ref().map(UnixStream::try_clone);
            if let Some(Ok(mut input)) = input
                && input.write_all(&buffer[..count]).is_err()
            {
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().ignore_poison()
    }
}

/// Whether the other end of a socket is closed. A listener that has only shut down its writes has not gone.
fn has_gone(client: &UnixStream) -> bool {
    let mut file = [PollFd::new(client.as_fd(), PollFlags::empty())];
    let ready = poll(&mut file, PollTimeout::ZERO).unwrap_or(0);
    ready > 0 && file[0].any().unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use registry::console::FOLLOW;

    use super::ring::KEPT_BYTES;
    use super::*;

    fn listen(console: &Console, mode: u8) -> UnixStream {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[mode]).unwrap();
        let console = console.clone();
        std::thread::spawn(move || console.listener(theirs));
        ours
    }

    #[test]
    fn listener_that_goes_while_the_guest_prints_nothing_keeps_no_thread() {
        let console = Console::default();
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[FOLLOW]).unwrap();
        let served = {
            let console = console.clone();
            std::thread::spawn(move || console.listener(theirs))
        };
        // It shuts down its writes, and reads on.
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        std::thread::sleep(GONE_INTERVAL * 2);
        assert!(!served.is_finished());
        drop(ours);
        let deadline = std::time::Instant::now() + GONE_INTERVAL * 20;
        while !served.is_finished() {
            assert!(std::time::Instant::now() < deadline, "the thread goes on");
            std::thread::sleep(GONE_INTERVAL / 10);
        }
    }

    #[test]
    fn a_flood_keeps_only_the_end() {
        let console = Console::default();
        for _ in 0..5 {
            console.output(&vec![b'x'; KEPT_BYTES as usize / 2]);
        }
        console.output(b"\nend\x1b[0m");
        assert_eq!(console.state().after(0, u64::MAX).0.len() as u64, KEPT_BYTES);
        assert_eq!(console.last_lines(1), ["end[0m"]);
    }

    #[test]
    fn every_listener_gets_everything_in_order_until_the_end() {
        let console = Console::default();
        console.output(b"early ");
        let mut listeners = [listen(&console, FOLLOW), listen(&console, ATTACH)];
        for number in 0..1000 {
            console.output(format!("{number} ").as_bytes());
        }
        console.close();
        let wanted: String = (0..1000).fold(String::from("early "), |text, number| {
            text + &format!("{number} ")
        });
        for listener in &mut listeners {
            let mut text = String::new();
            listener.read_to_string(&mut text).unwrap();
            assert_eq!(text, wanted);
        }
    }

    #[test]
    fn log_ends_with_the_kept_bytes_and_a_slow_listener_receives_the_number_of_lost_ones() {
        let console = Console::default();
        console.output(b"here");
        let mut text = String::new();
        listen(&console, LOG).read_to_string(&mut text).unwrap();
        assert_eq!(text, "here");
        let (bytes, lost) = {
            console.output(&vec![b'y'; 2 * KEPT_BYTES as usize]);
            console.state().after(4, CHUNK_BYTES)
        };
        assert_eq!((bytes.len() as u64, lost), (CHUNK_BYTES, KEPT_BYTES));
    }

    #[test]
    fn input_of_a_listener_reaches_the_guest() {
        let console = Console::default();
        let (mut guest, input) = UnixStream::pair().unwrap();
        console.set_input(Some(input));
        let mut terminal = listen(&console, ATTACH);
        terminal.write_all(b"ls\n").unwrap();
        let mut typed = [0; 3];
        guest.read_exact(&mut typed).unwrap();
        assert_eq!(&typed, b"ls\n");
    }
}
