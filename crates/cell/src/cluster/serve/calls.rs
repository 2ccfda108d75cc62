//! Links to the other cells as they are made: calls that this cell receives, and calls that it makes.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use registry::cluster::files::Files;

use super::remote_cells::RemoteCells;
use super::{Event, Events};
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

pub(super) fn take(listener: UnixListener, calls: &LocalCalls, events: &Events) -> io::Result<()> {
    let (calls, events) = (calls.clone(), events.clone());
    std::thread::Builder::new()
        .name("calls".into())
        .spawn(move || calls.take(&listener, |link| events.post(Event::Linked(Box::new(link)))))?;
    Ok(())
}

pub(super) fn call_others(
    files: Files,
    calls: LocalCalls,
    remote_cells: Option<RemoteCells>,
    calling: Arc<CallTable>,
    events: &Events,
) -> io::Result<()> {
    let events = events.clone();
    std::thread::Builder::new().name("caller".into()).spawn(move || {
        let linked = |link| events.post(Event::Linked(Box::new(link)));
        let here = calls.call_all(&files, &linked);
        let there = remote_cells.map(|remote_cells| remote_cells.call_all(calls.me, &calling, &linked));
        let mut crossed = Vec::new();
        for called in [
            here.map(|cells| cells.into_iter().collect()),
            there.unwrap_or(Ok(Vec::new())),
        ] {
            match called {
                Err(error) if is_version_mismatch(&error) => {
                    events.post(Event::VersionMismatch(error.to_string()));
                    return;
                }
                called => crossed.extend(called.unwrap_or_default()),
            }
        }
        events.post(Event::Called(crossed));
        // Not by this thread: each call of a cell that hangs takes seconds.
        events.post_after(CROSSED_LIMIT, Event::Waited);
        for pause in CALL_PAUSES {
            std::thread::sleep(pause);
            // A cell of another version that has started since is refused, and reports that itself.
            let _ = calls.call_all(&files, &linked);
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use config::cluster::CellPlan;
    use protocol::CellId;

    use super::*;

    /// Longer than all pauses before the second call.
    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn cell_whose_call_failed_calls_again_until_it_has_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::at(folder.path());
        let plan = [3, 5].map(|number| CellPlan {
            number,
            host: None,
            cpus: vec![0],
            nodes: vec![0],
            memory_bytes: 1 << 30,
        });
        files.create(&plan, None).unwrap();
        let [caller, called] = [3, 5].map(|number| {
            let me = CellId { number, life: 1 };
            LocalCalls::new(me, 1000, Arc::new(CallTable::new(me)))
        });
        // Calls of other hosts' cells, of which there are none.
        let calling = Arc::new(CallTable::new(caller.me));
        let events = Events::start().unwrap();
        call_others(files.clone(), caller, None, calling, &events).unwrap();
        // The other cell has no socket yet: this call has failed.
        let first = events.next(LIMIT).unwrap();
        assert!(matches!(first, Event::Called(crossed) if crossed.is_empty()));

        let listener = UnixListener::bind(files.cell(5).link_socket()).unwrap();
        take(listener, &called, &Events::start().unwrap()).unwrap();
        loop {
            match events.next(LIMIT).expect("a link") {
                Event::Linked(link) => break assert_eq!(link.peer.number, 5),
                Event::Waited => {}
                _ => panic!("an event that is no link"),
            }
        }
    }
}
