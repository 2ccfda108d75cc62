//! Cells with memory, the VMs that really run in them, and the messages on the links between them.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{Amounts, Effect, Ledger, Message, Refusal};
use crate::CellId;
use crate::agreement::CellNumber;
use crate::links::Links;

/// A VM's number.
pub type Vm = u8;

pub fn vm(number: Vm) -> String {
    number.to_string()
}

/// Cells, links and VMs. VMs and persisted counts outlive cells.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct World {
    pub cells: BTreeMap<CellId, Ledger>,
    /// Own memory of each cell, bytes.
    bytes: BTreeMap<CellNumber, u64>,
    /// Persisted counts of each cell.
    kept: BTreeMap<CellNumber, Amounts>,
    /// The VMs that run: where, and whose memory they have.
    pub vms: BTreeMap<Vm, (CellNumber, Amounts)>,
    /// VMs that have ended, which a new life of their cell takes for running: where and who.
    pub stale: BTreeSet<(CellNumber, Vm)>,
    pub links: Links<Message>,
    /// Pending grants and recalls: requesting cell, other cell.
    asked: Vec<(CellId, CellNumber)>,
    /// Count of each result of each attempt.
    pub count: Count,
}

#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Count {
    pub taken: u32,
    pub back: u32,
    pub kept: u32,
    pub lent: u32,
    pub declined: u32,
    pub returned: u32,
    pub borrowing: u32,
}

impl World {
    /// Cells that have met, each with so much.
    pub fn new(bytes: &[u64]) -> Self {
        let mut world = Self {
            cells: BTreeMap::new(),
            bytes: (0..).zip(bytes.iter().copied()).collect(),
            kept: BTreeMap::new(),
            vms: BTreeMap::new(),
            stale: BTreeSet::new(),
            links: Links::default(),
            asked: Vec::new(),
            count: Count::default(),
        };
        for number in world.bytes.clone().into_keys() {
            world.start(CellId { number, life: 1 }, &[]);
        }
        while let Some((from, to)) = { world.links.under_way().next() } {
            world.deliver(from, to);
        }
        world
    }

    /// A cell starts, reads its record, finds the VMs that run there, and of those that have ended
    /// these; then links to all that live.
    pub fn start(&mut self, cell: CellId, ended: &[(Vm, Amounts)]) {
        let others: Vec<CellId> = self.cells.keys().copied().collect();
        let kept = self.kept.get(&cell.number).cloned().unwrap_or_default();
        let mut ledger = Ledger::new(cell, self.bytes[&cell.number], kept);
        for (number, (_, parts)) in self.vms.iter().filter(|(_, (at, _))| *at == cell.number) {
            ledger.find(vm(*number), parts.clone());
        }
        self.stale.retain(|(at, _)| *at != cell.number);
        for (number, parts) in ended {
            ledger.find(vm(*number), parts.clone());
            self.stale.insert((cell.number, *number));
        }
        self.cells.insert(cell, ledger);
        for other in others {
            self.links.connect(cell, other);
            self.act(cell, |ledger| ledger.link(other));
            self.act(other, |ledger| ledger.link(cell));
        }
    }

    /// Whether the cell can start anew: all others know that it died.
    pub fn can_start(&self, number: CellNumber) -> bool {
        self.living(number).is_none() && self.links.knows_deaths_of(number)
    }

    pub fn living(&self, number: CellNumber) -> Option<CellId> {
        self.cells.keys().find(|cell| cell.number == number).copied()
    }

    pub fn act(&mut self, at: CellId, act: impl FnOnce(&mut Ledger) -> Vec<Effect>) {
        let Some(ledger) = self.cells.get_mut(&at) else {
            return;
        };
        let effects = act(ledger);
        self.carry_out(at, effects);
    }

    pub fn carry_out(&mut self, at: CellId, effects: impl IntoIterator<Item = Effect>) {
        for effect in effects {
            match effect {
                Effect::Keep(given) => _ = self.kept.insert(at.number, given),
                Effect::Send(to, message) => {
                    self.links.send(at, to, message);
                }
                Effect::Taken(by) => {
                    self.answered(at, by);
                    self.count.taken += 1;
                }
                Effect::Back(by) => {
                    self.answered(at, by);
                    self.count.back += 1;
                }
                Effect::Kept(by) => {
                    self.answered(at, by);
                    self.count.kept += 1;
                }
                // The home agrees as long as it has the memory.
                Effect::Requested(by, bytes) => self.act(at, |ledger| ledger.reply(by, bytes, true)),
                Effect::Lent(..) => self.count.lent += 1,
                Effect::Declined(..) => self.count.declined += 1,
                Effect::Returned(_, bytes) => self.count.returned += u32::from(bytes > 0),
            }
        }
    }

    fn answered(&mut self, at: CellId, by: CellNumber) {
        let asked = self.asked.iter().position(|asked| *asked == (at, by));
        self.asked.remove(asked.expect("asked once, answered once"));
    }

    fn ask(&mut self, at: CellId, of: CellNumber, effects: Result<Vec<Effect>, Refusal>) -> Vec<Effect> {
        if effects.is_ok() {
            self.asked.push((at, of));
        }
        effects.unwrap_or_default()
    }

    /// A cell grants memory to another, if it can. Returns the effects.
    pub fn give(&mut self, at: CellId, to: CellNumber, bytes: u64) -> Vec<Effect> {
        let effects = self.cells.get_mut(&at).expect("lives").give(to, bytes);
        self.ask(at, to, effects)
    }

