//! Actions of the cell's process for its shared regions.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use protocol::region::Found;
use registry::cluster::interface::{CellResponse, LentMemory, OF_CELL};
use shard_api::message::send;
use tracing::{info, warn};

use super::{Cell, Event, region_pages, regions};
use crate::cluster::state::{Action, Client, PagesMoved};

/// Interval between two probes of a region that has no member and is used: a process of its last member is
/// ending.
const PROBE_INTERVAL: Duration = Duration::from_millis(200);

/// Result of a search for a region's file.
pub(super) struct SoughtRegion {
    name: String,
    found: Found,
    file: Option<File>,
}

impl Cell {
    /// Carries out an action for a shared region.
    pub(super) fn act_on_region(&mut self, act: Action) -> Vec<Action> {
        match act {
            Action::CreateRegion { name, bytes, nodes } => {
                match self.regions.create(&name, bytes, &nodes) {
                    Ok(()) => info!(region = name, bytes, "a shared region begins"),
                    Err(error) => warn!(region = name, %error, "the shared region has no file"),
                }
                Vec::new()
            }
            Action::SendRegion {
                client,
                name,
                access,
                borrowed,
            } => match self.regions.descriptor(&name, access) {
                Ok(file) => {
                    self.send_region(client, borrowed, &file);
                    Vec::new()
                }
                Err(error) => self.region_has_no_file(client, &name, &error),
            },
            Action::SearchRegion { name, bytes, without } => self.search_region(name, bytes, without),
            Action::ProbeRegion { name, is_held } => {
                let is_used = match is_held {
                    // A file that can't be probed now is probed again later.
                    true => self.regions.is_used(&name).unwrap_or(true),
                    false => regions::is_recorded(self.number, &name),
                };
                let (is_to_repeat, acts) = self.state.region_probed(&name, is_used);
                if is_to_repeat {
                    self.events
                        .post_after(PROBE_INTERVAL, Event::RegionProbeDue(name));
                }
                acts
            }
            Action::CloseRegion(name) => {
                info!(region = name, "no VM has the shared region any more");
                self.regions.close(&name);
                Vec::new()
            }
            Action::RecordLenders {
                name,
                number,
                borrowed,
            } => self.record_lenders(name, number, borrowed),
            act @ Action::MoveRegionPages { .. } => self.move_pages(act),
            _ => Vec::new(),
        }
    }

    fn record_lenders(&mut self, name: String, number: u64, borrowed: Vec<LentMemory>) -> Vec<Action> {
        let (home, events, region) = (self.number, self.events.clone(), name.clone());
        let record = move || {
            let not_recorded = regions::record_lenders(home, &name, &borrowed);
            events.post(Event::LendersRecorded(name, number, not_recorded));
        };
        match std::thread::Builder::new().name("region".into()).spawn(record) {
            Ok(_) => Vec::new(),
            Err(error) => {
                let not_recorded = vec![("of this host".to_owned(), error.to_string())];
                self.state.lenders_recorded(&region, number, not_recorded)
            }
        }
    }

    /// Moves the pages of a region by a thread: one of 1 TiB takes minutes.
    fn move_pages(&mut self, act: Action) -> Vec<Action> {
        let Action::MoveRegionPages {
            name,
            number,
            bytes,
            nodes,
            former,
        } = act
        else {
            return Vec::new();
        };
        let (events, region) = (self.events.clone(), name.clone());
        let begun = self.regions.to_move(&name).and_then(|file| {
            let move_all = move || {
                let moved = region_pages::move_all(&file, bytes, &nodes, &former);
                info!(region, ?moved, "the memory of a shared region was to move");
                events.post(Event::RegionPagesMoved(region, number, moved));
            };
            std::thread::Builder::new().name("region".into()).spawn(move_all)
        });
        match begun {
            Ok(_) => Vec::new(),
            Err(error) => {
                let why = format!("the memory of the region does not move: {error}");
                self.state
                    .region_pages_moved(&name, number, PagesMoved::None { why })
            }
        }
    }

    fn send_region(&mut self, client: Client, borrowed: Vec<LentMemory>, file: &File) {
        let Some(stream) = self.clients.get_mut(&client) else {
            return;
        };
        let response = CellResponse::Region { borrowed };
        // A client that does not read its response has disconnected, and its event follows.
        let _ = send(stream, &OF_CELL.sent(&response), &[file.as_fd()]);
    }

    /// Refuses a region whose file could not be created, or not be opened for a member.
    fn region_has_no_file(&mut self, client: Client, name: &str, error: &io::Error) -> Vec<Action> {
        let why = format!(
            "cell {} can't open the shared region {name}: {error}; see whether the host is out of files or \
             memory",
            self.number
        );
        let mut acts = vec![Action::Answer(client, CellResponse::Refused { why })];
        if !self.regions.has(name) {
            acts.extend(self.state.region_not_created(name));
        }
        acts
    }

    fn search_region(&mut self, name: String, bytes: u64, without: Vec<String>) -> Vec<Action> {
        let events = self.events.clone();
        let region = name.clone();
        let search = move || {
            let (found, file) = regions::search(&name, bytes, &without);
            events.post(Event::RegionSought(SoughtRegion { name, found, file }));
        };
        let thread = std::thread::Builder::new().name("region".into()).spawn(search);
        match thread {
            Ok(_) => Vec::new(),
            Err(error) => {
                warn!(region, %error, "the file of the shared region is not sought");
                self.state.region_sought(&region, Found::Unknown).1
            }
        }
    }

    /// Handles the result of a search.
    pub(super) fn region_sought(&mut self, sought: SoughtRegion) -> Vec<Action> {
        let SoughtRegion { name, found, file } = sought;
        let (is_kept, acts) = self.state.region_sought(&name, found);
        // A region may have been given up during the search, and another file of it created since.
        if let Some(file) = file.filter(|_| is_kept) {
            self.regions.keep(&name, file);
        }
        info!(
            region = name,
            ?found,
            is_kept,
            "the file of a shared region was sought"
        );
        acts
    }
}
