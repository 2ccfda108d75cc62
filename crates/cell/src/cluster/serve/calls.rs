//! Links to the other cells as they are made: calls that this cell receives, and calls that it makes.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use registry::cluster::files::Files;

use super::remote_cells::RemoteCells;
use super::{Event, later};
use crate::cluster::link::local::LocalCalls;
use crate::cluster::link::{CallTable, is_version_mismatch};

/// Time limit for the call of a cell that is calling this one.
const CROSSED_LIMIT: Duration = Duration::from_secs(2);
/// Pauses before the next calls of cells of this host that have no link with this one. They end after the
/// time in which each of two cells has noticed that its call has failed.
const CALL_PAUSES: [Duration; 5] = [
    Duration::from_millis(250),
    Duration::from_millis(750),
    Duration::from_secs(1),
    Duration::from_secs(3),
    Duration::from_secs(9),
];

pub(super) fn take(listener: UnixListener, calls: &LocalCalls, events: &Sender<Event>) -> io::Result<()> {
    let (calls, events) = (calls.clone(), events.clone());
    std::thread::Builder::new()
        .name("calls".into())
        .spawn(move || calls.take(&listener, |link| _ = events.send(Event::Linked(Box::new(link)))))?;
    Ok(())
}

pub(super) fn call_others(
    files: Files,
    calls: LocalCalls,
    remote_cells: Option<RemoteCells>,
    calling: Arc<CallTable>,
    events: &Sender<Event>,
) -> io::Result<()> {
    let events = events.clone();
    std::thread::Builder::new().name("caller".into()).spawn(move || {
        let linked = |link| _ = events.send(Event::Linked(Box::new(link)));
        let here = calls.call_all(&files, &linked);
        let there = remote_cells.map(|remote_cells| remote_cells.call_all(calls.me, &calling, &linked));
        let mut crossed = Vec::new();
        for called in [
            here.map(|cells| cells.into_iter().collect()),
            there.unwrap_or(Ok(Vec::new())),
        ] {
            match called {
                Err(error) if is_version_mismatch(&error) => {
                    let _ = events.send(Event::VersionMismatch(error.to_string()));
                    return;
                }
                called => crossed.extend(called.unwrap_or_default()),
            }
        }
        let _ = events.send(Event::Called(crossed));
        // Not by this thread: each call of a cell that hangs takes seconds.
        if later(CROSSED_LIMIT, Event::Waited, &events).is_err() {
            let _ = events.send(Event::Waited);
        }
        for pause in CALL_PAUSES {
            std::thread::sleep(pause);
            // A cell of another version that has started since is refused, and says so itself.
            let _ = calls.call_all(&files, &linked);
        }
    })?;
    Ok(())
}
