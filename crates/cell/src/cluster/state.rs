//! What a cell decides and answers: which VM runs where, and who may. Without I/O, clock or threads.
//!
//! Every cell has a copy of the table of cells and VMs ([`protocol::agreement`]). A VM's name is claimed from
//! all cells before it starts. Only the cell that is to run it promises its memory, so no two can promise the
//! same: its own, and what others have granted it ([`loans`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use config::cluster::CellPlan;
use policy::placement::Assertions;
use protocol::CellId;
use protocol::agreement::{Effect, Message, Node};
use protocol::grant::{self, Amounts, Ledger};
use protocol::multicast::{self, Multicast, Packet, ReplyPath};
use registry::cluster::interface::{
    AdmitVm, CellRequest, CellResponse, LentMemory, RunningVm, VmShare, owner_of,
};
use serde::{Deserialize, Serialize};

use super::routes::{MulticastRoutes, Route};
use failures::Failure;
use loans::Loans;

mod cordons;
mod failures;
mod forgetting;
mod loans;
mod places;
#[cfg(test)]
pub(in crate::cluster) mod tests;
mod view;

/// What an entry of the table is about.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize, Deserialize)]
pub enum Key {
    /// A cell.
    Cell(u16),
    /// A VM, by its name.
    Vm(String),
}

/// What the table says of it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Value {
    /// Of a cell.
    Cell {
        /// The id of its process.
        pid: u32,
        /// What the cell has.
        plan: CellPlan,
        /// What of its memory it has lent.
        lent: Amounts,
        /// Whether it takes no new VM.
        #[serde(default)]
        is_cordoned: bool,
    },
    /// Of a VM.
    Vm {
        /// The part of a cell that it takes.
        share: VmShare,
        /// What of its memory is not its cell's, by lender.
        borrowed: Vec<LentMemory>,
    },
}

/// VMs just sent on that are remembered. One that was refused there is forgotten by this alone.
const SENT_ON_MAX: usize = 16;

/// What cells send one another.
pub type CellMessage = Packet<Said>;

/// What one cell tells another, by whichever way.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Said {
    /// Of the table that all have.
    Table(Message<Key, Value>),
    /// Of memory that one has from another.
    Grant(grant::Message),
}

/// A connection of a VM's monitor or a command.
pub type Client = u64;

/// Cells whose word is waited for, and how many messages each has sent so far.
pub type Awaited = BTreeMap<CellId, u64>;

/// What a cell is to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Act {
    /// Put in writing what is lent, all of it, before what follows is done.
    Keep(Amounts),
    /// Send to a cell.
    Send(CellId, CellMessage),
    /// Answer a client.
    Answer(Client, CellResponse),
    /// Serve a VM of this cell, and answer the client that asks for it; also one that was set aside, if this
    /// says so.
    Adopt(Client, String, bool),
    /// Tell a client where the vCPUs of the cell's VMs are.
    TellVcpus(Client),
    /// Tell a client which protocols this program speaks.
    TellProtocols(Client),
    /// Tell a client when the VMs of the cell's last process are adopted.
    TellAdopted(Client),
    /// End a VM that depends on a failed cell, in which it may have run.
    EndVm {
        /// The VM.
        name: String,
        /// The cell.
        failed: u16,
    },
    /// Give a VM that was left up after a while, unless its next process has come ([`State::give_up`]).
    AwaitLeft(String, u64),
    /// Tell when the host has no VM any more that depends on this cell ([`State::bury`]).
    AwaitEnd(u16),
    /// End the process.
    End,
}

/// A cell.
#[derive(Debug)]
pub struct State {
    me: CellId,
    plan: CellPlan,
    node: Node<Key, Value>,
    multicast: Multicast<Said>,
    route: Route,
    pid: u32,
    /// It takes no new VM.
    is_cordoned: bool,
    /// The memory that is this cell's, and what it is used for.
    ledger: Ledger,
    loans: Loans,
    /// Whose VM each client's is, by name.
    tenants: BTreeMap<String, Client>,
    /// Claims under way, for a client, if it is still there.
    claims: BTreeMap<u64, (Option<Client>, String, VmShare)>,
    /// Who waits until all have heard of a change.
    leaving: BTreeMap<u64, Client>,
    /// VMs that this cell's last process had, whose monitors have not come yet.
    orphans: BTreeSet<String>,
    /// VMs that their process has left for its next one, which has not come yet. Each has a number, by which
    /// one that is left again in the meantime gets its whole time again.
    left: BTreeMap<String, u64>,
    /// The number of the last that was left.
    last_left: u64,
    /// VMs that wait until this cell has met the others. Alone, it would take any name for free.
    early: Option<Vec<(Client, AdmitVm)>>,
    /// Clients that wait until this cell has met the others, and its VMs are adopted.
    trials: Vec<Client>,
    has_met: bool,
    /// VMs that were sent to other cells, and are not in the table yet: the last few.
    sent_on: VecDeque<(String, u16, VmShare)>,
    /// Cells of this host that have failed.
    failures: BTreeMap<u16, Failure>,
    /// VMs that a process hands over, which may end its connection before the next one has another.
    handed: BTreeSet<String>,
    /// Messages that have come from each cell.
    words: BTreeMap<CellId, u64>,
    /// The last life of each cell that this one knows to be dead.
    dead: BTreeMap<u16, u32>,
    /// Cells of other hosts that have said nothing to this life yet, where VMs of lost hosts end
    /// ([`State::expecting`]). Until they have, or have lapsed, no name is claimed: it may be that of a VM
    /// that is only just ending.
    expected: BTreeSet<u16>,
    /// Cells whose hosts have left the cluster.
    departed: BTreeSet<u16>,
    /// What a user of this host asserts of cells' rooms.
    assertions: Assertions,
}

