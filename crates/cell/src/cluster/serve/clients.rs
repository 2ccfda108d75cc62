//! Clients: commands and monitors, each with lines of requests.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use registry::cluster::interface::{CellRequest, CellResponse, OF_CELL};

use super::{Event, assertions};
use crate::cluster::state::Client;

/// Maximum length of a client's line, in bytes.
const LINE_BYTES_MAX: u64 = 64 << 10;

pub(super) fn take(
    listener: UnixListener,
    events: &Sender<Event>,
    facts: &Arc<assertions::Reader>,
) -> io::Result<()> {
    let (events, facts) = (events.clone(), facts.clone());
    std::thread::Builder::new()
        .name("clients".into())
        .spawn(move || {
            for (client, stream) in (0..).zip(listener.incoming().flatten()) {
                let (events, facts) = (events.clone(), facts.clone());
                // A host without threads to spare loses this client, not the cell.
                let _ = std::thread::Builder::new().name("client".into()).spawn(move || {
                    // The receiver is gone when the process ends.
                    let _ = read(client, stream, &events, &facts);
                    let _ = events.send(Event::Disconnected(client));
                });
            }
        })?;
    Ok(())
}

/// Passes on the requests of a client, until it ends. A line that is no request is refused.
fn read(
    client: Client,
    stream: UnixStream,
    events: &Sender<Event>,
    facts: &assertions::Reader,
) -> io::Result<()> {
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    let mut lines = BufReader::new(stream.try_clone()?);
    let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
    events.send(Event::Connected(client, stream)).map_err(gone)?;
    loop {
        let mut line = String::new();
        if Read::take(&mut lines, LINE_BYTES_MAX).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let event = match OF_CELL.read(&line) {
            Ok(ask) => {
                if let CellRequest::AdmitVm(_) = &ask {
                    facts.send_changes(events);
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
        events.send(event).map_err(gone)?;
    }
}
