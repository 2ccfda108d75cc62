//! Moves of a shared region's memory to another cell, by order of a client.
//!
//! From before the first page moves until after the last one, the region has the memory of both: in the
//! ledger, in the home's entry of the table, and in the members' records. So a process that dies leaves too
//! many dependencies, and never too few. The order can be repeated.

use std::collections::BTreeMap;

use policy::memory::borrowing::allows;
use protocol::agreement::Effect;
use protocol::grant::Amounts;
use registry::cluster::interface::{CellResponse, LentMemory, RegionMoved};

use super::regions::{Waiting, ledger_name};
use super::view::list;
use super::{Action, Client, State};

/// A reason why the memory of a shared region does not move, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum MoveError {
    #[error("cell {0} is only starting; try again in a moment")]
    Starting(u16),
    #[error("no VM has the shared region {region} of cell {home}; it begins with its first member")]
    NoMember { region: String, home: u16 },
    #[error("the memory of shared region {0} is moving; wait until it has moved")]
    UnderWay(String),
    #[error("there is no cell {to} on this host; `mirrorball cluster status` shows its cells")]
    NoCell { to: u16 },
    #[error("cell {to} has failed; name another cell")]
    Failed { to: u16 },
    #[error(
        "VM {vm} has the shared region {region}, and may not depend on cell {to}; end the VM, or name one of \
         its `cells`"
    )]
    NotAllowed { vm: String, region: String, to: u16 },
    #[error(
        "cell {home} has {free_mib} MiB free, and shared region {region} needs {wanted_mib} MiB there; end a \
         VM there, or reclaim memory that it has lent"
    )]
    ShortHome {
        region: String,
        home: u16,
        free_mib: u64,
        wanted_mib: u64,
    },
    #[error(
        "cell {home} has {free_mib} MiB free of cell {to}'s memory, and shared region {region} needs \
         {wanted_mib} MiB of it; lend it by `mirrorball cluster lend`, or end a VM"
    )]
    Short {
        region: String,
        home: u16,
        to: u16,
        free_mib: u64,
        wanted_mib: u64,
    },
    #[error(
        "VM {vm} does not record that its shared region moves: {why}. Nothing has moved; end the VM, or try \
         again"
    )]
    NotRecorded { vm: String, why: String },
    #[error("cell {to} has failed meanwhile; nothing has moved")]
    FailedMeanwhile { to: u16 },
    #[error("no VM has the shared region {0} any more")]
    Ended(String),
}

/// Result of a move of pages.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PagesMoved {
    /// All are on the new nodes. So many bytes were not before.
    All {
        /// The number of bytes.
        moved_bytes: u64,
    },
    /// All are on the former nodes.
    None {
        /// The reason.
        why: String,
    },
    /// Pages may be on the former and on the new nodes.
    Some {
        /// The reason.
        why: String,
    },
}

/// The moves under way, by region.
#[derive(Debug, Default)]
pub(super) struct RegionMoves {
    moves: BTreeMap<String, RegionMove>,
    /// The number of the last move. A region may end during a move, and begin anew.
    last: u64,
}

#[derive(Debug)]
struct RegionMove {
    number: u64,
    client: Client,
    to: u16,
    bytes: u64,
    /// The region's memory by cell before the move.
    before: Amounts,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// The other cells receive the home's entry with both cells. This is the number of the change.
    Announcing(u64),
    /// Members record both cells.
    RecordingBoth,
    MovingPages,
    /// Members record the cells that the memory has now. Then the client receives the response.
    RecordingLast(Outcome),
}

#[derive(Debug)]
enum Outcome {
    Moved(u64),
    Kept(String),
}

impl RegionMoves {
    /// Whether a client waits for other cells to receive an entry.
    pub(super) fn is_announcing(&self, client: Client) -> bool {
        let mut moves = self.moves.values();
        moves.any(|moving| moving.client == client && matches!(moving.step, Step::Announcing(_)))
    }

    fn get(&mut self, region: &str, number: u64) -> Option<&mut RegionMove> {
        self.moves
            .get_mut(region)
            .filter(|moving| moving.number == number)
    }

    /// Ends the move of a region that no VM has any more. Returns the answer to its client.
    pub(super) fn end(&mut self, region: &str) -> Option<Action> {
        let moving = self.moves.remove(region)?;
        let why = MoveError::Ended(region.to_owned()).to_string();
        Some(Action::Answer(moving.client, CellResponse::Refused { why }))
    }
}

