//! A replicated table of entries under unique keys. Each entry has an owner cell, and each cell has a copy of
//! the table (Multikernel, SOSP '09, sections 3.3 and 4.7).
//!
//! 1. A new key is claimed in two phases, since order matters. The claimer sends a request to every cell,
//!    each cell votes, and the entry exists only if all vote for it. Of several claims on one key at most one
//!    wins, and one does if the key is free and no cell dies. A cell that has voted for a claim makes a
//!    lower-numbered claimer wait until that claim is settled, and refuses a higher-numbered one; so there is
//!    no circular wait (wait-die).
//! 2. Only the owner changes or removes an entry, in one phase without votes: its messages go over the same
//!    links in order. Each cell confirms a change with a receipt, so that the owner knows when all have
//!    received it.
//! 3. On a new link each cell first sends the entries that it owns, and those of the other cell that it
//!    knows. So a restarted cell recovers the entries of its last life. Until it has links to all cells that
//!    run, and a hello from each, a cell neither claims nor votes.
//! 4. The entries of a dead cell stay until a new life of the cell changes them, since what they name may
//!    still run. The votes for its claims stay too: it may have won them before it was cut off. Both go when
//!    a cell is certain that nothing of them runs, and forgets them at all cells.
//!
//! When several cells die at once, a key can have two owners for a while: a cell that has just started
//! without peers, and a cell that starts next. Each cell's entries are kept apart from all others', so that
//! either can remove its own. The object that a key names must tolerate two owners: on one host, two VMs
//! can't have one directory.
//!
//! Unlike the rest of this crate, this state machine needs links that deliver in order and once until one
//! side is dead, as channels and connections do, and [`crate::multicast`] above them. The order of an owner's
//! changes depends on it. Votes and receipts alone may come in any order, twice, or not at all: relays gather
//! them (Multikernel, section 5.1). Each cell counts once for a request. If the branch of a tree by which its
//! reply comes has lost a cell, or is late, the source asks the cell again over its link
//! ([`Message::Again`]), and the cell repeats its reply over its own. A cell that has refused a claim or
//! voted for it repeats its vote; one whose vote has to wait sends it over the link later.

use std::collections::{BTreeMap, BTreeSet};

use crate::CellId;
use crate::multicast::ReplyPath;

mod claims;
mod message;
mod replies;
#[cfg(any(test, feature = "stories"))]
pub mod stories;
#[cfg(test)]
mod tests;

pub use message::{Message, Request};

use claims::Claim;
use replies::Replies;

/// A cell's number in the cluster. All lives of a cell share its number and its entries.
pub type CellNumber = u16;

/// Identity of a claim. A cell votes on waiting claims in this order, the lowest first.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ClaimId {
    /// The claimer.
    pub cell: CellId,
    /// Number of the claim among those of the claimer.
    pub number: u64,
}

/// Effect that the caller has to carry out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Effect<K, V> {
    /// Send a message to a cell.
    Send(CellId, Message<K, V>),
    /// Send a message to all linked cells. If it makes a [`Message::request`] and relays gather the replies,
    /// [`Node::gathered`] has to follow.
    Tell(Message<K, V>),
    /// Reply to a cell's request.
    Reply {
        /// Cell that sent the request.
        to: CellId,
        /// The vote or the receipt.
        message: Message<K, V>,
        /// The path, as the request came with it.
        path: Option<ReplyPath>,
        /// Whether relays have to forward it before other replies.
        at_once: bool,
    },
    /// The claim of this number has won: this cell owns the entry.
    Won(u64),
    /// A claim of this cell has lost.
    Lost {
        /// Number of the claim.
        claim: u64,
        /// The cell that owns the key, or that claims the key too.
        to: CellNumber,
    },
    /// All live cells have confirmed the change of this number.
    Heard(u64),
    /// The last life of this cell owned this key. This life owns the key now.
    Inherited(K),
}

type Effects<K, V> = Vec<Effect<K, V>>;

/// One cell's copy of the table, and the state of its claims, votes and changes.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Node<K, V> {
    me: CellId,
    /// Entries by key and owner. Only the owner changes them.
    entries: BTreeMap<(K, CellNumber), V>,
    /// The other live cells, and whether each has sent its hello.
    links: BTreeMap<CellId, bool>,
    /// Whether more links will be added.
    is_meeting: bool,
    claims: BTreeMap<u64, Claim<K, V>>,
    claim_next: u64,
    /// Claims of others that this cell has voted for and whose outcome is pending.
    promised: BTreeMap<K, ClaimId>,
    /// Claims of others that wait for this cell's vote, with the path of the vote.
    deferred: BTreeMap<ClaimId, (K, Option<ReplyPath>)>,
    /// Votes on unsettled claims of others: `None` for a vote in favour, else the cell that a refusal names.
    votes: BTreeMap<ClaimId, Option<CellNumber>>,
    /// Unconfirmed changes, with their missing receipts.
    unheard: BTreeMap<u64, Replies>,
    change_next: u64,
    /// Incarnations that others know to be dead while this cell still has their links. Their entries are
    /// dropped with the links.
    doomed: BTreeSet<CellId>,
}

