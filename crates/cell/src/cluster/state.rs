//! The decisions and replies of a cell: placement and names of VMs. Without I/O, clock or threads.
//!
//! Every cell has a copy of the table of cells and VMs ([`protocol::agreement`]). A VM's name is claimed from
//! all cells before it starts. Only the cell that is to run it promises its memory, so no two can promise the
//! same: its own, and the memory that others have granted it ([`loans`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use config::cluster::CellPlan;
use policy::placement::Assertions;
use protocol::CellId;
use protocol::agreement::{Effect, Message, Node};
use protocol::grant::{Amounts, Ledger};
use protocol::multicast::{self, Multicast, ReplyPath};
use registry::cluster::interface::{AdmitVm, CellRequest, CellResponse, RunningVm, VmShare};

use super::routes::{MulticastRoutes, Route};
use borrowing::Borrowing;
pub use cpu_lending::BusyCpus;
use cpu_lending::CpuLoans;
use failures::Failure;
use loans::Loans;
use region_moves::RegionMoves;
use regions::SharedRegions;

mod action;
mod borrowing;
mod cordons;
mod cpu_lending;
mod cpu_loans;
mod cpu_reservations;
mod departures;
mod failures;
mod forgetting;
mod loans;
mod message;
mod places;
mod region_moves;
mod regions;
#[cfg(test)]
pub(in crate::cluster) mod tests;
mod view;

pub use action::Action;
pub use borrowing::limits as borrowing_limits;
pub use message::{CellMessage, CellPayload, Key, RegionEntry, Value};
pub use region_moves::PagesMoved;

/// Number of VMs just sent on that are remembered. One that was refused there is forgotten by this limit
/// alone.
const SENT_ON_MAX: usize = 16;

/// A connection of a VM's monitor or a command.
pub type Client = u64;

/// Cells whose answer is awaited, and how many messages each has sent so far.
pub type Awaited = BTreeMap<CellId, u64>;

/// Decisions and records of one cell's process.
#[derive(Debug)]
pub struct State {
    me: CellId,
    plan: CellPlan,
    node: Node<Key, Value>,
    multicast: Multicast<CellPayload>,
    route: Route,
    pid: u32,
    /// Whether it takes no new VM.
    is_cordoned: bool,
    /// Whether drivers choose what its CPUs run.
    has_drivers: bool,
    cpu_loans: CpuLoans,
    /// The memory that is this cell's, and its use.
    ledger: Ledger,
    loans: Loans,
    borrowing: Borrowing,
    shared: SharedRegions,
    region_moves: RegionMoves,
    /// The client of each VM of this cell, by the VM's name.
    tenants: BTreeMap<String, Client>,
    /// Claims under way, for a client, if it is still connected.
    claims: BTreeMap<u64, (Option<Client>, String, VmShare)>,
    /// Clients that wait until all cells have received a change.
    leaving: BTreeMap<u64, Client>,
    /// VMs that this cell's last process had, whose monitors have not come yet.
    orphans: BTreeSet<String>,
    /// VMs that their process has left for its next one, which has not come yet. The number identifies the
    /// departure: a VM that is left again in the meantime gets its whole time again.
    left: BTreeMap<String, u64>,
    /// The number of the last departure.
    last_left: u64,
    /// VMs that wait until this cell has links to the others. Alone, it would take any name for free.
    early: Option<Vec<(Client, AdmitVm)>>,
    /// Clients that wait until this cell has links to the others, and its VMs are adopted.
    trials: Vec<Client>,
    has_met: bool,
    /// The last few VMs that were sent to other cells and are not in the table yet.
    sent_on: VecDeque<(String, u16, VmShare)>,
    /// Cells of this host that have failed.
    failures: BTreeMap<u16, Failure>,
    /// VMs that a process transfers; it may end its connection before the next one has another.
    handed: BTreeSet<String>,
    /// Number of messages received from each cell.
    words: BTreeMap<CellId, u64>,
    /// The last incarnation of each cell that this one has found dead.
    dead: BTreeMap<u16, u32>,
    /// Cells of other hosts that have sent nothing to this incarnation yet, where VMs of lost hosts end
    /// ([`State::expecting`]). Until they have, or have lapsed, no name is claimed: it may be that of a VM
    /// that is only just ending.
    expected: BTreeSet<u16>,
    /// Cells whose hosts have left the cluster.
    departed: BTreeSet<u16>,
    /// Facts that a user of this host asserts on cells' capacity.
    assertions: Assertions,
}