impl State {
    /// Handles the order to move a region's memory, which has waited for memory of the cell `round` times.
    pub(super) fn move_region_in_round(
        &mut self,
        client: Client,
        region: String,
        to: u16,
        round: u8,
    ) -> Vec<Action> {
        self.begin_region_move(client, &region, to, round)
            .unwrap_or_else(|error| {
                let why = error.to_string();
                vec![Action::Answer(client, CellResponse::Refused { why })]
            })
    }

    fn begin_region_move(
        &mut self,
        client: Client,
        region: &str,
        to: u16,
        round: u8,
    ) -> Result<Vec<Action>, MoveError> {
        let home = self.me.number;
        if self.early.is_some() {
            return Err(MoveError::Starting(home));
        }
        let Some(bytes) = self.shared.bytes_of(region) else {
            let region = region.to_owned();
            return Err(MoveError::NoMember { region, home });
        };
        if self.region_moves.moves.contains_key(region) {
            return Err(MoveError::UnderWay(region.to_owned()));
        }
        self.check_region_target(region, to)?;
        if let Some(acts) = self.seek_region_to_move(client, region, bytes) {
            return Ok(acts);
        }
        let name = ledger_name(region);
        let before = self.ledger.parts(&name).cloned().unwrap_or_default();
        let missing = bytes.saturating_sub(before.get(&to).copied().unwrap_or(0));
        let free = self.free_of_cell(to);
        if free < missing
            && to != home
            && let Some(acts) = self.request_of(client, to, missing - free, round)
        {
            let region = region.to_owned();
            self.shared.wait(client, Waiting::Move { region, to });
            return Ok(acts);
        }
        if !self.ledger.extend(&name, to, missing) {
            return Err(short(region, home, to, free, missing));
        }
        self.pass_is_due();
        let (mut acts, step) = self.announce_lenders();
        let is_announced = matches!(step, Step::RecordingBoth);
        self.region_moves.last += 1;
        let moving = RegionMove {
            number: self.region_moves.last,
            client,
            to,
            bytes,
            before,
            step,
        };
        self.region_moves.moves.insert(region.to_owned(), moving);
        if is_announced {
            acts.extend(self.record_lenders(region));
        }
        Ok(acts)
    }

    /// Publishes the region's cells; returns the step that follows.
    fn announce_lenders(&mut self) -> (Vec<Action>, Step) {
        let Some((change, effects)) = self.publish() else {
            return (Vec::new(), Step::RecordingBoth);
        };
        let step = match effects.contains(&Effect::Heard(change)) {
            true => Step::RecordingBoth,
            false => Step::Announcing(change),
        };
        (self.acts(effects), step)
    }

    /// Checks that the region and its members may depend on a cell.
    fn check_region_target(&self, region: &str, to: u16) -> Result<(), MoveError> {
        let is_here = |number: u16| {
            let mut cells = self.cells();
            cells.any(|cell| cell.number == number && cell.plan.host == self.plan.host)
        };
        if !is_here(to) {
            return Err(MoveError::NoCell { to });
        }
        if self.has_failed(to) {
            return Err(MoveError::Failed { to });
        }
        let mut members = self.members().filter(|(grant, _)| grant.name == region);
        match members.find(|(_, vm)| !allows(vm.cells, to)) {
            Some((_, vm)) => Err(MoveError::NotAllowed {
                vm: vm.name.to_owned(),
                region: region.to_owned(),
                to,
            }),
            None => Ok(()),
        }
    }

    /// Free memory of a cell that this one has.
    pub(super) fn free_of_cell(&self, cell: u16) -> u64 {
        if cell == self.me.number {
            return self.ledger.own_free();
        }
        let mut homes = self.ledger.available();
        homes.find(|(home, _)| *home == cell).map_or(0, |(_, free)| free)
    }

    /// Memory of a region by cell, as its members record it: with the home's own part while it moves.
    pub(super) fn region_lenders(&self, region: &str, bytes: u64) -> Vec<LentMemory> {
        let mut parts = self
            .ledger
            .parts(&ledger_name(region))
            .cloned()
            .unwrap_or_default();
        if parts.values().copied().fold(0, u64::saturating_add) <= bytes {
            parts.remove(&self.me.number);
        }
        list(&parts)
    }

    /// Goes on with the move of a region whose new cell all cells know.
    pub(super) fn lenders_announced(&mut self, change: u64) -> Option<Action> {
        let mut moves = self.region_moves.moves.iter_mut();
        let (region, moving) =
            moves.find(|(_, moving)| matches!(moving.step, Step::Announcing(number) if number == change))?;
        moving.step = Step::RecordingBoth;
        let region = region.clone();
        self.record_lenders(&region)
    }

