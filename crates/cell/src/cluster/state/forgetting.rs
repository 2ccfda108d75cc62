//! Names of VMs of lost hosts, and when they are free again.
//!
//! The names of a dead cell stay taken, since its host may only be cut off, with its VMs running. They are
//! free in two cases:
//!
//! 1. A person has powered the host off (fenced it), and gives the command `cluster forget`.
//! 2. The cluster's file has `on_lost = "stop"`, and the cell has not been a member for longer than its host
//!    may let VMs run ([`crate::cluster::lost`]).

use protocol::CellId;
use registry::cluster::interface::CellResponse;

use super::{Action, Client, Key, State};

impl State {
    /// Forgets cells of which, by a client's assertion, nothing runs any more.
    pub(super) fn forget(&mut self, client: Client, cells: &[u16]) -> Vec<Action> {
        let lives = |cell: &&u16| self.life(**cell).is_some();
        if let Some(cell) = cells.iter().find(lives) {
            let why = format!("cell {cell} runs, and so may its VMs; end its host first");
            return vec![Action::Answer(client, CellResponse::Refused { why })];
        }
        // Version 2 of the cells' protocol added this message, and gathered replies.
        if !self.multicast.all_gather() {
            let why = "a cell of the former release runs, which does not know the request; help: `mirrorball \
                       cluster upgrade` on its host, by this release";
            return vec![Action::Answer(
                client,
                CellResponse::Refused { why: why.to_owned() },
            )];
        }
        let changes = cells.iter().filter_map(|number| {
            let life = self.dead.get(number).copied().unwrap_or(0);
            let number = *number;
            self.node.forget_everywhere(CellId { number, life })
        });
        let changes: Vec<_> = changes.collect();
        // Messages to a cell stay in order: the receipts for the last change are the last ones.
        match changes.last() {
            Some((last, _)) => _ = self.leaving.insert(*last, client),
            None => return vec![Action::Answer(client, CellResponse::Done)],
        }
        let effects = changes.into_iter().flat_map(|(_, effects)| effects).collect();
        self.acts(effects)
    }

    /// Frees the names of a cell that has not been a member for so long that its host has ended its VMs, by
    /// `on_lost = "stop"`.
    pub fn lapsed(&mut self, cell: u16) -> Vec<Action> {
        if self.life(cell).is_none() {
            self.node.forget(cell, |key| matches!(key, Key::Vm(_)));
        }
        self.expected.remove(&cell);
        self.release()
    }

    /// Records that a cell's host has left the cluster. The cell is not shown any more once it is dead and
    /// has no VM. Names of VMs that may run on there stay taken, as those of every dead cell.
    pub fn departed(&mut self, cell: u16) -> Vec<Action> {
        self.departed.insert(cell);
        self.drop_departed();
        Vec::new()
    }

    /// Drops the entries of dead cells without VMs whose hosts have left.
    pub(super) fn drop_departed(&mut self) {
        let gone = |cell: &u16| self.life(*cell).is_none() && !self.vms().any(|vm| vm.cell == *cell);
        let gone: Vec<u16> = self.departed.iter().copied().filter(gone).collect();
        for cell in gone {
            self.node.forget(cell, |_| true);
        }
    }

    /// Claims no names until each of these cells has reported its VMs, or has lapsed. A cell that starts does
    /// not have the names of a lost host's VMs.
    #[must_use]
    pub fn expecting(mut self, cells: impl IntoIterator<Item = u16>) -> Self {
        self.expected = cells.into_iter().collect();
        self
    }

    /// Refuses VMs that came early, while VMs of lost hosts may run.
    pub(super) fn refuse_early(&mut self) -> Vec<Action> {
        let early = self.early.as_mut().map(std::mem::take).unwrap_or_default();
        let cells: Vec<String> = self.expected.iter().map(u16::to_string).collect();
        let why = format!(
            "cell {} has just started, and waits until all VMs of lost cells have ended (cell {}); try again \
             in some seconds",
            self.me.number,
            cells.join(", ")
        );
        let refused = |(client, _)| Action::Answer(client, CellResponse::Refused { why: why.clone() });
        early.into_iter().map(refused).collect()
    }
}
