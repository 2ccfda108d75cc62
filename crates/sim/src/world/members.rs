//! Membership of cells of several hosts: their requests to etcd, and their connections to each other.

use std::time::Duration;

use cell::cluster::link::MESSAGE_TIMEOUT;
use cell::cluster::membership::member::{EtcdAnswer, EtcdRequest, Joining, Member, Progress};
use cell::cluster::membership::{Members, MembershipEvent, POLL_INTERVAL_MIN, poll_interval};
use protocol::CellId;

use super::network::HOP_NS;
use super::{Event, Input, SILENCE_MS, START_NS, World};
use crate::etcd::Lease;
use crate::{MILLISECOND, SECOND, Time, nanos};

/// Time limit of a reply of etcd.
const ETCD_PATIENCE: Time = SECOND;
/// Time between two attempts to connect to a cell.
const CALL_AGAIN: Time = 20 * MILLISECOND;
/// One in this number of replies of etcd is lost.
const LOST_ONCE_IN: u64 = 2000;

/// The sender of a request to etcd.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Asker {
    /// A cell's process, by the count of its starts, that has not entered yet.
    Joiner(u16, u64),
    /// A process that has entered.
    Member(CellId),
}

/// A process that has not entered yet.
#[derive(Debug)]
pub(super) struct Joiner {
    start: u64,
    joining: Joining<Lease>,
    /// Time of the request in progress.
    asked: Time,
}

/// A cell's watch over who lives.
#[derive(Debug)]
pub(super) struct Watch {
    member: Member<Lease>,
    begun: Time,
    /// Time of the request in progress.
    asked: Time,
    /// When the next round begins; none while one is in progress.
    due: Option<Time>,
}

impl Watch {
    pub(super) fn new(
        me: CellId,
        lease: Lease,
        members: &Members,
        lapse: Option<Duration>,
        now: Time,
    ) -> Self {
        Self {
            member: Member::new(me, lease, members).with_lapse(lapse),
            begun: now,
            asked: now,
            due: Some(now + nanos(poll_interval(SILENCE_MS))),
        }
    }
}

impl World {
    /// Has a process enter.
    pub(super) fn join(&mut self, number: u16) {
        let start = self.chance.below(u64::MAX);
        let joining = Joining::new(number, self.lives[usize::from(number)]);
        let question = joining.request();
        let joiner = Joiner {
            start,
            joining,
            asked: self.now,
        };
        self.joiners.insert(number, joiner);
        self.ask(Asker::Joiner(number, start), question, 0);
    }

    fn ask(&mut self, asker: Asker, question: EtcdRequest<Lease>, pause: Time) {
        let asked = self.now + pause;
        match asker {
            Asker::Joiner(number, _) => {
                if let Some(joiner) = self.joiners.get_mut(&number) {
                    joiner.asked = asked;
                }
            }
            Asker::Member(cell) => {
                if let Some(watch) = self.watch_of(cell) {
                    watch.asked = asked;
                }
            }
        }
        let at = asked + HOP_NS + self.chance.below(MILLISECOND);
        self.queue.put(at, Event::EtcdRequest(asker, question));
    }

    pub(super) fn request(&mut self, asker: Asker, question: EtcdRequest<Lease>) {
        let number = match asker {
            Asker::Joiner(number, _) => number,
            Asker::Member(cell) => cell.number,
        };
        let host = self.host_of(number);
        let lost = self.chance.once_in(LOST_ONCE_IN);
        if !self.network.has_etcd(host) {
            let at = self.now + ETCD_PATIENCE;
            self.queue.put(at, Event::Answer(asker, None));
            return;
        }
        if !matches!(question, EtcdRequest::Records | EtcdRequest::Keep(_)) {
            self.say(|| format!("cell {number} asks etcd: {question:?}"));
        }
        let answer = self.etcd.ask(self.now, question);
        let (at, answer) = if lost {
            (self.now + ETCD_PATIENCE, None)
        } else {
            (self.now + HOP_NS, Some(answer))
        };
        self.queue.put(at, Event::Answer(asker, answer));
    }

    pub(super) fn answered(&mut self, asker: Asker, answer: Option<EtcdAnswer<Lease>>) {
        match asker {
            Asker::Joiner(number, start) => self.go_on_joining(number, start, answer),
            Asker::Member(cell) => {
                if let Some(at) = self.stopped_until(cell) {
                    self.queue.put(at, Event::Answer(asker, answer));
                    return;
                }
                let now = self.now;
                let Some(watch) = self.watch_of(cell) else { return };
                if let Some(EtcdAnswer::Records(records)) = &answer
                    && records.members.get(&cell.number) == Some(&cell.life)
                {
                    let asked = watch.asked;
                    self.confirm(cell, asked);
                }
                let Some(watch) = self.watch_of(cell) else { return };
                let news = watch.member.answered(answer);
                match watch.member.request() {
                    Some(question) => self.ask(asker, question, 0),
                    None => {
                        let at = now + nanos(poll_interval(SILENCE_MS));
                        watch.due = Some(at);
                        self.queue.put(at, Event::Round(cell));
                    }
                }
                for news in news {
                    self.check_news(cell, news);
                    self.to(cell, self.now, Input::Changed(news));
                }
            }
        }
    }