    pub fn recall(&mut self, at: CellId, from: CellNumber, bytes: u64) -> Vec<Effect> {
        let effects = self.cells.get_mut(&at).expect("lives").recall(from, bytes);
        self.ask(at, from, effects)
    }

    /// A cell requests memory of another.
    pub fn request(&mut self, at: CellId, of: CellNumber, bytes: u64) -> Vec<Effect> {
        let ledger = self.cells.get_mut(&at).expect("lives");
        ledger.request(of, bytes).unwrap_or_default()
    }

    /// A cell requests back what is free of the memory that another requested.
    pub fn release(&mut self, at: CellId, from: CellNumber, bytes: u64) -> Vec<Effect> {
        let ledger = self.cells.get_mut(&at).expect("lives");
        ledger.release(from, bytes).unwrap_or_default()
    }

    /// A cell returns what it requested of another, if so much is free.
    pub fn give_back(&mut self, at: CellId, to: CellNumber, bytes: u64) -> Vec<Effect> {
        let ledger = self.cells.get_mut(&at).expect("lives");
        ledger.give_back(to, bytes).unwrap_or_default()
    }

    /// A VM starts, if there is memory for it.
    pub fn run(&mut self, at: CellId, number: Vm, bytes: u64) {
        if self.vms.contains_key(&number) {
            return;
        }
        let ledger = self.cells.get_mut(&at).expect("lives");
        if let Some(parts) = ledger.occupy(vm(number), bytes).cloned() {
            self.count.borrowing += u32::from(parts.keys().any(|home| *home != at.number));
            self.vms.insert(number, (at.number, parts));
        }
    }

    /// Ends a VM. Its cell is notified if it is alive.
    pub fn end(&mut self, number: Vm) -> Option<Amounts> {
        let (at, parts) = self.vms.remove(&number)?;
        if let Some(ledger) = self.living(at).and_then(|cell| self.cells.get_mut(&cell)) {
            ledger.vacate(&vm(number));
            return None;
        }
        Some(parts)
    }

    /// A cell finds that a VM has ended that it took for running.
    pub fn give_up(&mut self, at: CellNumber, number: Vm) {
        self.stale.remove(&(at, number));
        if let Some(ledger) = self.living(at).and_then(|cell| self.cells.get_mut(&cell)) {
            ledger.vacate(&vm(number));
        }
    }

    pub fn deliver(&mut self, from: CellId, to: CellId) {
        if let Some(message) = self.links.receive(from, to) {
            self.act(to, |ledger| ledger.take(from, message));
        }
    }

    pub fn crash(&mut self, cell: CellId) {
        self.cells.remove(&cell);
        self.asked.retain(|(at, _)| *at != cell);
        self.links.crash(cell, self.cells.keys().copied());
    }

    /// Delivers a death to a cell. Undelivered packets of the dead cell are dropped.
    pub fn learn(&mut self, at: CellId, dead: CellId) {
        self.links.learn(at, dead);
        self.asked.retain(|asked| *asked != (at, dead.number));
        if let Some(ledger) = self.cells.get_mut(&at) {
            ledger.dead(dead);
        }
    }

    /// Checks the invariants. Returns the violated one.
    pub fn broken(&self) -> Option<String> {
        for (home, bytes) in &self.bytes {
            // Bytes that VMs really use, whichever cell counts them.
            let of_vms = self.vms.values().filter_map(|(_, parts)| parts.get(home));
            let used = of_vms.sum::<u64>();
            if used > *bytes {
                return Some(format!("{used} bytes of cell {home}'s {bytes} are used"));
            }
            // Bytes that may still be used: those of the holders and the home's own.
            let kept = self.kept.get(home).cloned().unwrap_or_default();
            let own = self.living(*home).map(|cell| &self.cells[&cell]);
            let given = kept.values().sum::<u64>() + own.map_or(0, Ledger::own_free);
            let own_vms = self.vms.values().filter(|(at, _)| at == home);
            let own_vms: u64 = own_vms.filter_map(|(_, parts)| parts.get(home)).sum();
            if given + own_vms > *bytes {
                return Some(format!(
                    "{given} of cell {home}'s {bytes} are given or free, {own_vms} used"
                ));
            }
            for (cell, ledger) in &self.cells {
                let held = ledger.held().get(home).copied().unwrap_or(0);
                if ledger.returnable(*home) > held {
                    return Some(format!("{cell} can return more of {home} than it holds, {held}"));
                }
                let counted = kept.get(&cell.number).copied().unwrap_or(0);
                if held > counted {
                    return Some(format!(
                        "{cell} holds {held} of cell {home}, which counts {counted}"
                    ));
                }
                if self.links.is_quiet() && own.is_some() && held < counted {
                    return Some(format!(
                        "all is quiet, {cell} holds {held} of {home}, {counted} given"
                    ));
                }
            }
        }
        if self.links.is_quiet() && !self.asked.is_empty() {
            return Some("all is quiet and a question has no answer".to_owned());
        }
        None
    }

    /// When all VMs have ended and all is called back: each cell has its memory again.
    pub fn lost(&self) -> Option<String> {
        let mut all = self.cells.iter();
        let lost = all.find(|(cell, ledger)| ledger.own_free() != self.bytes[&cell.number])?;
        Some(format!("{} has lost memory: {:?}", lost.0, lost.1))
    }
}
