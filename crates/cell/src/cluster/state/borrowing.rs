//! Loans that begin by themselves ([`policy::memory::borrowing`]): requests to other cells of the host, their
//! replies, and VMs that wait for memory.
//!
//! A cell makes a pass at most every [`super::super::limits::BORROWING_PERIOD`], after an event, and only
//! while it is short of memory or has memory to return. Its table of the others may be stale, so the other
//! cell decides. A request that was declined is not repeated before the table shows more free memory there,
//! so passes end.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use config::cluster::BorrowingSpec;
use policy::memory::borrowing::{self, Holder, Home, Limits, OwnMemory, Step, VmPreference};
use policy::placement::CellCapacity;
use protocol::CellId;
use protocol::grant::Amounts;
use registry::cluster::interface::{AdmitVm, VmShare};

use super::view::KnownCell;
use super::{Action, Client, State, regions};

/// Maximum number of times that a VM waits for memory: a cell that declines gets one request, and several VMs
/// may compete for the same memory.
const ROUNDS_MAX: u8 = 8;

/// State of a cell's own borrowing.
#[derive(Debug, Default)]
pub(super) struct Borrowing {
    /// None if borrowing does not begin by itself.
    limits: Option<Limits>,
    /// Whether an event has happened since the last pass.
    is_due: bool,
    /// Requests for loans without reply, by home, in the order of the replies, each with the VM that waits
    /// for it.
    requests: BTreeMap<u16, VecDeque<Option<u64>>>,
    /// Requests to holders for unused memory, as `requests`.
    releases: BTreeMap<u16, VecDeque<Option<u64>>>,
    /// VMs that wait for memory.
    waiting: BTreeMap<u64, Waiting>,
    /// The number of the last of them.
    last_waiting: u64,
    /// Homes that declined, with the free memory that the table showed then or less since, in bytes.
    declined: BTreeMap<u16, u64>,
    /// Holders that returned nothing, with their unused memory by the table, in bytes.
    kept: BTreeMap<u16, u64>,
    /// Linked cells whose version has requests for memory.
    speakers: BTreeSet<CellId>,
    /// The amounts on request that were persisted last.
    persisted: Amounts,
}

/// A VM that waits for memory of other cells.
#[derive(Debug)]
struct Waiting {
    client: Client,
    host: AdmitVm,
    /// Number of replies that are missing.
    open: usize,
    round: u8,
}

/// The amounts of a cell with `cpus` CPUs and `memory_bytes`, by its cluster's file and the rate at which one
/// CPU of this host allocates memory; none if borrowing does not begin by itself.
pub fn limits(
    spec: &BorrowingSpec,
    bytes_per_second: impl FnOnce() -> u64,
    cpus: usize,
    memory_bytes: u64,
) -> Option<Limits> {
    if !spec.automatic {
        return None;
    }
    let of_chunk = match spec.chunk {
        Some(chunk) => Limits::of_chunk(chunk.0),
        None => Limits::measured(bytes_per_second(), cpus, memory_bytes),
    };
    let low_water_bytes = spec.low_water.map_or(of_chunk.low_water_bytes, |size| size.0);
    Some(Limits {
        chunk_bytes: of_chunk.chunk_bytes,
        low_water_bytes,
        // Below the low water a lender would recall what it has just lent.
        floor_bytes: spec
            .floor
            .map_or(of_chunk.floor_bytes, |size| size.0)
            .max(low_water_bytes),
    })
}

impl State {
    /// The cell with automatic borrowing. `requested` is the record of the amounts that borrowers requested;
    /// without one, all that is lent counts as requested.
    #[must_use]
    pub fn with_borrowing(mut self, limits: Option<Limits>, requested: Option<Amounts>) -> Self {
        self.borrowing.limits = limits;
        let all = limits.map_or_else(Amounts::new, |_| self.ledger.given().clone());
        self.ledger.set_given_on_request(requested.unwrap_or(all));
        self.borrowing.persisted = self.ledger.given_on_request().clone();
        // Without links there is no cell to inform.
        let _ = self.publish();
        self
    }

    /// Whether there must be a pass, [`super::super::limits::BORROWING_PERIOD`] from now.
    pub fn needs_pass(&self) -> bool {
        let Some(limits) = self.borrowing.limits else {
            return false;
        };
        let has_spare = || {
            let mut homes = self.ledger.available();
            homes.any(|(home, _)| self.ledger.returnable(home) > 0)
        };
        let is_short = || self.ledger.own_free() < limits.low_water_bytes;
        self.borrowing.is_due && self.early.is_none() && (is_short() || has_spare())
    }

