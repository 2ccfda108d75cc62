//! The facts that a user asserts, as a cell applies them: to the placement of VMs, to multicast trees, and to
//! the transport of the next links.
//!
//! The file is read when the cell starts, and again when it has changed and a client requests a place: by the
//! client's thread, so that a slow disk delays that client alone. The facts are handled before
//! the client's request. While the file is wrong the former facts stay in
//! force.

use std::io;
use std::sync::{Arc, Mutex};

use hostinfo::capacity::{self, AssertionWatch};
use hostinfo::facts::{self, InForce};
use locks::IgnorePoison;
use policy::placement::Assertions;
use registry::cluster::files::Files;
use tracing::{info, warn};

use super::{Event, Events};
use crate::cluster::routes::MulticastRoutes;

/// The asserted facts in force, with the costs of messages by them.
#[derive(Debug)]
pub(super) struct Asserted {
    /// Facts on the capacity of cells.
    pub(super) capacity: Assertions,
    /// Costs of messages between cells.
    pub(super) costs: MulticastRoutes,
}

impl Asserted {
    fn of(files: &Files, in_force: InForce) -> io::Result<Self> {
        let asserted: knowledge::Base = in_force.facts.iter().cloned().collect();
        Ok(Self {
            capacity: capacity::assertions_in(&asserted),
            costs: MulticastRoutes::of(&facts::all_with(files, in_force.facts)?),
        })
    }
}

/// Reads the file of asserted facts when it has changed.
pub(super) struct Reader {
    files: Files,
    /// Held while the file is read, so that a second request comes after the facts of the first.
    watch: Mutex<AssertionWatch>,
}

impl Reader {
    /// Reads the file for a cell that starts.
    ///
    /// # Errors
    /// If the file is wrong, and no cell of the cluster has read a right one before; one line that names the
    /// file.
    pub(super) fn start(files: &Files) -> io::Result<(Arc<Self>, Asserted)> {
        // Before the file is read.
        let watch = Mutex::new(AssertionWatch::new());
        let files = files.clone();
        let in_force = InForce::read_and_keep(&files).map_err(io::Error::other)?;
        if let Some(fault) = &in_force.fault {
            warn!(%fault, "the asserted facts can't be used; the former ones count");
        }
        let asserted = Asserted::of(&files, in_force)?;
        Ok((Arc::new(Self { files, watch }), asserted))
    }

    /// Sends the facts as an event, if the file has changed and is right.
    pub(super) fn send_changes(&self, events: &Events) {
        self.send_changes_of(events, || InForce::read_and_keep(&self.files));
    }

    fn send_changes_of(&self, events: &Events, read: impl FnOnce() -> Result<InForce, facts::FileError>) {
        let mut watch = self.watch.lock().ignore_poison();
        if !watch.has_changed() {
            return;
        }
        let read = read()
            .map_err(io::Error::other)
            .and_then(|mut in_force| match in_force.fault.take() {
                Some(fault) => Err(io::Error::other(fault)),
                None => Asserted::of(&self.files, in_force),
            });
        match read {
            Ok(asserted) => {
                info!("the asserted facts have changed");
                events.handle(Event::Asserted(Box::new(asserted)));
            }
            Err(error) => {
                warn!(%error, "the asserted facts have changed and can't be used; the former ones count");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    fn in_force(file: &Path) -> Result<InForce, facts::FileError> {
        facts::read(file).map(|facts| InForce { facts, fault: None })
    }

    #[test]
    fn changed_facts_are_sent_once_and_a_wrong_file_sends_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("asserted.facts");
        let reader = Reader {
            files: Files::at(folder.path()),
            watch: Mutex::new(AssertionWatch::of(Some(file.clone()))),
        };
        let events = Events::start().unwrap();
        let cordoned = || {
            reader.send_changes_of(&events, || in_force(&file));
            let sent = std::iter::from_fn(|| events.next(Duration::ZERO)).map(|event| match event {
                Event::Asserted(asserted) => asserted.capacity.0[&0].is_cordoned,
                _ => panic!("another event"),
            });
            sent.collect::<Vec<_>>()
        };
        assert_eq!(cordoned(), [false; 0]);
        std::fs::write(&file, "cell_cordoned(0)\n").unwrap();
        assert_eq!(cordoned(), [true]);
        assert_eq!(cordoned(), [false; 0]);
        std::fs::write(&file, "cell_cordoned(\n").unwrap();
        assert_eq!(cordoned(), [false; 0]);
        std::fs::write(&file, "cell_cpus(0, 3)\n").unwrap();
        assert_eq!(cordoned(), [false]);
    }

    #[test]
    fn requests_of_two_clients_follow_the_facts_that_one_of_them_reads() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("asserted.facts");
        let reader = Reader {
            files: Files::at(folder.path()),
            watch: Mutex::new(AssertionWatch::of(Some(file.clone()))),
        };
        std::fs::write(&file, "cell_cordoned(0)\n").unwrap();
        let events = Events::start().unwrap();
        std::thread::scope(|scope| {
            for client in 0..2 {
                let (reader, events, file) = (&reader, events.clone(), &file);
                scope.spawn(move || {
                    reader.send_changes_of(&events, || {
                        // A slow disk.
                        std::thread::sleep(std::time::Duration::from_millis(100));
                        in_force(file)
                    });
                    events.post(Event::Disconnected(client));
                });
            }
        });
        let first = events.next(Duration::from_secs(20)).unwrap();
        assert!(
            matches!(first, Event::Asserted(_)),
            "a request came before the facts"
        );
        assert_eq!(
            std::iter::from_fn(|| events.next(Duration::ZERO))
                .filter(|event| matches!(event, Event::Disconnected(_)))
                .count(),
            2
        );
    }
}