impl<K: Clone + Ord, V: Clone + PartialEq> Node<K, V> {
    /// Returns a cell without links and entries.
    pub fn new(me: CellId) -> Self {
        Self {
            me,
            entries: BTreeMap::new(),
            links: BTreeMap::new(),
            is_meeting: false,
            claims: BTreeMap::new(),
            claim_next: 0,
            promised: BTreeMap::new(),
            deferred: BTreeMap::new(),
            votes: BTreeMap::new(),
            unheard: BTreeMap::new(),
            change_next: 0,
            doomed: BTreeSet::new(),
        }
    }

    /// Adds an entry that is known from elsewhere, before there are links.
    pub fn find(&mut self, key: K, owner: CellNumber, value: V) {
        self.entries.insert((key, owner), value);
    }

    /// Returns all entries of this cell's table: key, owner, value.
    pub fn entries(&self) -> impl Iterator<Item = (&K, CellNumber, &V)> {
        self.entries
            .iter()
            .map(|((key, owner), value)| (key, *owner, value))
    }

    /// Returns the owner of a key, the lowest-numbered one if there are two.
    pub fn owner(&self, key: &K) -> Option<CellNumber> {
        let mut of_key = self
            .entries
            .range((key.clone(), 0)..=(key.clone(), CellNumber::MAX));
        of_key.next().map(|((_, owner), _)| *owner)
    }

    /// Whether an entry is this cell's.
    pub fn owns(&self, key: &K) -> bool {
        self.entries.contains_key(&(key.clone(), self.me.number))
    }