    /// Makes the pass: requests, returns and recalls memory.
    pub fn pass(&mut self) -> Vec<Action> {
        self.borrowing.is_due = false;
        let Some(limits) = self.borrowing.limits.filter(|_| self.early.is_none()) else {
            return Vec::new();
        };
        self.note_estimates();
        let homes = self.homes(true);
        let numbers: Vec<u16> = homes.iter().map(|home| home.cell).collect();
        let preferred = borrowing::combined(&self.preferences(), &numbers);
        let own = OwnMemory {
            free_bytes: self.ledger.own_free(),
            is_cordoned: self.takes_no_vm(),
        };
        let steps = borrowing::pass(own, &preferred, &homes, &self.holders(true), limits);
        let mut acts = Vec::new();
        for step in steps {
            // A loan for a VM is not returned before the VM has it.
            let is_return = matches!(step, Step::Return { .. });
            if !is_return || self.borrowing.waiting.is_empty() {
                acts.extend(self.take_step(step, None).unwrap_or_default());
            }
        }
        acts
    }

    /// Requires a pass after the current event.
    pub(super) fn pass_is_due(&mut self) {
        self.borrowing.is_due = true;
    }

    /// Whether a command or an asserted fact keeps VMs from this cell.
    pub(super) fn takes_no_vm(&self) -> bool {
        self.is_cordoned || self.assertions.cordon(self.me.number)
    }

    /// Sends a request. `vm` is the number of the VM that waits for the reply. None if there is no link to
    /// the other cell.
    fn take_step(&mut self, step: Step, vm: Option<u64>) -> Option<Vec<Action>> {
        let effects = match step {
            Step::Borrow { from, bytes } => {
                let effects = self.ledger.request(from, bytes).ok()?;
                self.borrowing.requests.entry(from).or_default().push_back(vm);
                effects
            }
            Step::Recall { from, bytes } => {
                let effects = self.ledger.release(from, bytes).ok()?;
                self.borrowing.releases.entry(from).or_default().push_back(vm);
                effects
            }
            Step::Return { to, bytes } => self.ledger.give_back(to, bytes).ok()?,
        };
        Some(self.lending_acts(effects))
    }

    /// Replies to a cell that requests memory.
    pub(super) fn requested(&mut self, by: u16, bytes: u64) -> Vec<Action> {
        let free_bytes = self.ledger.own_free();
        let agrees = self.borrowing.limits.is_some_and(|limits| {
            borrowing::agrees(free_bytes, bytes, self.takes_no_vm(), limits) && self.early.is_none()
        });
        let is_near = self
            .cells()
            .any(|cell| cell.number == by && cell.plan.host == self.plan.host);
        let effects = self.ledger.reply(by, bytes, agrees && is_near);
        self.lending_acts(effects)
    }

    /// Handles a home's reply to a request. `is_lent` is true if it lends.
    pub(super) fn has_replied(&mut self, home: u16, is_lent: bool) -> Vec<Action> {
        if is_lent {
            self.borrowing.declined.remove(&home);
        } else {
            let shown = self.free_by_table(home);
            self.borrowing.declined.insert(home, shown);
        }
        let queue = self.borrowing.requests.get_mut(&home);
        let vm = queue.and_then(VecDeque::pop_front).flatten();
        self.one_reply_less(vm)
    }

    /// Handles the return of memory by a holder.
    pub(super) fn has_returned(&mut self, holder: u16, bytes: u64) -> Vec<Action> {
        if bytes > 0 {
            self.borrowing.kept.remove(&holder);
        } else {
            let shown = self.unused_by_table(holder);
            self.borrowing.kept.insert(holder, shown);
        }
        let queue = self.borrowing.releases.get_mut(&holder);
        let vm = queue.and_then(VecDeque::pop_front).flatten();
        self.one_reply_less(vm)
    }

