//! The requests of a cell to etcd, to enter and then to stay, and the consequences of the answers. Without
//! I/O, clock or threads; the simulator drives the same.
//!
//! One request is under way at a time. The answer `None` means that etcd did not answer in time, and that the
//! request may have taken effect or not.
//!
//! **Lost entries.** A cell's entry goes in one of three ways: its lease ends, a later incarnation takes the
//! key, or another cell removes it, which leaves a mark ([`Records::removed`]). A cell whose entry is missing
//! without any of them takes that for a fault of etcd, as long as it has links to all members that it had
//! seen. It writes the entry back, if no cell that it has not seen has entered since, and waits a while for
//! the others to do the same before it takes them for dead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use protocol::CellId;

use super::{Members, MembershipEvent};

#[cfg(test)]
mod tests;

/// The last incarnation of a cell that gets no further one, since its host has left the cluster.
pub const RETIRED: u32 = u32::MAX;
/// Interval between two requests to etcd that keep the entry.
const KEEP: Duration = Duration::from_secs(1);
/// Time limit for the others to write their entries back after etcd has lost this cell's.
const GRACE: Duration = Duration::from_secs(5);
/// Attempts in one round to write the entry back. One fails only when another cell's has succeeded.
const ATTEMPTS: u32 = 100;

/// The contents of etcd at one time.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Records {
    /// The cells that have entries, and their incarnations.
    pub members: Members,
    /// The last incarnation of each cell.
    pub lives: Members,
    /// Of each cell the last incarnation that another cell has removed.
    pub removed: Members,
    /// Number of changes so far.
    pub revision: u64,
}

impl Records {
    /// Whether the cell's host has left the cluster.
    pub fn is_retired(&self, cell: u16) -> bool {
        self.lives.get(&cell) == Some(&RETIRED)
    }
}

/// A request to etcd. `L` is a lease.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum EtcdRequest<L> {
    /// Reads the last incarnation of this cell.
    LastLife(u16),
    /// Requests a lease.
    Lease,
    /// Makes this incarnation the cell's last, with an entry by the lease, if `last` is still its last one.
    Enter {
        /// The new incarnation.
        me: CellId,
        /// The incarnation before it, if any.
        last: Option<u32>,
        /// Lease with which the new entry ends.
        lease: L,
    },
    /// Reads all records.
    Records,
    /// Keeps the lease.
    Keep(L),
    /// Removes the entry of `cell`, if it is of this incarnation and `accuser` has one. A mark remains, also
    /// where there was no entry.
    Remove {
        /// The cell whose entry is removed.
        cell: CellId,
        /// The cell that removes it.
        accuser: CellId,
    },
    /// Writes the entry of `me` and these last incarnations again, if nothing has been written since
    /// `revision`.
    Restore {
        /// The cell whose entry is written.
        me: CellId,
        /// The lease of the entry.
        lease: L,
        /// The last incarnations of all cells.
        lives: Members,
        /// [`Records::revision`] of the records in which the entry is missing.
        revision: u64,
    },
}

/// Answer of etcd to one request of this cell.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum EtcdAnswer<L> {
    /// To [`EtcdRequest::LastLife`].
    LastLife(Option<u32>),
    /// To [`EtcdRequest::Lease`].
    Lease(L),
    /// To [`EtcdRequest::Enter`] and [`EtcdRequest::Restore`]: false if another cell was quicker.
    Entered(bool),
    /// To [`EtcdRequest::Records`].
    Records(Records),
    /// To [`EtcdRequest::Keep`]: false if the lease has ended.
    Kept(bool),
    /// To [`EtcdRequest::Remove`].
    Done,
}

/// A cell that enters.
#[derive(Clone, Debug)]
pub struct Joining<L> {
    number: u16,
    /// The last incarnation that this host has on record, whatever etcd has.
    floor: u32,
    step: Step<L>,
}

#[derive(Clone, Debug)]
enum Step<L> {
    Count,
    Lease { last: Option<u32> },
    Enter { me: CellId, last: Option<u32>, lease: L },
    Look { me: CellId, lease: L },
}