impl State {
    /// A cell without links. `pid` is its process; `lent` is what its last process had on record, if it lent
    /// memory; `running` are the VMs of the host: the first cell to start again has no other to learn them
    /// from.
    pub fn new(
        me: CellId,
        pid: u32,
        plan: CellPlan,
        lent: Option<Amounts>,
        running: impl IntoIterator<Item = RunningVm>,
    ) -> Self {
        let running: Vec<RunningVm> = running.into_iter().collect();
        let mut node = Node::new(me);
        let lent = lent.unwrap_or_else(|| loans::used(&running, me.number));
        let mut ledger = Ledger::new(me, plan.memory_bytes, lent);
        let mut orphans = BTreeSet::new();
        let shared = SharedRegions::find(me.number, &running, &mut ledger);
        for vm in running {
            if vm.cell == me.number {
                let parts = loans::parts(me.number, vm.share, &vm.borrowed);
                ledger.find(vm.name.clone(), parts);
                orphans.insert(vm.name.clone());
            }
            let value = Value::Vm {
                share: vm.share,
                borrowed: vm.borrowed,
                cells: vm.cells,
                borrowed_cpus: vm.borrowed_cpus,
                regions: vm.regions,
            };
            node.find(Key::Vm(vm.name), vm.cell, value);
        }
        // Without links there is no other cell to wait for.
        let value = Value::Cell {
            pid,
            plan: plan.clone(),
            lent: ledger.given().clone(),
            lent_on_request: Amounts::new(),
            is_cordoned: false,
            regions: shared.entries(&ledger, me.number),
        };
        let (_, effects) = node.claim(Key::Cell(me.number), value);
        debug_assert!(effects.iter().any(|effect| matches!(effect, Effect::Won(_))));
        node.begin_meeting();
        Self {
            me,
            plan,
            node,
            multicast: Multicast::new(me),
            route: Route::default(),
            pid,
            is_cordoned: false,
            has_drivers: false,
            cpu_loans: CpuLoans::default(),
            ledger,
            loans: Loans::default(),
            borrowing: Borrowing::default(),
            shared,
            region_moves: RegionMoves::default(),
            tenants: BTreeMap::new(),
            claims: BTreeMap::new(),
            leaving: BTreeMap::new(),
            orphans,
            left: BTreeMap::new(),
            last_left: 0,
            has_met: false,
            sent_on: VecDeque::new(),
            early: Some(Vec::new()),
            trials: Vec::new(),
            failures: BTreeMap::new(),
            handed: BTreeSet::new(),
            words: BTreeMap::new(),
            dead: BTreeMap::new(),
            expected: BTreeSet::new(),
            departed: BTreeSet::new(),
            assertions: Assertions::default(),
        }
    }

    /// The same, with known route costs to other cells.
    #[must_use]
    pub fn with_route_costs(self, costs: MulticastRoutes) -> Self {
        Self {
            route: Route::new(costs),
            ..self
        }
    }

    /// Sets the route costs for multicast trees, from the next message to all on.
    pub fn set_route_costs(&mut self, costs: MulticastRoutes) {
        self.route = Route::new(costs);
    }

    /// Records that there are links to all cells that ran when this one started, or that they don't answer.
    pub fn handle_all_linked(&mut self) -> Vec<Action> {
        self.has_met = true;
        self.pass_is_due();
        let effects = self.node.has_met();
        let mut acts = self.acts(effects);
        acts.extend(self.release());
        acts
    }

    /// Whether all cells that ran when this one started have sent their hellos, so that it gives VMs places.
    pub fn has_started(&self) -> bool {
        self.early.is_none()
    }

