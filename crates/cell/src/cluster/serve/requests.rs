//! Requests of clients, and the cell's files that some of them change.

use std::io;

use config::cluster::Site;
use registry::cluster::interface::{CellRequest, CellResponse};
use registry::journal::{self, Change};
use tracing::info;

use super::assertions::Asserted;
use super::{Cell, Event};
use crate::cluster::limits::ANSWER_TIMEOUT;
use crate::cluster::state::{Action, Client};

impl Cell {
    /// Serves a client's request.
    pub(super) fn serve_request(&mut self, client: Client, ask: CellRequest) -> Vec<Action> {
        match &ask {
            CellRequest::Recover { cell } if !self.files.cell(*cell).has_failed() => {
                return refused(client, format!("cell {cell} has not failed"));
            }
            CellRequest::TakeHosts => return self.take_hosts(client),
            CellRequest::Cordon { cordoned } => {
                if let Err(error) = self.write_cordon(*cordoned) {
                    // Other cells must not learn of a cordon that the next process would not have.
                    let why =
                        format!("the cordon can't be written down: {error}; see whether the disk is full");
                    return refused(client, why);
                }
            }
            _ => {}
        }
        let acts = self.state.handle_request(client, ask);
        self.watch(client);
        acts
    }

    /// Checks after a while whether a client's request is still not answered.
    pub(super) fn watch(&self, client: Client) {
        let awaited = self.state.awaited(client);
        if !awaited.is_empty() {
            let event = Event::Overdue(client, awaited);
            self.events.post_after(ANSWER_TIMEOUT, event);
        }
    }

    fn write_cordon(&self, cordoned: bool) -> io::Result<()> {
        let before = self.own.is_cordoned();
        self.own.cordon(cordoned)?;
        let cell = self.number;
        match (before, cordoned) {
            (false, true) => journal::note(Change::CellCordoned { cell }),
            (true, false) => journal::note(Change::CellUncordoned { cell }),
            _ => {}
        }
        Ok(())
    }

    /// Applies the facts that a user asserts now.
    pub(super) fn take_facts(&mut self, Asserted { capacity, costs }: Asserted) {
        if let Some(remote_cells) = &self.remote_cells {
            remote_cells.set_route_costs(costs.route_costs());
        }
        self.state.assert(capacity);
        self.state.set_route_costs(costs);
    }

    /// Takes the hosts that the cell's files name now.
    fn take_hosts(&mut self, client: Client) -> Vec<Action> {
        let refused = |why: String| refused(client, why);
        let Some(remote_cells) = &self.remote_cells else {
            return refused("the cluster has this host only".to_owned());
        };
        let next = match self.files.site() {
            Ok(Some(next)) => next,
            Ok(None) => return refused("the cluster has this host only".to_owned()),
            Err(error) => return refused(format!("the cluster's hosts can't be read: {error}")),
        };
        let left = remote_cells.site().cells_without(&next);
        info!("goes on with hosts {}", names(&next));
        self.peers.add_remote(next.elsewhere());
        remote_cells.set_site(next);
        let mut acts: Vec<Action> = left
            .into_iter()
            .flat_map(|cell| self.state.departed(cell))
            .collect();
        acts.extend(self.state.handle_request(client, CellRequest::TakeHosts));
        acts
    }
}

fn refused(client: Client, why: String) -> Vec<Action> {
    vec![Action::Answer(client, CellResponse::Refused { why })]
}

/// The names of the hosts.
fn names(site: &Site) -> String {
    let names: Vec<&str> = site.hosts.iter().map(|host| &host.name[..]).collect();
    names.join(", ")
}
