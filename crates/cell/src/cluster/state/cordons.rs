//! Cordons: a cordoned cell takes no new VM, and no part of one. VMs that run in it run on, come back after
//! the restart of its process, and start again in place. Memory is lent and reclaimed as before.
//!
//! Each cell has the cordons of the others in its table, so it sends no VM there. The cell itself has the
//! final decision.

use protocol::agreement::Effect;
use registry::cluster::interface::CellResponse;

use super::{Action, Client, Key, State, Value};

impl State {
    /// The cell as its last process left it.
    #[must_use]
    pub fn with_cordon(mut self, is_cordoned: bool) -> Self {
        if is_cordoned {
            // Without links there is no cell to inform.
            let _ = self.set_cordon(true);
        }
        self
    }

    /// Cordons the cell for a client, or ends its cordon. The answer is sent when all cells have the change.
    pub(super) fn cordon(&mut self, client: Client, is_cordoned: bool) -> Vec<Action> {
        let Some((change, effects)) = self.set_cordon(is_cordoned) else {
            return vec![Action::Answer(client, CellResponse::Done)];
        };
        self.leaving.insert(change, client);
        self.acts(effects)
    }

    fn set_cordon(&mut self, is_cordoned: bool) -> Option<(u64, Vec<Effect<Key, Value>>)> {
        self.is_cordoned = is_cordoned;
        self.publish()
    }
}

/// The reason why a cordoned cell does not take a VM that names it: a command or an asserted fact.
pub(super) fn refusal(cell: u16, by_command: bool) -> String {
    let end = match by_command {
        true => format!("end the cordon with `mirrorball cluster uncordon {cell}`"),
        false => format!("remove `cell_cordoned({cell})` from asserted.facts"),
    };
    format!("cell {cell} is cordoned and takes no new VM; name another cell, or {end}")
}