    /// Handles VMs and clients that came early, once the memory that this cell's VMs use is known from all
    /// other cells.
    fn release(&mut self) -> Vec<Action> {
        if !self.has_met || !self.node.is_ready() || !self.ledger.is_ready() {
            return Vec::new();
        }
        let trials = std::mem::take(&mut self.trials);
        let mut acts: Vec<Action> = trials.into_iter().map(Action::ReportAdopted).collect();
        if !self.expected.is_empty() {
            acts.extend(self.refuse_early());
            return acts;
        }
        let early = self.early.take().unwrap_or_default();
        acts.extend(
            early
                .into_iter()
                .flat_map(|(client, host)| self.host(client, host)),
        );
        acts
    }

    /// Records a link to a cell. An earlier incarnation of it is dead. `gathers` says whether the cell speaks
    /// packets of replies, and requests for memory, which are of the same version.
    pub fn linked(&mut self, cell: CellId, gathers: bool) -> Vec<Action> {
        let earlier: Vec<CellId> = self
            .node
            .links()
            .filter(|known| known.number == cell.number)
            .collect();
        // First the new incarnation, whose vote counts, before claims that waited for the old one go on.
        self.multicast.link(cell, gathers);
        self.can_be_asked(cell, gathers);
        self.pass_is_due();
        let effects = self.node.link(cell);
        let mut acts = self.acts(effects);
        for dead in earlier {
            acts.extend(self.dead(dead));
        }
        let effects = self.ledger.link(cell);
        acts.extend(self.lending_acts(effects));
        acts
    }

    /// Records that a cell is dead.
    pub fn dead(&mut self, cell: CellId) -> Vec<Action> {
        self.words.remove(&cell);
        let last = self.dead.entry(cell.number).or_default();
        *last = (*last).max(cell.life);
        let mut acts = posted(self.multicast.dead(cell)).collect::<Vec<_>>();
        let effects = self.node.dead(cell);
        acts.extend(self.acts(effects));
        self.ledger.dead(cell);
        self.drop_departed();
        acts.extend(self.lender_waits_in_vain(cell));
        acts.extend(self.lender_is_dead(cell));
        self.pass_is_due();
        acts.extend(self.release());
        acts
    }

    /// Handles a message from a cell.
    pub fn handle_message(&mut self, from: CellId, message: CellMessage) -> Vec<Action> {
        *self.words.entry(from).or_default() += 1;
        self.pass_is_due();
        let mut acts = Vec::new();
        for effect in self.multicast.take(from, message) {
            match effect {
                multicast::Effect::Send(to, packet) => acts.push(Action::Send(to, packet)),
                multicast::Effect::Deliver(source, message, path) => {
                    // A relay brings a message that another cell has sent, so that cell lived then.
                    if source != from {
                        *self.words.entry(source).or_default() += 1;
                    }
                    acts.extend(self.receive(source, message, path));
                }
            }
        }
        acts
    }

    /// Handles a message that could not be sent: there is no link to the cell.
    pub fn handle_unsent(&mut self, to: CellId, message: CellMessage) -> Vec<Action> {
        posted(self.multicast.unsent(to, message)).collect()
    }

    /// Whether there must be a tick, [`super::limits::TICK`] from now.
    pub fn needs_tick(&self) -> bool {
        self.multicast.needs_tick() || self.node.needs_tick()
    }

    /// Handles that tick.
    pub fn tick(&mut self) -> Vec<Action> {
        let mut acts: Vec<Action> = posted(self.multicast.tick()).collect();
        let effects = self.node.tick();
        acts.extend(self.acts(effects));
        acts
    }

    /// Handles a message of a cell, over whichever transport.
    fn receive(&mut self, from: CellId, said: CellPayload, path: Option<ReplyPath>) -> Vec<Action> {
        let mut acts = match said {
            CellPayload::Table(message) => {
                if matches!(message, Message::Hello { .. }) {
                    self.expected.remove(&from.number);
                }
                let effects = self.node.take(from, message, path);
                self.acts(effects)
            }
            CellPayload::Grant(message) => {
                let effects = self.ledger.take(from, message);
                self.lending_acts(effects)
            }
        };
        // A VM that has got there is in the table from now on, until it ends.
        let node = &self.node;
        self.sent_on
            .retain(|(name, _, _)| node.owner(&Key::Vm(name.clone())).is_none());
        acts.extend(self.release());
        acts
    }