    /// Admits a VM that has waited for the last reply, or requests what is missing still.
    fn one_reply_less(&mut self, vm: Option<u64>) -> Vec<Action> {
        self.pass_is_due();
        let Some(number) = vm else { return Vec::new() };
        let Some(waiting) = self.borrowing.waiting.get_mut(&number) else {
            return Vec::new();
        };
        waiting.open = waiting.open.saturating_sub(1);
        if waiting.open > 0 {
            return Vec::new();
        }
        match self.borrowing.waiting.remove(&number) {
            Some(Waiting {
                client, host, round, ..
            }) => match self.shared.take_waiting(client) {
                Some(regions::Waiting::Take { vm, region }) => {
                    self.take_region_in_round(client, vm, region, round + 1)
                }
                Some(regions::Waiting::Move { region, to }) => {
                    self.move_region_in_round(client, region, to, round + 1)
                }
                None => self.host_in_round(client, host, round + 1),
            },
            None => Vec::new(),
        }
    }

    /// Records whether a linked cell understands requests for memory.
    pub(super) fn can_be_asked(&mut self, cell: CellId, speaks: bool) {
        if speaks {
            self.borrowing.speakers.insert(cell);
        }
    }

    /// Takes the requests to a dead cell for declined.
    pub(super) fn lender_is_dead(&mut self, dead: CellId) -> Vec<Action> {
        self.borrowing.speakers.remove(&dead);
        let number = dead.number;
        self.borrowing.declined.remove(&number);
        self.borrowing.kept.remove(&number);
        let requests = self.borrowing.requests.remove(&number).unwrap_or_default();
        let releases = self.borrowing.releases.remove(&number).unwrap_or_default();
        let mut acts = Vec::new();
        for vm in requests.into_iter().chain(releases) {
            acts.extend(self.one_reply_less(vm));
        }
        acts
    }

    /// Drops the VM of a client that has gone.
    pub(super) fn waits_no_more(&mut self, client: Client) {
        let waiting = &mut self.borrowing.waiting;
        waiting.retain(|_, waiting| waiting.client != client);
        self.shared.take_waiting(client);
    }

    /// The cells whose reply a client's VM waits for.
    pub(super) fn asked_for(&self, client: Client) -> Vec<u16> {
        let is_clients = |vm: &Option<u64>| {
            let waiting = vm.and_then(|vm| self.borrowing.waiting.get(&vm));
            waiting.is_some_and(|waiting| waiting.client == client)
        };
        let queues = self.borrowing.requests.iter().chain(&self.borrowing.releases);
        let mut cells: Vec<u16> = queues
            .filter(|(_, vms)| vms.iter().any(is_clients))
            .map(|(cell, _)| *cell)
            .collect();
        cells.sort_unstable();
        cells.dedup();
        cells
    }

    /// Free memory of this cell that a VM may use, in bytes.
    pub(super) fn free_for(&self, host: &AdmitVm) -> u64 {
        let own = self.ledger.own_free();
        if host.own {
            return own;
        }
        let allowed = self
            .ledger
            .available()
            .filter(|(home, _)| borrowing::allows(&host.cells, *home));
        allowed.fold(own, |sum, (_, free)| sum.saturating_add(free))
    }

    /// Gives a VM its memory. Returns whether so much is free.
    pub(super) fn occupy(&mut self, host: &AdmitVm) -> bool {
        let bytes = host.share.memory_bytes;
        let low_water = self.borrowing.limits.map(|limits| limits.low_water_bytes);
        let lenders = if host.own {
            Vec::new()
        } else {
            borrowing::in_order(&host.cells, self.ledger.available().collect())
        };
        let vms = self.ledger.vms();
        let is_large = low_water.is_some() && borrowing::is_large(bytes, self.plan.memory_bytes, vms);
        let own = (self.me.number, self.ledger.own_free());
        let parts = borrowing::divide(bytes, own, &lenders, is_large, low_water.unwrap_or(0));
        let Some(parts) = parts else { return false };
        let parts = parts.into_iter().collect();
        self.pass_is_due();
        self.ledger.occupy_parts(host.name.clone(), parts).is_some()
    }

    /// Requests the memory that a VM needs and that is not free. `None` if no cell can lend it.
    pub(super) fn begin_to_borrow(
        &mut self,
        client: Client,
        host: &AdmitVm,
        round: u8,
    ) -> Option<Vec<Action>> {
        self.note_estimates();
        let steps = self.steps_for(host).filter(|_| round < ROUNDS_MAX)?;
        self.borrowing.last_waiting += 1;
        let number = self.borrowing.last_waiting;
        let (mut acts, mut open) = (Vec::new(), 0);
        for step in steps {
            if let Some(asked) = self.take_step(step, Some(number)) {
                acts.extend(asked);
                open += 1;
            }
        }
        if open == 0 {
            return None;
        }
        let host = host.clone();
        let waiting = Waiting {
            client,
            host,
            open,
            round,
        };
        self.borrowing.waiting.insert(number, waiting);
        Some(acts)
    }

