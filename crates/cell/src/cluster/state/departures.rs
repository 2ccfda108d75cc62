//! Departures of VMs: a VM ends, or the process that serves it gives way to the next one.

use protocol::agreement::Effect;
use registry::cluster::interface::{CellResponse, owner_of};

use super::{Action, Client, Key, State};

impl State {
    /// Handles the end of a client's connection, which ends its VM.
    pub fn handle_disconnect(&mut self, client: Client) -> Vec<Action> {
        self.leaving.retain(|_, waits| *waits != client);
        self.waits_no_more(client);
        for (waits, _, _) in self.claims.values_mut() {
            *waits = waits.filter(|waits| *waits != client);
        }
        if let Some(early) = &mut self.early {
            early.retain(|(waits, _)| *waits != client);
        }
        let name = self.tenants.iter().find(|(_, tenant)| **tenant == client);
        let Some(name) = name.map(|(name, _)| name.clone()) else {
            return Vec::new();
        };
        self.tenants.remove(&name);
        // The admission server holds the places of users' VMs, and reports when one has ended.
        if self.handed.remove(&name) || owner_of(&name).is_some() {
            self.last_left += 1;
            self.left.insert(name.clone(), self.last_left);
            return vec![Action::AwaitLeft(name, self.last_left)];
        }
        self.remove(&name).1
    }

    /// Whether the process of a VM that this cell had has not come yet.
    pub(super) fn is_awaited(&self, name: &str) -> bool {
        self.orphans.contains(name) || self.left.contains_key(name)
    }

    /// Records that the process of a VM has come.
    pub(super) fn has_come(&mut self, name: &str) {
        self.orphans.remove(name);
        self.left.remove(name);
    }

    /// Frees the place of a VM that was left, if its next process has not come by now.
    pub fn give_up(&mut self, name: &str, number: u64) -> Vec<Action> {
        if self.left.get(name) != Some(&number) {
            return Vec::new();
        }
        self.left.remove(name);
        self.remove(name).1
    }

    /// Frees the places of VMs of the last process whose monitors have not come by now.
    pub fn give_up_orphans(&mut self) -> Vec<Action> {
        let mut acts = Vec::new();
        for name in std::mem::take(&mut self.orphans) {
            acts.extend(self.remove(&name).1);
        }
        acts
    }

    /// Removes a VM by order of the client that has it, which is answered when all cells have received this.
    pub(super) fn leave(&mut self, client: Client, name: &str) -> Vec<Action> {
        self.tenants.remove(name);
        self.handed.remove(name);
        let (change, mut acts) = self.remove(name);
        match change {
            Some(change) => _ = self.leaving.insert(change, client),
            None => acts.push(Action::Answer(client, CellResponse::Done)),
        }
        acts
    }

    /// Removes a VM from the table. Returns the change's number, unless all cells have received it already.
    pub(super) fn remove(&mut self, name: &str) -> (Option<u64>, Vec<Action>) {
        match self.node.change(&Key::Vm(name.to_owned()), None) {
            Some((change, effects)) => {
                self.ledger.vacate(name);
                self.pass_is_due();
                let heard = effects.contains(&Effect::Heard(change));
                (if heard { None } else { Some(change) }, self.acts(effects))
            }
            None => (None, Vec::new()),
        }
    }

    /// Answers the client, or goes on with the move of a region, that waits until all cells have received a
    /// change.
    pub(super) fn all_heard(&mut self, change: u64) -> Option<Action> {
        match self.leaving.remove(&change) {
            Some(client) => Some(Action::Answer(client, CellResponse::Done)),
            None => self.lenders_announced(change),
        }
    }
}