    /// Handles a client's request.
    pub fn handle_request(&mut self, client: Client, ask: CellRequest) -> Vec<Action> {
        if !ask.is_report() {
            self.pass_is_due();
        }
        match ask {
            CellRequest::AdmitVm(host) => self.host(client, host),
            CellRequest::Leave { name } => self.leave(client, &name),
            CellRequest::TakeRegion { vm, region } => self.take_region_in_round(client, vm, region, 0),
            CellRequest::MoveRegion { region, to } => self.move_region_in_round(client, region, to, 0),
            CellRequest::Adopt { name, again } => vec![self.adopt(client, name, again)],
            CellRequest::Lend { to, bytes } => self.lend(client, to, bytes),
            CellRequest::Reclaim { from, bytes } => self.reclaim(client, from, bytes),
            CellRequest::LendCpu {
                cpu,
                borrower,
                is_automatic,
            } => vec![self.lend_cpu(client, cpu, borrower, is_automatic)],
            CellRequest::CpuLoad => vec![self.report_cpu_load(client)],
            CellRequest::Windows(report) => vec![Action::ArrangeWindows(client, report)],
            CellRequest::ReturnCpu { vm, vcpu, lender } => vec![Action::ReturnCpu {
                client,
                vm,
                vcpu,
                lender,
            }],
            CellRequest::BorrowCpus { vm, cpus } => self.borrow_cpus(client, &vm, cpus),
            CellRequest::ReserveCpu { vm, permille } => self.reserve_cpu(client, &vm, permille),
            CellRequest::Cordon { cordoned } => self.cordon(client, cordoned),
            CellRequest::Recover { cell } => self.recover(client, cell),
            CellRequest::Forget { cells } => self.forget(client, &cells),
            CellRequest::Ping | CellRequest::TakeHosts => vec![Action::Answer(client, CellResponse::Done)],
            CellRequest::Vcpus => vec![Action::ReportVcpus(client)],
            CellRequest::CpuLending => vec![Action::ReportCpuLending(client)],
            CellRequest::Protocols => vec![Action::ReportProtocols(client)],
            CellRequest::Trial if self.early.is_none() => vec![Action::ReportAdopted(client)],
            CellRequest::Trial => {
                self.trials.push(client);
                self.release()
            }
            CellRequest::Status => vec![Action::Answer(client, CellResponse::Status(self.status()))],
            CellRequest::End => vec![Action::Answer(client, CellResponse::Done), Action::End],
        }
    }

    /// Transfers a VM from the process that serves it.
    fn adopt(&mut self, client: Client, name: String, again: bool) -> Action {
        if self.tenants.contains_key(&name) {
            self.handed.insert(name.clone());
            return Action::Adopt(client, name, again);
        }
        let why = format!("VM {name} has no place in cell {}", self.me.number);
        Action::Answer(client, CellResponse::Refused { why })
    }

    /// Whether a cell has not sent its hello yet.
    pub fn is_unheard(&self, cell: CellId) -> bool {
        self.node.awaits_hello(cell)
    }

    /// The cells whose answer a client's request waits for; empty if it is answered.
    pub fn awaited(&self, client: Client) -> Awaited {
        let words = |cell: CellId| (cell, self.words.get(&cell).copied().unwrap_or(0));
        let claiming = self.claims.values().any(|(waits, _, _)| *waits == Some(client));
        let leaving = || self.leaving.values().any(|waits| *waits == client);
        if !claiming && !leaving() && !self.region_moves.is_announcing(client) {
            return self.lender_waits_for(client).map(words).collect();
        }
        self.node.awaited().into_iter().map(words).collect()
    }