impl State {
    /// A cell without links. `pid` is its process; `lent` is what its last process had in writing, if it lent
    /// anything; `running` are the VMs that the host has: a cell that is the first to start again has nobody
    /// to ask.
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
        for vm in running {
            if vm.cell == me.number {
                let parts = loans::parts(me.number, vm.share, &vm.borrowed);
                ledger.find(vm.name.clone(), parts);
                orphans.insert(vm.name.clone());
            }
            let (share, borrowed) = (vm.share, vm.borrowed);
            node.find(Key::Vm(vm.name), vm.cell, Value::Vm { share, borrowed });
        }
        // Without links there is nobody to ask.
        let value = Value::Cell {
            pid,
            plan: plan.clone(),
            lent: ledger.given().clone(),
            is_cordoned: false,
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
            ledger,
            loans: Loans::default(),
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

    /// What is known of the ways to other cells.
    #[must_use]
    pub fn with_ways(self, costs: MulticastRoutes) -> Self {
        Self {
            route: Route::new(costs),
            ..self
        }
    }

    /// Goes by these ways to other cells from now on: multicast trees, from the next message to all.
    pub fn take_ways(&mut self, costs: MulticastRoutes) {
        self.route = Route::new(costs);
    }

    /// There are links to all cells that ran when this one started, or they don't answer.
    pub fn met(&mut self) -> Vec<Act> {
        self.has_met = true;
        let effects = self.node.has_met();
        let mut acts = self.acts(effects);
        acts.extend(self.release());
        acts
    }

    /// Lets in those that came early, once all that was there to hear has been heard: what this cell's VMs
    /// have of its memory.
    fn release(&mut self) -> Vec<Act> {
        if !self.has_met || !self.node.is_ready() || !self.ledger.is_ready() {
            return Vec::new();
        }
        let trials = std::mem::take(&mut self.trials);
        let mut acts: Vec<Act> = trials.into_iter().map(Act::TellAdopted).collect();
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

    /// There is a link to a cell. An earlier life of it is dead. `gathers` says whether the cell knows
    /// packets of replies.
    pub fn linked(&mut self, cell: CellId, gathers: bool) -> Vec<Act> {
        let earlier: Vec<CellId> = self
            .node
            .links()
            .filter(|known| known.number == cell.number)
            .collect();
        // First the new one, whose word counts, before what waited for the old one goes on.
        self.multicast.link(cell, gathers);
        let effects = self.node.link(cell);
        let mut acts = self.acts(effects);
        for dead in earlier {
            acts.extend(self.dead(dead));
        }
        let effects = self.ledger.link(cell);
        acts.extend(self.lending_acts(effects));
        acts
    }

    /// A cell is dead.
    pub fn dead(&mut self, cell: CellId) -> Vec<Act> {
        self.words.remove(&cell);
        let last = self.dead.entry(cell.number).or_default();
        *last = (*last).max(cell.life);
        let mut acts = posted(self.multicast.dead(cell)).collect::<Vec<_>>();
        let effects = self.node.dead(cell);
        acts.extend(self.acts(effects));
        self.ledger.dead(cell);
        self.drop_departed();
        acts.extend(self.lender_waits_in_vain(cell));
        acts.extend(self.release());
        acts
    }

    /// Something has come over the link from a cell.
    pub fn heard(&mut self, from: CellId, message: CellMessage) -> Vec<Act> {
        *self.words.entry(from).or_default() += 1;
        let mut acts = Vec::new();
        for effect in self.multicast.take(from, message) {
            match effect {
                multicast::Effect::Send(to, packet) => acts.push(Act::Send(to, packet)),
                multicast::Effect::Deliver(source, message, path) => {
                    // A relay brings what another cell has sent, which that cell lived to do.
                    if source != from {
                        *self.words.entry(source).or_default() += 1;
                    }
                    acts.extend(self.told(source, message, path));
                }
            }
        }
        acts
    }

    /// A message to a cell could not be sent: there is no link to it.
    pub fn unsent(&mut self, to: CellId, message: CellMessage) -> Vec<Act> {
        posted(self.multicast.unsent(to, message)).collect()
    }

    /// Whether there must be a tick, [`super::limits::TICK`] from now.
    pub fn needs_tick(&self) -> bool {
        self.multicast.needs_tick() || self.node.needs_tick()
    }

    /// That time has passed.
    pub fn tick(&mut self) -> Vec<Act> {
        let mut acts: Vec<Act> = posted(self.multicast.tick()).collect();
        let effects = self.node.tick();
        acts.extend(self.acts(effects));
        acts
    }

    /// A cell has said something, by whichever way.
    fn told(&mut self, from: CellId, said: Said, path: Option<ReplyPath>) -> Vec<Act> {
        let mut acts = match said {
            Said::Table(message) => {
                if matches!(message, Message::Hello { .. }) {
                    self.expected.remove(&from.number);
                }
                let effects = self.node.take(from, message, path);
                self.acts(effects)
            }
            Said::Grant(message) => {
                let effects = self.ledger.take(from, message);
                self.lending_acts(effects)
            }
        };
        // One that has got there is in the table from now on, until it ends.
        let node = &self.node;
        self.sent_on
            .retain(|(name, _, _)| node.owner(&Key::Vm(name.clone())).is_none());
        acts.extend(self.release());
        acts
    }

    /// A client asks.
    pub fn asked(&mut self, client: Client, ask: CellRequest) -> Vec<Act> {
        match ask {
            CellRequest::AdmitVm(host) => self.host(client, host),
            CellRequest::Leave { name } => self.leave(client, &name),
            CellRequest::Adopt { name, again } => vec![self.adopt(client, name, again)],
            CellRequest::Lend { to, bytes } => self.lend(client, to, bytes),
            CellRequest::Reclaim { from, bytes } => self.reclaim(client, from, bytes),
            CellRequest::Cordon { cordoned } => self.cordon(client, cordoned),
            CellRequest::Recover { cell } => self.recover(client, cell),
            CellRequest::Forget { cells } => self.forget(client, &cells),
            CellRequest::Ping | CellRequest::TakeHosts => vec![Act::Answer(client, CellResponse::Done)],
            CellRequest::Vcpus => vec![Act::TellVcpus(client)],
            CellRequest::Protocols => vec![Act::TellProtocols(client)],
            CellRequest::Trial if self.early.is_none() => vec![Act::TellAdopted(client)],
            CellRequest::Trial => {
                self.trials.push(client);
                self.release()
            }
            CellRequest::Status => vec![Act::Answer(client, CellResponse::Status(self.status()))],
            CellRequest::End => vec![Act::Answer(client, CellResponse::Done), Act::End],
        }
    }

    /// The process that serves a VM wants to hand it over.
    fn adopt(&mut self, client: Client, name: String, again: bool) -> Act {
        if self.tenants.contains_key(&name) {
            self.handed.insert(name.clone());
            return Act::Adopt(client, name, again);
        }
        let why = format!("VM {name} has no place in cell {}", self.me.number);
        Act::Answer(client, CellResponse::Refused { why })
    }

    /// A client's connection has ended, and with it its VM.
    pub fn gone(&mut self, client: Client) -> Vec<Act> {
        self.leaving.retain(|_, waits| *waits != client);
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
        // The admission server holds the places of users' VMs, and says when one has ended.
        if self.handed.remove(&name) || owner_of(&name).is_some() {
            self.last_left += 1;
            self.left.insert(name.clone(), self.last_left);
            return vec![Act::AwaitLeft(name, self.last_left)];
        }
        self.remove(&name).1
    }

    /// Whether the process of a VM that this cell had has not come yet.
    fn is_awaited(&self, name: &str) -> bool {
        self.orphans.contains(name) || self.left.contains_key(name)
    }

    /// The process of a VM has come.
    fn has_come(&mut self, name: &str) {
        self.orphans.remove(name);
        self.left.remove(name);
    }

    /// A VM that was left has ended, if its next process has not come by now.
    pub fn give_up(&mut self, name: &str, number: u64) -> Vec<Act> {
        if self.left.get(name) != Some(&number) {
            return Vec::new();
        }
        self.left.remove(name);
        self.remove(name).1
    }

    /// The VMs of the last process whose monitors have not come by now have ended.
    pub fn give_up_orphans(&mut self) -> Vec<Act> {
        let mut acts = Vec::new();
        for name in std::mem::take(&mut self.orphans) {
            acts.extend(self.remove(&name).1);
        }
        acts
    }

    /// Whether a cell has not said hello yet.
    pub fn is_unheard(&self, cell: CellId) -> bool {
        self.node.awaits_hello(cell)
    }

    /// Whose word a client's question waits for; empty if it is answered.
    pub fn awaited(&self, client: Client) -> Awaited {
        let words = |cell: CellId| (cell, self.words.get(&cell).copied().unwrap_or(0));
        let claiming = self.claims.values().any(|(waits, _, _)| *waits == Some(client));
        if !claiming && !self.leaving.values().any(|waits| *waits == client) {
            return self.lender_waits_for(client).map(words).collect();
        }
        self.node.awaited().into_iter().map(words).collect()
    }

    /// Those of `then`, which [`State::awaited`] told a while ago, that the question still waits for and that
    /// have said nothing at all since.
    pub fn silent_since(&self, client: Client, then: &Awaited) -> Vec<CellId> {
        let now = self.awaited(client);
        let silent = then.iter().filter(|(cell, words)| now.get(cell) == Some(words));
        silent.map(|(cell, _)| *cell).collect()
    }

    fn leave(&mut self, client: Client, name: &str) -> Vec<Act> {
        self.tenants.remove(name);
        self.handed.remove(name);
        let (change, mut acts) = self.remove(name);
        match change {
            Some(change) => _ = self.leaving.insert(change, client),
            None => acts.push(Act::Answer(client, CellResponse::Done)),
        }
        acts
    }

    /// Removes a VM from the table. The change's number, unless all have heard of it already.
    fn remove(&mut self, name: &str) -> (Option<u64>, Vec<Act>) {
        match self.node.change(&Key::Vm(name.to_owned()), None) {
            Some((change, effects)) => {
                self.ledger.vacate(name);
                let heard = effects.contains(&Effect::Heard(change));
                (if heard { None } else { Some(change) }, self.acts(effects))
            }
            None => (None, Vec::new()),
        }
    }

    fn all_heard(&mut self, change: u64) -> Option<Act> {
        let client = self.leaving.remove(&change)?;
        Some(Act::Answer(client, CellResponse::Done))
    }

    fn say(&mut self, to: CellId, said: Said) -> impl Iterator<Item = Act> + use<> {
        posted(self.multicast.send(to, said))
    }

    /// Sends to all cells, along the tree that is best for those that can be in one. Its relays gather the
    /// replies.
    fn tell(&mut self, message: Message<Key, Value>) -> impl Iterator<Item = Act> + use<> {
        let fit: Vec<CellId> = self.multicast.fit().collect();
        if fit != self.route.cells() {
            self.route.lead(self.me.number, fit);
        }
        let request = message.request();
        let told = self
            .multicast
            .send_to_all(&Said::Table(message), self.route.hops(), request.is_some());
        if let Some(request) = request {
            self.node.gathered(request, told.gathered);
        }
        posted(told.effects)
    }

    /// What the table's effects mean for clients.
    fn acts(&mut self, effects: Vec<Effect<Key, Value>>) -> Vec<Act> {
        let mut acts = Vec::new();
        for effect in effects {
            match effect {
                Effect::Send(to, message) => acts.extend(self.say(to, Said::Table(message))),
                Effect::Tell(message) => acts.extend(self.tell(message)),
                Effect::Reply {
                    to,
                    message,
                    path,
                    at_once,
                } => {
                    let said = Said::Table(message);
                    acts.extend(posted(self.multicast.reply(to, path, at_once, said)));
                }
                Effect::Won(claim) => match self.claims.remove(&claim) {
                    Some((Some(client), name, _)) => {
                        acts.push(Act::Answer(client, CellResponse::Hosted(self.place(&name))));
                        // The last process may have had one of that name, as another cell has just said.
                        self.has_come(&name);
                        self.tenants.insert(name, client);
                    }
                    // Nobody wants it any more.
                    Some((None, name, _)) => acts.extend(self.remove(&name).1),
                    None => {}
                },
                Effect::Lost { claim, to } => {
                    let Some((client, name, _)) = self.claims.remove(&claim) else {
                        continue;
                    };
                    // It may have been found to be this cell's own.
                    self.ledger.vacate(&name);
                    self.inherit(&name);
                    let why = places::taken(&name, to);
                    acts.extend(client.map(|client| Act::Answer(client, CellResponse::Refused { why })));
                }
                Effect::Heard(change) => acts.extend(self.all_heard(change)),
                Effect::Inherited(Key::Vm(name)) => {
                    // One that is about to start keeps what it has: what others say may be of an earlier VM.
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

/// What goes over links of what [`protocol::multicast`] wants done.
fn posted(effects: Vec<multicast::Effect<Said>>) -> impl Iterator<Item = Act> {
    effects.into_iter().filter_map(|effect| match effect {
        multicast::Effect::Send(to, packet) => Some(Act::Send(to, packet)),
        // Only what has come is delivered.
        multicast::Effect::Deliver(..) => None,
    })
}