/// The progress of a cell that enters.
#[derive(Debug)]
pub enum Progress<L> {
    /// The next request is ready.
    GoesOn,
    /// The next request is ready, to be sent after a while: etcd does not answer.
    Waits,
    /// The cell has entered: its incarnation, its lease, and the members, of which it is one.
    In(CellId, L, Records),
}

impl<L: Clone> Joining<L> {
    /// The cell of this number. Its host has a record of its incarnations up to `floor`, so that an etcd that
    /// has lost its count gives none of them out again.
    pub fn new(number: u16, floor: u32) -> Self {
        let step = Step::Count;
        Self { number, floor, step }
    }

    /// The next request.
    pub fn request(&self) -> EtcdRequest<L> {
        match &self.step {
            Step::Count => EtcdRequest::LastLife(self.number),
            Step::Lease { .. } => EtcdRequest::Lease,
            Step::Enter { me, last, lease } => EtcdRequest::Enter {
                me: *me,
                last: *last,
                lease: lease.clone(),
            },
            Step::Look { .. } => EtcdRequest::Records,
        }
    }

    /// Takes the answer to the request.
    pub fn answered(&mut self, answer: Option<EtcdAnswer<L>>) -> Progress<L> {
        // After any failure it begins again: an incarnation that may have been entered is never taken twice.
        match (std::mem::replace(&mut self.step, Step::Count), answer) {
            // The cell's host has left the cluster.
            (Step::Count, Some(EtcdAnswer::LastLife(Some(RETIRED)))) => return Progress::Waits,
            (Step::Count, Some(EtcdAnswer::LastLife(last))) => self.step = Step::Lease { last },
            (Step::Lease { last }, Some(EtcdAnswer::Lease(lease))) => {
                let me = CellId {
                    number: self.number,
                    life: last.unwrap_or(0).max(self.floor) + 1,
                };
                self.floor = me.life;
                self.step = Step::Enter { me, last, lease };
            }
            (Step::Enter { me, lease, .. }, Some(EtcdAnswer::Entered(true))) => {
                self.step = Step::Look { me, lease };
            }
            (Step::Enter { .. }, Some(EtcdAnswer::Entered(false))) => {}
            (Step::Look { me, lease }, Some(EtcdAnswer::Records(records)))
                if records.members.get(&me.number) == Some(&me.life) =>
            {
                return Progress::In(me, lease, records);
            }
            _ => return Progress::Waits,
        }
        Progress::GoesOn
    }
}

/// The state of a lease, as far as etcd has answered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LeaseState {
    Unknown,
    Lives,
    Ended,
}

/// A cell that has entered.
#[derive(Clone, Debug)]
pub struct Member<L> {
    me: CellId,
    lease: L,
    lease_state: LeaseState,
    /// The members by the last list.
    known: Members,
    /// The last incarnation of each cell that this one has ever seen.
    lives: Members,
    /// Incarnations that were reported as dead.
    over: Members,
    /// Cells without a link, whose entries are to be removed.
    suspects: Vec<CellId>,
    /// Suspects whose removal etcd has answered since the last list.
    accused: Vec<CellId>,
    /// Suspects that have been in no list: they came after the last one, and may be gone before the next.
    unlisted: BTreeSet<CellId>,
    /// Time that the others still have to write back their entries.
    grace: Option<Duration>,
    /// Cells that have not written theirs back.
    missing: BTreeSet<CellId>,
    attempts: u32,
    /// Time after which nothing of a cell that is no member runs; none where VMs of lost hosts run on.
    lapse: Option<Duration>,
    /// Cells that are no members.
    absent: BTreeMap<u16, Absence>,
    since_kept: Duration,
    /// The requests of this round; the first one is under way.
    questions: VecDeque<EtcdRequest<L>>,
}

/// A cell that is no member.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Absence {
    /// Its last incarnation.
    life: u32,
    /// The time since the first list without it; none in the round of that list. It is never more than the
    /// true time.
    lasts: Option<Duration>,
    /// Whether its lapse was reported.
    is_told: bool,
}