    /// Requests `bytes` of one cell for a client, as [`Self::begin_to_borrow`]. `None` if borrowing does not
    /// begin by itself, or the cell can't be asked.
    pub(super) fn request_of(
        &mut self,
        client: Client,
        from: u16,
        bytes: u64,
        round: u8,
    ) -> Option<Vec<Action>> {
        self.note_estimates();
        let may_lend = |home: &Home| home.cell == from && home.lends;
        if self.borrowing.limits.is_none() || round >= ROUNDS_MAX || !self.homes(false).iter().any(may_lend) {
            return None;
        }
        self.borrowing.last_waiting += 1;
        let number = self.borrowing.last_waiting;
        let acts = self.take_step(Step::Borrow { from, bytes }, Some(number))?;
        let share = VmShare {
            memory_bytes: bytes,
            ..VmShare::default()
        };
        let waiting = Waiting {
            client,
            host: AdmitVm::new(String::new(), share),
            open: 1,
            round,
        };
        self.borrowing.waiting.insert(number, waiting);
        Some(acts)
    }

    /// The requests that would give this cell the memory that a VM needs.
    fn steps_for(&self, host: &AdmitVm) -> Option<Vec<Step>> {
        let limits = self.borrowing.limits?;
        let short = host.share.memory_bytes.saturating_sub(self.free_for(host));
        let mut homes = if host.own { Vec::new() } else { self.homes(false) };
        let free = homes.iter().map(|home| (home.cell, home.free_bytes)).collect();
        let order = borrowing::in_order(&host.cells, free);
        homes.retain(|home| order.iter().any(|(cell, _)| *cell == home.cell));
        homes.sort_by_key(|home| order.iter().position(|(cell, _)| *cell == home.cell));
        borrowing::for_admission(short, &homes, &self.holders(false), limits)
    }

    /// The cell in which a VM fits by borrowing, where it fits in none as it is: the one that needs least.
    pub(super) fn place_by_borrowing(&self, host: &AdmitVm, rooms: &[CellCapacity]) -> Option<u16> {
        let limits = self.borrowing.limits.filter(|_| !host.own)?;
        let homes = self.homes(false);
        let spare_of = |cell: u16| match cell == self.me.number {
            true => self.ledger.own_free().saturating_sub(limits.floor_bytes),
            false => {
                let home = homes.iter().find(|home| home.cell == cell && home.lends);
                home.map_or(0, |home| home.free_bytes.saturating_sub(limits.floor_bytes))
            }
        };
        let spare = |borrower: u16| {
            let lenders = rooms.iter().filter(|room| {
                let is_other = room.cell != borrower && room.is_here && !room.is_cordoned;
                is_other && borrowing::allows(&host.cells, room.cell)
            });
            lenders.fold(0_u64, |sum, room| sum.saturating_add(spare_of(room.cell)))
        };
        let short = |room: &CellCapacity| host.share.memory_bytes.saturating_sub(room.free_bytes);
        let can_take = |room: &&CellCapacity| {
            // An asserted amount is a limit that no loan lifts.
            let asserted = self.assertions.0.get(&room.cell);
            if asserted.is_some_and(|asserted| asserted.free_bytes.is_some()) {
                return false;
            }
            let is_open = room.is_here && !room.is_cordoned && room.cpus > 0;
            is_open
                && match room.cell == self.me.number {
                    true => self.steps_for(host).is_some(),
                    false => short(room) > 0 && spare(room.cell) >= short(room),
                }
        };
        let eligible: Vec<&CellCapacity> = rooms
            .iter()
            .filter(|room| host.only.is_none_or(|only| only == room.cell))
            .filter(can_take)
            .collect();
        if host.sent && eligible.iter().any(|room| room.cell == self.me.number) {
            return Some(self.me.number);
        }
        let best = eligible.into_iter().min_by_key(|room| (short(room), room.cell));
        best.map(|room| room.cell)
    }

