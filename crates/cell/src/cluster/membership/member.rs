//! What a cell asks of etcd, and what follows from the answers: to enter, and then to stay. Without I/O, clock or threads;
//! the simulator drives the same.
//!
//! One question is under way at a time. `None` for an answer: etcd did not answer in time, and what was asked may have
//! happened or not.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use protocol::CellId;

use super::{Members, News};

/// Between two words to etcd that keep the entry.
const KEEP: Duration = Duration::from_secs(1);

/// What is asked. `L` is a lease.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Question<L> {
    /// The last life of this cell.
    LastLife(u16),
    /// A lease.
    Lease,
    /// This life is the cell's last, and has an entry by the lease, if `last` is still its last one.
    Enter {
        /// The life.
        me: CellId,
        /// The one before, if any.
        last: Option<u32>,
        /// The lease.
        lease: L,
    },
    /// All entries.
    Members,
    /// The lease goes on.
    Keep(L),
    /// The entry of `cell` goes, if it is of this life and `accuser` has one.
    Remove {
        /// Whose.
        cell: CellId,
        /// Who says so.
        accuser: CellId,
    },
}

/// What etcd answers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answer<L> {
    /// To [`Question::LastLife`].
    LastLife(Option<u32>),
    /// To [`Question::Lease`].
    Lease(L),
    /// To [`Question::Enter`]: false if somebody was quicker.
    Entered(bool),
    /// To [`Question::Members`].
    Members(Members),
    /// To the rest.
    Done,
}

/// A cell that wants to enter.
#[derive(Clone, Debug)]
pub struct Joining<L> {
    number: u16,
    step: Step<L>,
}

#[derive(Clone, Debug)]
enum Step<L> {
    Count,
    Lease { last: Option<u32> },
    Enter { me: CellId, last: Option<u32>, lease: L },
    Look { me: CellId, lease: L },
}

/// How far it has come.
#[derive(Debug)]
pub enum Progress<L> {
    /// There is another question.
    GoesOn,
    /// There is, after a while: etcd does not answer.
    Waits,
    /// It is in: its life, its lease, and who else is.
    In(CellId, L, Members),
}

impl<L: Clone> Joining<L> {
    /// The cell of this number.
    pub fn new(number: u16) -> Self {
        let step = Step::Count;
        Self { number, step }
    }

    /// What it asks.
    pub fn question(&self) -> Question<L> {
        match &self.step {
            Step::Count => Question::LastLife(self.number),
            Step::Lease { .. } => Question::Lease,
            Step::Enter { me, last, lease } => Question::Enter {
                me: *me,
                last: *last,
                lease: lease.clone(),
            },
            Step::Look { .. } => Question::Members,
        }
    }

    /// The answer has come.
    pub fn answered(&mut self, answer: Option<Answer<L>>) -> Progress<L> {
        // Whatever goes wrong, it begins again: a life that may have been entered is never taken twice.
        match (std::mem::replace(&mut self.step, Step::Count), answer) {
            (Step::Count, Some(Answer::LastLife(last))) => self.step = Step::Lease { last },
            (Step::Lease { last }, Some(Answer::Lease(lease))) => {
                let me = CellId {
                    number: self.number,
                    life: last.unwrap_or(0) + 1,
                };
                self.step = Step::Enter { me, last, lease };
            }
            (Step::Enter { me, lease, .. }, Some(Answer::Entered(true))) => {
                self.step = Step::Look { me, lease };
            }
            (Step::Enter { .. }, Some(Answer::Entered(false))) => {}
            (Step::Look { me, lease }, Some(Answer::Members(members))) => {
                return Progress::In(me, lease, members);
            }
            _ => return Progress::Waits,
        }
        Progress::GoesOn
    }
}

/// A cell that has entered.
#[derive(Clone, Debug)]
pub struct Member<L> {
    me: CellId,
    lease: L,
    /// Who lived by the last list.
    known: Members,
    /// Whose entries are to be removed.
    suspects: Vec<CellId>,
    /// Suspects that have been in no list: they came after the last one, and may be gone before the next.
    unlisted: BTreeSet<CellId>,
    since_kept: Duration,
    /// Of this round, the first one being asked.
    questions: VecDeque<Question<L>>,
}

impl<L: Clone> Member<L> {
    /// One that has entered among these just now.
    pub fn new(me: CellId, lease: L, members: &Members) -> Self {
        Self {
            me,
            lease,
            known: members.clone(),
            suspects: Vec::new(),
            unlisted: BTreeSet::new(),
            since_kept: Duration::ZERO,
            questions: VecDeque::new(),
        }
    }

    /// There is no more to be had from a cell of another host.
    pub fn suspect(&mut self, cell: CellId) {
        self.suspects.push(cell);
        if self.known.get(&cell.number) != Some(&cell.life) {
            self.unlisted.insert(cell);
        }
    }

    /// A round begins; so much time has passed since the last one began.
    pub fn begin_round(&mut self, passed: Duration) {
        self.since_kept += passed;
        if self.since_kept >= KEEP {
            self.questions.push_back(Question::Keep(self.lease.clone()));
        }
        // Who is dead itself accuses nobody: it was cut off, and they weren't.
        let accuser = self.me;
        let removals = self
            .suspects
            .iter()
            .map(|cell| Question::Remove { cell: *cell, accuser });
        self.questions.extend(removals);
        self.questions.push_back(Question::Members);
    }

    /// What it asks; nothing when the round is over.
    pub fn question(&self) -> Option<Question<L>> {
        self.questions.front().cloned()
    }

    /// The answer has come: what is new.
    pub fn answered(&mut self, answer: Option<Answer<L>>) -> Vec<News> {
        match (self.questions.pop_front(), answer) {
            (Some(Question::Keep(_)), Some(_)) => self.since_kept = Duration::ZERO,
            (Some(Question::Remove { cell, .. }), Some(_)) => {
                self.suspects.retain(|suspect| *suspect != cell);
            }
            (Some(Question::Members), Some(Answer::Members(members))) => return self.look(members),
            _ => {}
        }
        Vec::new()
    }

    fn look(&mut self, now: Members) -> Vec<News> {
        // A dead cell must not take others for dead and go on without their votes: it hears of nothing else.
        if now.get(&self.me.number) != Some(&self.me.life) {
            return vec![News::Outcast];
        }
        let over = self
            .known
            .iter()
            .filter(|(number, life)| now.get(number) != Some(life));
        let others = over.filter(|(number, _)| **number != self.me.number);
        let mut news: Vec<News> = others
            .map(|(number, life)| {
                News::Over(CellId {
                    number: *number,
                    life: *life,
                })
            })
            .collect();
        let live_on = |cell: &CellId| now.get(&cell.number).is_some_and(|life| *life <= cell.life);
        let (unlisted, gone) = std::mem::take(&mut self.unlisted).into_iter().partition(live_on);
        self.unlisted = unlisted;
        news.extend(BTreeSet::into_iter(gone).map(News::Over));
        self.known = now;
        news
    }
}
