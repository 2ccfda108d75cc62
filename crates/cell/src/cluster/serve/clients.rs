//! Clients: commands and monitors, each with lines of requests.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use registry::cluster::interface::{CellRequest, CellResponse, OF_CELL};

use super::{Event, Events, assertions};
use crate::cluster::state::Client;

/// Maximum length of a client's line, in bytes.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// Number of threads that wait for a client. To start one takes longer than to serve most requests.
const WAITING: usize = 2;
/// Pause after a client that could not be accepted, as without descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Common state of the threads of clients.
struct Clients {
    listener: UnixListener,
    events: Events,
    facts: Arc<assertions::Reader>,
    /// Number of threads that wait for a client.
    waiting: AtomicUsize,
    /// Number of clients so far.
    count: AtomicU64,
}

pub(super) fn take(
    listener: UnixListener,
    events: &Events,
    facts: &Arc<assertions::Reader>,
) -> io::Result<()> {
    let clients = Arc::new(Clients {
        listener,
        events: events.clone(),
        facts: facts.clone(),
        waiting: AtomicUsize::new(0),
        count: AtomicU64::new(0),
    });
    (0..WAITING).try_for_each(|_| clients.start_thread())
}

impl Clients {
    /// Starts a thread that serves one client after another, as long as it is needed.
    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let clients = self.clone();
        let started = thread::Builder::new()
            .name("client".into())
            .spawn(move || clients.run());
        if started.is_err() {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        started.map(drop)
    }

    fn run(self: &Arc<Self>) {
        loop {
            let accepted = self.listener.accept();
            let Ok((stream, _)) = accepted else {
                thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            let is_last = self.waiting.fetch_sub(1, Ordering::Relaxed) == 1;
            // A host without threads to spare loses this client, not the cell.
            if !is_last || self.start_thread().is_ok() {
                let client = self.count.fetch_add(1, Ordering::Relaxed);
                let _ = self.serve(client, stream);
                self.events.handle(Event::Disconnected(client));
            }
            if self.waiting.fetch_add(1, Ordering::Relaxed) >= WAITING {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Passes on the requests of a client, until it ends. A line that is no request is refused.
    fn serve(self: &Arc<Self>, client: Client, stream: UnixStream) -> io::Result<()> {
        stream.set_write_timeout(Some(Duration::from_secs(2)))?;
        let mut lines = BufReader::new(stream.try_clone()?);
        self.events.handle(Event::Connected(client, stream));
        loop {
            let mut line = String::new();
            if Read::take(&mut lines, LINE_BYTES_MAX).read_line(&mut line)? == 0 {
                return Ok(());
            }
            let event = match OF_CELL.read(&line) {
                Ok(ask) => {
                    if let CellRequest::AdmitVm(_) = &ask {
                        self.facts.send_changes(&self.events);
                    }
                    Event::Requested(client, ask)
                }
                Err(error) => Event::Responded(
                    client,
                    CellResponse::Refused {
                        why: error.to_string(),
                    },
                ),
            };
            self.events.handle(event);
            // After the request, so that this client does not wait for the thread. Without one the next
            // client starts it.
            if self.waiting.load(Ordering::Relaxed) < WAITING {
                let _ = self.start_thread();
            }
        }
    }
}