    /// Other live cells of this host whose version has requests for memory.
    fn others(&self) -> impl Iterator<Item = KnownCell<'_>> {
        self.cells().filter(|cell| {
            let is_near = cell.number != self.me.number && cell.plan.host == self.plan.host;
            let asked = |life| {
                let number = cell.number;
                self.borrowing.speakers.contains(&CellId { number, life })
            };
            is_near && !self.has_failed(cell.number) && self.life(cell.number).is_some_and(asked)
        })
    }

    /// The other cells as lenders. With `in_advance`, one that has not replied yet receives no second
    /// request.
    fn homes(&self, in_advance: bool) -> Vec<Home> {
        let is_open = |cell: u16| {
            let requests = self.borrowing.requests.get(&cell);
            in_advance && requests.is_some_and(|requests| !requests.is_empty())
        };
        let available: Amounts = self.ledger.available().collect();
        let homes = self.others().map(|cell| {
            let free_bytes = self.free_by_table(cell.number);
            let declined = self.borrowing.declined.get(&cell.number);
            Home {
                cell: cell.number,
                free_bytes,
                available_bytes: available.get(&cell.number).copied().unwrap_or(0),
                returnable_bytes: self.ledger.returnable(cell.number),
                lends: !cell.is_cordoned
                    && !self.assertions.cordon(cell.number)
                    && !is_open(cell.number)
                    && declined.is_none_or(|shown| free_bytes > *shown),
            }
        });
        homes.collect()
    }

    /// The other cells as borrowers. With `in_advance`, one that has not replied yet receives no second
    /// request.
    fn holders(&self, in_advance: bool) -> Vec<Holder> {
        let is_open = |cell: u16| {
            let releases = self.borrowing.releases.get(&cell);
            in_advance && releases.is_some_and(|releases| !releases.is_empty())
        };
        let holders = self.others().map(|cell| {
            let unused_bytes = self.unused_by_table(cell.number);
            let kept = self.borrowing.kept.get(&cell.number);
            let is_worth_it = kept.is_none_or(|shown| unused_bytes > *shown) && !is_open(cell.number);
            Holder {
                cell: cell.number,
                unused_bytes: if is_worth_it { unused_bytes } else { 0 },
            }
        });
        holders.collect()
    }

    /// The preferences of this cell's VMs.
    fn preferences(&self) -> Vec<VmPreference> {
        let own = self.vms().filter(|vm| vm.cell == self.me.number);
        own.map(|vm| VmPreference {
            cells: vm.cells.to_vec(),
            suppliers: vm.borrowed.iter().map(|part| part.cell).collect(),
        })
        .collect()
    }

    /// Free memory of another cell itself, as the table shows it.
    fn free_by_table(&self, number: u16) -> u64 {
        let Some(cell) = self.cells().find(|cell| cell.number == number) else {
            return 0;
        };
        let lent = cell.lent.values().copied();
        let here = self.vms().filter(|vm| vm.cell == number);
        let used = here.map(|vm| {
            let borrowed = vm.borrowed.iter().map(|part| part.bytes);
            borrowed.fold(vm.share.memory_bytes, u64::saturating_sub)
        });
        let regions = cell.regions.iter().map(|region| {
            let borrowed = region.borrowed.iter().map(|part| part.bytes);
            borrowed.fold(region.bytes, u64::saturating_sub)
        });
        lent.chain(used)
            .chain(regions)
            .fold(cell.plan.memory_bytes, u64::saturating_sub)
    }

    /// Memory that a holder has requested of this cell and does not use, as the table shows it.
    fn unused_by_table(&self, holder: u16) -> u64 {
        let of = |amounts: &Amounts| amounts.get(&holder).copied().unwrap_or(0);
        let parts = self.parts_of(holder);
        let used = parts
            .filter(|part| part.cell == self.me.number)
            .map(|part| part.bytes);
        let unused = used.fold(of(self.ledger.given()), u64::saturating_sub);
        unused.min(of(self.ledger.given_on_request()))
    }

    /// Records where the table shows less than when a cell declined: an increase since then counts.
    fn note_estimates(&mut self) {
        let mut declined = std::mem::take(&mut self.borrowing.declined);
        for (cell, shown) in &mut declined {
            *shown = (*shown).min(self.free_by_table(*cell));
        }
        self.borrowing.declined = declined;
        let mut kept = std::mem::take(&mut self.borrowing.kept);
        for (cell, shown) in &mut kept {
            *shown = (*shown).min(self.unused_by_table(*cell));
        }
        self.borrowing.kept = kept;
    }

    /// The order to persist what borrowers requested, if it has changed.
    pub(super) fn persist_requested(&mut self) -> Option<Action> {
        let now = self.ledger.given_on_request();
        if self.borrowing.persisted == *now {
            return None;
        }
        self.borrowing.persisted = now.clone();
        Some(Action::PersistLentOnRequest(now.clone()))
    }
}