impl<L: Clone> Member<L> {
    /// A cell that has entered among these just now.
    pub fn new(me: CellId, lease: L, members: &Members) -> Self {
        Self {
            me,
            lease,
            lease_state: LeaseState::Unknown,
            known: members.clone(),
            lives: members.clone(),
            over: Members::new(),
            suspects: Vec::new(),
            accused: Vec::new(),
            unlisted: BTreeSet::new(),
            grace: None,
            missing: BTreeSet::new(),
            attempts: 0,
            lapse: None,
            absent: BTreeMap::new(),
            since_kept: Duration::ZERO,
            questions: VecDeque::new(),
        }
    }

    /// Reports cells that have been no members for this long ([`MembershipEvent::Lapsed`]).
    #[must_use]
    pub fn with_lapse(self, lapse: Option<Duration>) -> Self {
        Self { lapse, ..self }
    }

    /// Suspects a cell of another host.
    pub fn suspect(&mut self, cell: CellId) {
        self.suspects.push(cell);
        if self.known.get(&cell.number) != Some(&cell.life) {
            self.unlisted.insert(cell);
        }
    }

    /// Begins a round; `passed` is the time since the last one began.
    pub fn begin_round(&mut self, passed: Duration) {
        self.attempts = ATTEMPTS;
        self.since_kept += passed;
        for absence in self.absent.values_mut() {
            absence.lasts = Some(absence.lasts.map_or(Duration::ZERO, |lasts| lasts + passed));
        }
        if self.since_kept >= KEEP {
            self.questions.push_back(EtcdRequest::Keep(self.lease.clone()));
        }
        let left = self.grace.map(|left| left.saturating_sub(passed));
        self.grace = left.filter(|left| !left.is_zero());
        // The mark ends a cell that writes its entry back later.
        let late = self.missing.iter().filter(|_| self.grace.is_none());
        // A dead cell accuses no other: it was cut off, and they weren't.
        let accuser = self.me;
        let removals = self
            .suspects
            .iter()
            .chain(late)
            .map(|cell| EtcdRequest::Remove { cell: *cell, accuser });
        self.questions.extend(removals);
        self.questions.push_back(EtcdRequest::Records);
    }

    /// The next request; none when the round is over.
    pub fn request(&self) -> Option<EtcdRequest<L>> {
        self.questions.front().cloned()
    }

    /// Takes the answer to the request, and returns the events that follow.
    pub fn answered(&mut self, answer: Option<EtcdAnswer<L>>) -> Vec<MembershipEvent> {
        match (self.questions.pop_front(), answer) {
            (Some(EtcdRequest::Keep(_)), Some(EtcdAnswer::Kept(lives))) => {
                self.since_kept = Duration::ZERO;
                self.lease_state = if lives {
                    LeaseState::Lives
                } else {
                    LeaseState::Ended
                };
            }
            (Some(EtcdRequest::Remove { cell, .. }), Some(_)) if self.suspects.contains(&cell) => {
                self.suspects.retain(|suspect| *suspect != cell);
                self.accused.push(cell);
            }
            (Some(EtcdRequest::Restore { .. }), Some(EtcdAnswer::Entered(_))) => self.look_again(),
            // The lease may have ended.
            (Some(EtcdRequest::Restore { .. }), None) => self.lease_state = LeaseState::Unknown,
            (Some(EtcdRequest::Records), Some(EtcdAnswer::Records(records))) => return self.look(&records),
            _ => {}
        }
        Vec::new()
    }