    /// Those of `then`, which [`State::awaited`] returned a while ago, that the request still waits for and
    /// that have sent no message since.
    pub fn silent_since(&self, client: Client, then: &Awaited) -> Vec<CellId> {
        let now = self.awaited(client);
        let silent = then.iter().filter(|(cell, words)| now.get(cell) == Some(words));
        silent.map(|(cell, _)| *cell).collect()
    }

    /// Publishes this cell's entry of the table, if it has changed.
    fn publish(&mut self) -> Option<(u64, Vec<Effect<Key, Value>>)> {
        let value = Value::Cell {
            pid: self.pid,
            plan: self.plan.clone(),
            lent: self.ledger.given().clone(),
            lent_on_request: self.ledger.given_on_request().clone(),
            is_cordoned: self.is_cordoned,
            regions: self.shared.entries(&self.ledger, self.me.number),
        };
        self.node.change(&Key::Cell(self.me.number), Some(value))
    }

    fn say(&mut self, to: CellId, said: CellPayload) -> impl Iterator<Item = Action> + use<> {
        posted(self.multicast.send(to, said))
    }

    /// Sends to all cells, along the tree that is best for those that can be in one. Its relays gather the
    /// replies.
    fn tell(&mut self, message: Message<Key, Value>) -> impl Iterator<Item = Action> + use<> {
        let fit: Vec<CellId> = self.multicast.fit().collect();
        if fit != self.route.cells() {
            self.route.lead(self.me.number, fit);
        }
        let request = message.request();
        let told =
            self.multicast
                .send_to_all(&CellPayload::Table(message), self.route.hops(), request.is_some());
        if let Some(request) = request {
            self.node.gathered(request, told.gathered);
        }
        posted(told.effects)
    }

    /// Translates the table's effects for clients and cells.
    fn acts(&mut self, effects: Vec<Effect<Key, Value>>) -> Vec<Action> {
        let mut acts = Vec::new();
        for effect in effects {
            match effect {
                Effect::Send(to, message) => acts.extend(self.say(to, CellPayload::Table(message))),
                Effect::Tell(message) => acts.extend(self.tell(message)),
                Effect::Reply {
                    to,
                    message,
                    path,
                    at_once,
                } => {
                    let said = CellPayload::Table(message);
                    acts.extend(posted(self.multicast.reply(to, path, at_once, said)));
                }
                Effect::Won(claim) => match self.claims.remove(&claim) {
                    Some((Some(client), name, _)) => {
                        acts.push(Action::Answer(client, CellResponse::Hosted(self.place(&name))));
                        // The last process may have had one of that name, as another cell has just reported.
                        self.has_come(&name);
                        self.tenants.insert(name, client);
                    }
                    // The client is gone.
                    Some((None, name, _)) => acts.extend(self.remove(&name).1),
                    None => {}
                },
                Effect::Lost { claim, to } => {
                    let Some((client, name, _)) = self.claims.remove(&claim) else {
                        continue;
                    };
                    // It may have been found to be this cell's own.
                    self.ledger.vacate(&name);
                    self.pass_is_due();
                    self.inherit(&name);
                    let why = places::taken(&name, to).to_string();
                    acts.extend(client.map(|client| Action::Answer(client, CellResponse::Refused { why })));
                }
                Effect::Heard(change) => acts.extend(self.all_heard(change)),
                Effect::Inherited(Key::Vm(name)) => {
                    // A VM that is about to start keeps its memory: reports of others may be of an earlier
                    // VM.
                    if self.ledger.parts(&name).is_none() {
                        self.inherit(&name);
                    }
                    if !self.tenants.contains_key(&name) {
                        self.orphans.insert(name);
                    }
                }
                // It was claimed before there were links.
                Effect::Inherited(Key::Cell(_)) => {}
            }
        }
        acts
    }
}

/// The messages for links among the effects of [`protocol::multicast`].
fn posted(effects: Vec<multicast::Effect<CellPayload>>) -> impl Iterator<Item = Action> {
    effects.into_iter().filter_map(|effect| match effect {
        multicast::Effect::Send(to, packet) => Some(Action::Send(to, packet)),
        // Only received messages are delivered.
        multicast::Effect::Deliver(..) => None,
    })
}