    fn record_lenders(&self, region: &str) -> Option<Action> {
        let moving = self.region_moves.moves.get(region)?;
        Some(Action::RecordLenders {
            name: region.to_owned(),
            number: moving.number,
            borrowed: self.region_lenders(region, moving.bytes),
        })
    }

    /// Handles the result of [`Action::RecordLenders`]: the members that have not recorded the cells, each
    /// with the reason.
    pub fn lenders_recorded(
        &mut self,
        region: &str,
        number: u64,
        not_recorded: Vec<(String, String)>,
    ) -> Vec<Action> {
        let Some(moving) = self.region_moves.get(region, number) else {
            return Vec::new();
        };
        let to = moving.to;
        match &moving.step {
            Step::Announcing(_) | Step::MovingPages => Vec::new(),
            Step::RecordingBoth => {
                let why = match not_recorded.into_iter().next() {
                    Some((vm, why)) => MoveError::NotRecorded { vm, why },
                    // Its failure has ended the members that had the entry by then.
                    None if self.has_failed(to) => MoveError::FailedMeanwhile { to },
                    None => return self.move_pages(region),
                };
                self.keep_former(region, why.to_string())
            }
            Step::RecordingLast(outcome) => {
                let response = match outcome {
                    Outcome::Moved(moved_bytes) => CellResponse::RegionMoved(RegionMoved {
                        moved_bytes: *moved_bytes,
                        not_recorded,
                    }),
                    Outcome::Kept(why) => CellResponse::Refused { why: why.clone() },
                };
                let client = moving.client;
                self.region_moves.moves.remove(region);
                vec![Action::Answer(client, response)]
            }
        }
    }

    fn move_pages(&mut self, region: &str) -> Vec<Action> {
        let Some(moving) = self.region_moves.moves.get_mut(region) else {
            return Vec::new();
        };
        moving.step = Step::MovingPages;
        let (number, bytes) = (moving.number, moving.bytes);
        let (to, before) = (moving.to, moving.before.clone());
        vec![Action::MoveRegionPages {
            name: region.to_owned(),
            number,
            bytes,
            nodes: self.nodes_of(|cell| cell == to),
            former: self.nodes_of(|cell| before.contains_key(&cell)),
        }]
    }

    /// Nodes of the host of some cells.
    fn nodes_of(&self, is_one: impl Fn(u16) -> bool) -> Vec<u32> {
        let cells = self.cells().filter(|cell| is_one(cell.number));
        let mut nodes: Vec<u32> = cells.flat_map(|cell| cell.plan.nodes.iter().copied()).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// Handles the result of [`Action::MoveRegionPages`].
    pub fn region_pages_moved(&mut self, region: &str, number: u64, moved: PagesMoved) -> Vec<Action> {
        let Some(moving) = self.region_moves.get(region, number) else {
            return Vec::new();
        };
        match moved {
            PagesMoved::All { moved_bytes } => {
                let parts = [(moving.to, moving.bytes)].into();
                self.have_last_recorded(region, parts, Outcome::Moved(moved_bytes))
            }
            PagesMoved::None { why } => self.keep_former(region, why),
            PagesMoved::Some { why } => {
                let client = moving.client;
                self.region_moves.moves.remove(region);
                vec![Action::Answer(client, CellResponse::Refused { why })]
            }
        }
    }

    /// Returns the new memory of a region whose pages have not moved.
    fn keep_former(&mut self, region: &str, why: String) -> Vec<Action> {
        let moving = self.region_moves.moves.get(region);
        let before = moving.map(|moving| moving.before.clone()).unwrap_or_default();
        self.have_last_recorded(region, before, Outcome::Kept(why))
    }

    /// Reduces the region's memory to these parts, and has the members record it.
    fn have_last_recorded(&mut self, region: &str, parts: Amounts, outcome: Outcome) -> Vec<Action> {
        self.ledger.reduce(&ledger_name(region), parts);
        self.pass_is_due();
        if let Some(moving) = self.region_moves.moves.get_mut(region) {
            moving.step = Step::RecordingLast(outcome);
        }
        let (mut acts, _) = self.announce_lenders();
        acts.extend(self.record_lenders(region));
        acts
    }
}

fn short(region: &str, home: u16, to: u16, free: u64, wanted: u64) -> MoveError {
    let region = region.to_owned();
    let (free_mib, wanted_mib) = (free >> 20, wanted >> 20);
    if to == home {
        return MoveError::ShortHome {
            region,
            home,
            free_mib,
            wanted_mib,
        };
    }
    MoveError::Short {
        region,
        home,
        to,
        free_mib,
        wanted_mib,
    }
}