    fn go_on_joining(&mut self, number: u16, start: u64, answer: Option<EtcdAnswer<Lease>>) {
        let joiner = self.joiners.get_mut(&number);
        let Some(joiner) = joiner.filter(|joiner| joiner.start == start) else {
            return;
        };
        let pause = match joiner.joining.answered(answer) {
            Progress::GoesOn => 0,
            Progress::Waits => nanos(POLL_INTERVAL_MIN),
            Progress::In(me, lease, records) => {
                let asked = joiner.asked;
                self.joiners.remove(&number);
                let members = records.members;
                let watch = Watch::new(me, lease, &members, self.lapse(), self.now);
                let had_lives = records.lives.into_keys();
                let had_lives = had_lives.filter(|other| !self.are_near(number, *other));
                let expected = had_lives.filter(|_| self.cells.stop()).collect();
                self.begin(me, Some(watch), expected);
                self.confirm(me, asked);
                self.queue
                    .put(self.now + nanos(poll_interval(SILENCE_MS)), Event::Round(me));
                let others = members
                    .into_iter()
                    .filter(|(other, _)| !self.are_near(number, *other));
                let others = others.map(|(number, life)| CellId { number, life }).collect();
                let at = self.now + START_NS;
                self.queue.put(at, Event::Call(me, others, at));
                return;
            }
        };
        let question = joiner.joining.request();
        self.ask(Asker::Joiner(number, start), question, pause);
    }

    fn watch_of(&mut self, cell: CellId) -> Option<&mut Watch> {
        let process = self.processes.get_mut(&cell.number);
        process.filter(|process| process.id == cell)?.watch.as_mut()
    }

    pub(super) fn begin_round(&mut self, cell: CellId) {
        if let Some(at) = self.stopped_until(cell) {
            self.queue.put(at, Event::Round(cell));
            return;
        }
        let now = self.now;
        let Some(watch) = self.watch_of(cell) else { return };
        // When a suspicion came before the round was due, it has begun earlier.
        if watch.due.is_none_or(|due| due > now) {
            return;
        }
        watch.due = None;
        watch.member.begin_round(Duration::from_nanos(now - watch.begun));
        watch.begun = now;
        if let Some(question) = watch.member.request() {
            self.ask(Asker::Member(cell), question, 0);
        }
    }

    /// A cell requests the removal of another's entry.
    pub(super) fn accuse(&mut self, at: CellId, suspect: CellId) {
        self.say(|| format!("{at} suspects {suspect}"));
        let now = self.now;
        if let Some(watch) = self.watch_of(at) {
            watch.member.suspect(suspect);
            if let Some(due) = &mut watch.due {
                *due = now;
                self.queue.put(now, Event::Round(at));
            }
        }
    }

    /// A cell tries to connect to the last one of these, until that accepts.
    pub(super) fn call(&mut self, cell: CellId, mut members: Vec<CellId>, since: Time) {
        if let Some(at) = self.stopped_until(cell) {
            self.queue.put(at, Event::Call(cell, members, since));
            return;
        }
        if self.watch_of(cell).is_none() {
            return;
        }
        let Some(callee) = members.last().copied() else {
            self.to(cell, self.now, Input::Called);
            return;
        };
        let (here, there) = (self.host_of(cell.number), self.host_of(callee.number));
        let is_cut = self.network.is_cut(here, there) || self.network.is_cut(there, here);
        let is_down = self.down.contains(&there);
        let other = self.processes.get(&callee.number).map(|process| process.id);
        let takes = other.filter(|other| self.stopped_until(*other).is_none());
        let is_linked = takes.is_some_and(|other| self.wires.contains_key(&(cell, other)));
        let way = self.network.way_ns(here, there) + self.network.way_ns(there, here);
        let next = match takes {
            _ if is_linked => Some(0),
            Some(other) if !is_cut => {
                self.link(cell, other, self.now + way);
                Some(way)
            }
            // The callee has no process.
            None if !is_cut && !is_down && other.is_none() && !self.joiners.contains_key(&callee.number) => {
                self.accuse(cell, callee);
                Some(way)
            }
            _ if self.now - since > nanos(MESSAGE_TIMEOUT) => {
                self.accuse(cell, callee);
                Some(0)
            }
            _ => None,
        };
        match next {
            Some(after) => {
                members.pop();
                let at = self.now + after;
                self.queue.put(at, Event::Call(cell, members, at));
            }
            None => {
                let at = self.now + CALL_AGAIN;
                self.queue.put(at, Event::Call(cell, members, since));
            }
        }
    }

    /// Checks that a cell's view of the members is etcd's.
    fn check_news(&mut self, at: CellId, news: MembershipEvent) {
        let cell = match news {
            MembershipEvent::Died(cell) => cell,
            MembershipEvent::Evicted => at,
            MembershipEvent::Lapsed(number) => {
                let runs = self.monitors.values().find(|vm| vm.runs && vm.cell == number);
                if let Some(vm) = runs {
                    self.broken = Some(format!(
                        "{at} receives that cell {number} has lapsed, in which {} runs",
                        vm.host.name
                    ));
                }
                return;
            }
        };
        if self.etcd.has(cell) {
            self.broken = Some(format!("{at} receives that {cell} is over, which has its entry"));
        }
    }
}