    /// Returns the linked cells.
    pub fn links(&self) -> impl Iterator<Item = CellId> + '_ {
        self.links.keys().copied()
    }

    /// Records that more links will be added. Until [`Node::has_met`] this cell neither begins claims nor
    /// votes.
    pub fn begin_meeting(&mut self) {
        self.is_meeting = true;
    }

    /// Records that this cell has links to all cells that run.
    pub fn has_met(&mut self) -> Effects<K, V> {
        let mut effects = Vec::new();
        self.is_meeting = false;
        self.go_on(&mut effects);
        effects
    }

    /// Whether this cell has links to all cells that run, and a hello from each. Until then it neither begins
    /// claims nor votes.
    pub fn is_ready(&self) -> bool {
        !self.is_meeting && self.links.values().all(|said_hello| *said_hello)
    }

    /// Whether `cell` is linked and has not sent its hello.
    pub fn awaits_hello(&self, cell: CellId) -> bool {
        self.links.get(&cell) == Some(&false)
    }

    /// Returns the cells from which a hello, a vote or a receipt is pending.
    pub fn awaited(&self) -> BTreeSet<CellId> {
        let silent = self.links.iter().filter(|(_, said_hello)| !**said_hello);
        let silent = silent.map(|(cell, _)| *cell);
        let votes = self.claims.values().flat_map(|claim| claim.votes.missing());
        let receipts = self.unheard.values().flat_map(Replies::missing);
        silent.chain(votes).chain(receipts).collect()
    }

    /// Adds a link to a cell.
    pub fn link(&mut self, cell: CellId) -> Effects<K, V> {
        self.links.insert(cell, false);
        // A new incarnation reports the entries that still exist.
        self.doomed
            .retain(|doomed| doomed.number != cell.number || doomed.life >= cell.life);
        let of = |owner| {
            let his = self.entries().filter(move |(_, known, _)| *known == owner);
            his.map(|(key, _, value)| (key.clone(), value.clone())).collect()
        };
        let (mine, yours) = (of(self.me.number), of(cell.number));
        let mut effects = vec![Effect::Send(cell, Message::Hello { mine, yours })];
        // It votes on pending claims, too.
        for (number, claim) in &mut self.claims {
            if claim.begun {
                claim.votes.add(cell);
                let (claim, key) = (*number, claim.key.clone());
                effects.push(Effect::Send(cell, Message::Ask { claim, key }));
            }
        }
        effects
    }

    /// Removes the link to a dead cell. Nothing waits for its votes and receipts any longer.
    pub fn dead(&mut self, cell: CellId) -> Effects<K, V> {
        let mut effects = Vec::new();
        if self.links.remove(&cell).is_none() {
            return effects;
        }
        // Its votes stay: it may have won by them before it was cut off.
        self.deferred.retain(|claim, _| claim.cell != cell);
        self.votes.retain(|claim, _| claim.cell != cell);
        let mut again = Vec::new();
        for (number, claim) in &mut self.claims {
            let lost = claim.votes.dead(cell).into_iter();
            again.extend(lost.map(|to| (to, Request::Claim(*number))));
            let promised = self.promised.get(&claim.key);
            if promised.is_some_and(|promised| promised.cell == cell) {
                claim.lost_to = claim.lost_to.or(Some(cell.number));
            }
        }
        for (change, receipts) in &mut self.unheard {
            let lost = receipts.dead(cell).into_iter();
            again.extend(lost.map(|to| (to, Request::Change(*change))));
        }
        effects.extend(again.into_iter().map(ask_again));
        if self.doomed.remove(&cell) {
            self.forget(cell.number, |_| true);
        }
        self.go_on(&mut effects);
        effects
    }

    /// Records that relays gather the replies to a request: each cell below one with the first cell of its
    /// branch of the tree.
    pub fn gathered(&mut self, request: Request, branches: BTreeMap<CellId, CellId>) {
        let replies = match request {
            Request::Claim(claim) => self.claims.get_mut(&claim).map(|claim| &mut claim.votes),
            Request::Change(change) => self.unheard.get_mut(&change),
        };
        if let Some(replies) = replies {
            replies.gathered(branches);
        }
    }

    /// Whether [`Self::tick`] must be called.
    pub fn needs_tick(&self) -> bool {
        let votes = self.claims.values().any(|claim| claim.votes.needs_tick());
        votes || self.unheard.values().any(Replies::needs_tick)
    }

    /// Advances time by one tick, as long as those of [`crate::multicast`].
    pub fn tick(&mut self) -> Effects<K, V> {
        let mut again = Vec::new();
        for (number, claim) in &mut self.claims {
            let late = claim.votes.tick().into_iter();
            again.extend(late.map(|to| (to, Request::Claim(*number))));
        }
        for (change, receipts) in &mut self.unheard {
            let late = receipts.tick().into_iter();
            again.extend(late.map(|to| (to, Request::Change(*change))));
        }
        again.into_iter().map(ask_again).collect()
    }

    /// Drops all entries of a dead cell and the votes for its claims, here and at all linked cells. `cell`
    /// has the last life that is known to be dead: a cell that has a link to a later one keeps what that has.
    /// The caller must be certain that nothing runs that these entries name. Returns the change's number, for
    /// [`Effect::Heard`]; `None` if `cell` is linked here.
    pub fn forget_everywhere(&mut self, cell: CellId) -> Option<(u64, Effects<K, V>)> {
        if self.has_link_to(cell.number) || cell.number == self.me.number {
            return None;
        }
        self.forget(cell.number, |_| true);
        Some(self.announce(|change| Message::Forget { change, cell }))
    }

    /// Handles the report of another cell that nothing of a dead cell runs.
    fn forget_dead(&mut self, cell: CellId) {
        if cell.number == self.me.number {
            return;
        }
        let linked = self.links.keys().find(|known| known.number == cell.number);
        match linked {
            None => self.forget(cell.number, |_| true),
            Some(linked) if linked.life <= cell.life => _ = self.doomed.insert(*linked),
            Some(_) => {}
        }
    }

    fn has_link_to(&self, number: CellNumber) -> bool {
        self.links.keys().any(|known| known.number == number)
    }

    /// Drops the entries of a dead cell for whose keys `drop` is true, and the votes for the dead cell's
    /// claims on such keys. The caller must be certain that no life of that cell relies on them.
    pub fn forget(&mut self, cell: CellNumber, drop: impl Fn(&K) -> bool) {
        self.entries
            .retain(|(key, owner), _| *owner != cell || !drop(key));
        self.promised
            .retain(|key, claim| claim.cell.number != cell || !drop(key));
    }

    /// Changes an entry of this cell, or removes it if `value` is `None`. Returns the change's number, for
    /// [`Effect::Heard`]; `None` if this cell does not own the entry.
    pub fn change(&mut self, key: &K, value: Option<V>) -> Option<(u64, Effects<K, V>)> {
        if !self.owns(key) {
            return None;
        }
        self.put(self.me.number, key, value.clone());
        Some(self.tell(key, value))
    }

    fn tell(&mut self, key: &K, value: Option<V>) -> (u64, Effects<K, V>) {
        let key = key.clone();
        self.announce(|change| Message::Change { change, key, value })
    }

    /// Sends a message to all linked cells, each of which confirms it.
    fn announce(&mut self, message: impl FnOnce(u64) -> Message<K, V>) -> (u64, Effects<K, V>) {
        let change = self.change_next;
        self.change_next += 1;
        self.unheard.insert(change, Replies::of(self.links()));
        let mut effects = vec![Effect::Tell(message(change))];
        self.go_on(&mut effects);
        (change, effects)
    }

    /// Handles a message, which came with the path for a reply. A message from a cell without a link is
    /// ignored.
    pub fn take(&mut self, from: CellId, message: Message<K, V>, path: Option<ReplyPath>) -> Effects<K, V> {
        let mut effects = Vec::new();
        if !self.links.contains_key(&from) {
            return effects;
        }
        match message {
            Message::Hello { mine, yours } => {
                self.links.insert(from, true);
                // Its hello contains the entries that its earlier incarnations won and that still exist.
                self.promised
                    .retain(|_, claim| claim.cell.number != from.number || claim.cell == from);
                self.hello(from, mine, yours, &mut effects);
            }
            Message::Ask { claim, key } => {
                let number = claim;
                self.deferred.insert(ClaimId { cell: from, number }, (key, path));
            }
            Message::Vote { claim, against } => {
                if let Some(claim) = self.claims.get_mut(&claim)
                    && claim.votes.come(from)
                {
                    claim.lost_to = claim.lost_to.or(against);
                }
            }
            Message::Settle { claim, key, value } => {
                let claim = ClaimId {
                    cell: from,
                    number: claim,
                };
                self.deferred.remove(&claim);
                self.votes.remove(&claim);
                if self.promised.get(&key) == Some(&claim) {
                    self.promised.remove(&key);
                }
                if value.is_some() {
                    self.put(from.number, &key, value);
                }
            }
            Message::Change { change, key, value } => {
                effects.push(Effect::Reply {
                    to: from,
                    message: Message::Receipt { change },
                    path,
                    at_once: false,
                });
                self.put(from.number, &key, value);
            }
            Message::Forget { change, cell } => {
                effects.push(Effect::Reply {
                    to: from,
                    message: Message::Receipt { change },
                    path,
                    at_once: false,
                });
                self.forget_dead(cell);
            }
            Message::Receipt { change } => {
                if let Some(receipts) = self.unheard.get_mut(&change) {
                    receipts.come(from);
                }
            }
            // The request has come before this message.
            Message::Again(Request::Claim(number)) => {
                let asked = ClaimId { cell: from, number };
                if let Some(against) = self.votes.get(&asked) {
                    let (claim, against) = (number, *against);
                    effects.push(Effect::Send(from, Message::Vote { claim, against }));
                } else if let Some((_, path)) = self.deferred.get_mut(&asked) {
                    *path = None;
                }
            }
            Message::Again(Request::Change(change)) => {
                effects.push(Effect::Send(from, Message::Receipt { change }));
            }
        }
        self.go_on(&mut effects);
        effects
    }

    /// Handles the hello of a new link's other side.
    fn hello(&mut self, from: CellId, mine: Vec<(K, V)>, yours: Vec<(K, V)>, effects: &mut Effects<K, V>) {
        for (key, value) in mine {
            self.put(from.number, &key, Some(value));
        }
        // This incarnation's own entries are newer than the others' copies from the last one.
        let inherited: Vec<(K, V)> = yours.into_iter().filter(|(key, _)| !self.owns(key)).collect();
        // All entries are stored before the first announcement, since announcing one proceeds to votes.
        for (key, value) in &inherited {
            self.put(self.me.number, key, Some(value.clone()));
        }
        for (key, value) in inherited {
            effects.push(Effect::Inherited(key.clone()));
            // Some cells may not have it.
            effects.extend(self.tell(&key, Some(value)).1);
        }
    }

    fn put(&mut self, owner: CellNumber, key: &K, value: Option<V>) {
        match value {
            Some(value) => _ = self.entries.insert((key.clone(), owner), value),
            None => _ = self.entries.remove(&(key.clone(), owner)),
        }
    }

    /// Makes all possible progress: begins claims, votes, settles claims, and reports confirmed changes.
    fn go_on(&mut self, effects: &mut Effects<K, V>) {
        let heard = self
            .unheard
            .iter()
            .filter(|(_, receipts)| receipts.are_complete());
        for change in heard.map(|(change, _)| *change).collect::<Vec<_>>() {
            self.unheard.remove(&change);
            effects.push(Effect::Heard(change));
        }
        if self.is_ready() {
            self.begin(effects);
            self.vote(effects);
        }
        self.settle(effects);
    }
}

fn ask_again<K, V>((to, request): (CellId, Request)) -> Effect<K, V> {
    Effect::Send(to, Message::Again(request))
}