    fn look(&mut self, records: &Records) -> Vec<MembershipEvent> {
        for (number, life) in records.lives.iter().chain(&records.members) {
            let last = self.lives.entry(*number).or_default();
            *last = (*last).max(*life);
        }
        // A dead cell must not take others for dead and go on without their votes, so no other event is
        // reported.
        if records.members.get(&self.me.number) != Some(&self.me.life) {
            return self.look_without_entry(records);
        }
        self.lease_state = LeaseState::Unknown;
        self.accused.clear();
        let now = &records.members;
        let mut news = Vec::new();
        let mut known = now.clone();
        self.missing
            .retain(|cell| now.get(&cell.number) != Some(&cell.life));
        for (number, life) in self
            .known
            .iter()
            .filter(|(number, life)| now.get(number) != Some(life))
        {
            let cell = CellId {
                number: *number,
                life: *life,
            };
            let waits = self.grace.is_some() || self.missing.contains(&cell);
            if waits && !is_over(cell, records) {
                self.missing.insert(cell);
                known.insert(cell.number, cell.life);
            } else if cell.number != self.me.number {
                self.missing.remove(&cell);
                news.push(MembershipEvent::Died(cell));
            }
        }
        let live_on = |cell: &CellId| now.get(&cell.number).is_some_and(|life| *life <= cell.life);
        let (unlisted, gone) = std::mem::take(&mut self.unlisted).into_iter().partition(live_on);
        self.unlisted = unlisted;
        news.extend(BTreeSet::into_iter(gone).map(MembershipEvent::Died));
        for change in &news {
            if let MembershipEvent::Died(cell) = change {
                let last = self.over.entry(cell.number).or_default();
                *last = (*last).max(cell.life);
            }
        }
        // There is no link to a cell that comes back, and one of the two has to start anew.
        for (number, life) in now {
            let cell = CellId {
                number: *number,
                life: *life,
            };
            if self.over.get(number).is_some_and(|over| over >= life) && !self.suspects.contains(&cell) {
                self.suspects.push(cell);
            }
        }
        self.known = known;
        news.extend(self.lapsed());
        news
    }

    /// The cells that have been no members for long enough, as of the list that [`Member::known`] is of. An
    /// entry that etcd may have lost counts as present.
    fn lapsed(&mut self) -> Vec<MembershipEvent> {
        let Some(lapse) = self.lapse else {
            return Vec::new();
        };
        let known = &self.known;
        self.absent.retain(|number, _| !known.contains_key(number));
        let mut news = Vec::new();
        for (number, life) in self
            .lives
            .iter()
            .filter(|(number, _)| !known.contains_key(number))
        {
            let begun = Absence {
                life: *life,
                lasts: None,
                is_told: false,
            };
            let absence = self.absent.entry(*number).or_insert(begun);
            // The cell was a member in between.
            if absence.life != *life {
                *absence = begun;
            }
            if !absence.is_told && absence.lasts.is_some_and(|lasts| lasts >= lapse) {
                absence.is_told = true;
                news.push(MembershipEvent::Lapsed(*number));
            }
        }
        news
    }

    /// Decides whether this cell is dead, or etcd has lost its entry.
    fn look_without_entry(&mut self, records: &Records) -> Vec<MembershipEvent> {
        self.suspects.append(&mut self.accused);
        let mut entered = records.members.iter();
        let has_strangers = entered.any(|(number, life)| self.known.get(number) != Some(life));
        let is_dead = is_over(self.me, records)
            || has_strangers
            || !self.suspects.is_empty()
            || self.lease_state == LeaseState::Ended;
        if is_dead {
            return vec![MembershipEvent::Evicted];
        }
        self.grace = Some(GRACE);
        match self.lease_state {
            LeaseState::Lives => self.questions.push_back(EtcdRequest::Restore {
                me: self.me,
                lease: self.lease.clone(),
                // All of them: etcd may lose its present entries before they are written.
                lives: self.lives.clone(),
                revision: records.revision,
            }),
            _ => {
                self.questions.push_back(EtcdRequest::Keep(self.lease.clone()));
                self.look_again();
            }
        }
        Vec::new()
    }

    /// Reads the records again within this round, while attempts are left.
    fn look_again(&mut self) {
        if let Some(left) = self.attempts.checked_sub(1) {
            self.attempts = left;
            self.questions.push_back(EtcdRequest::Records);
        }
    }
}

/// Whether an incarnation is dead for certain: others have removed it, or there is a later one.
fn is_over(cell: CellId, records: &Records) -> bool {
    let has = |lives: &Members, least: u32| lives.get(&cell.number).is_some_and(|life| *life >= least);
    has(&records.removed, cell.life) || has(&records.lives, cell.life + 1)
}
