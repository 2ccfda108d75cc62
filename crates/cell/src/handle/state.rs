//! State of a VM in its monitor while its shards start, run and end.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use child_process::ServiceProcess;
use nix::sys::eventfd::EventFd;
use serde_json::Value;
use shard_api::launch::{Answer, Order, OrderId};
use subnet::process::Count;

use super::pins::{ShardHost, VcpuLocation};
use super::resident::ResidentOrder;
use crate::control_group::ControlGroup;
use crate::link::not_running;
use crate::pidfd;
use crate::remote::clock::keeper::Clocks;
use crate::secondary_shards::SecondaryShards;
use crate::shard_process::{ACKNOWLEDGEMENT_LIMIT, QUIT_LIMIT, ShardProcess};

#[derive(Debug, Default)]
pub(crate) struct State {
    /// The home's process, while it takes orders.
    pub(crate) orders: Option<Arc<ShardProcess>>,
    /// The home's process, while it runs.
    pub(crate) home: Option<Arc<ShardProcess>>,
    /// Whether the home has reported that it runs: from then on it reads orders.
    pub(crate) runs: bool,
    /// Whether the home was killed because a part ended.
    pub(crate) is_cut_off: bool,
    /// The home's last status, or the reason why it has none.
    pub(super) status: Option<Result<Value, String>>,
    /// Time and number of the order for the home's status that is not answered yet.
    pub(super) status_asked: Option<(Instant, OrderId)>,
    /// Whether the VM has run, its client has the report, and its keeper has all that another process needs
    /// to serve it.
    pub(super) is_left: bool,
    /// Whether no shard starts any more.
    pub(super) over: bool,
    /// Event that is readable from then on.
    pub(super) over_event: Option<EventFd>,
    /// Whether the VM is to end: a reboot ends it too.
    pub(crate) ending: bool,
    /// Whether the VM is to end at once. While a stop waits for the guest, an end of its shard has a cause of
    /// its own.
    pub(crate) is_killed: bool,
    /// Number of clients that wait for an answer.
    pub(super) asking: usize,
    /// The cells of a VM that spans them, in the order of its shards.
    pub(crate) cells: Vec<u16>,
    /// Number of frames that its cards were not allowed to send, for each card.
    pub(crate) filtered: Vec<Arc<Count>>,
    /// The clocks of a VM over several hosts.
    pub(crate) clocks: Option<Clocks>,
    /// Its shards beside the home, while they run.
    pub(crate) parts: Option<SecondaryShards>,
    /// The order whose answer a client waits for.
    pub(super) asked: Option<OrderId>,
    /// The answer to that order, once it has come.
    pub(super) answer: Option<Answer>,
    /// The order for statistics of vCPUs that is not answered yet.
    pub(super) statistics_asked: Option<OrderId>,
    /// The answer to that order, once it has come, with its files, which may be of any type.
    pub(super) statistics: Option<(Answer, Vec<File>)>,
    /// The locations of the vCPUs of a VM that spans cells, as last reported; none since one was to move.
    pub(super) located: Option<Vec<VcpuLocation>>,
    /// Orders of drivers to vCPUs that are not answered yet, the oldest first.
    pub(super) gated: VecDeque<OrderId>,
    /// The limit of guest memory in the host's memory, of a VM that can be trimmed.
    pub(super) resident: ResidentOrder,
    /// Whether the VM is paused by order.
    pub(super) is_paused: bool,
    /// The order that pauses the VM (true) or resumes it, until it is answered.
    pub(super) pausing: Option<(OrderId, bool)>,
    /// Number of starts of a home.
    pub(super) starts: u64,
    /// The control group of its processes, if it has one.
    pub(crate) group: Option<Arc<ControlGroup>>,
    /// The processes of its cards, in this boot. One that has ended is still among them.
    pub(crate) cards: Vec<CardPidfd>,
    /// Files of its shared regions, by name.
    pub(crate) regions: Vec<(String, Arc<OwnedFd>)>,
    /// Whether shards of it run on other hosts.
    pub(crate) has_remote_parts: bool,
    /// The last order to quit that the home received.
    quit: Option<OrderId>,
    /// Whether the home has acknowledged an order to quit.
    is_quitting: bool,
    /// The reason why it can't run on, if a cell is lost that it uses.
    pub(crate) lost: Option<String>,
}

/// Process id and shared pidfd of a process that serves one of the VM's cards.
#[derive(Clone, Debug)]
pub(crate) struct CardPidfd {
    pid: i32,
    pidfd: Arc<OwnedFd>,
}

impl CardPidfd {
    /// The process of a card.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn of(process: &ServiceProcess) -> io::Result<Self> {
        Ok(Self {
            pid: process.id().cast_signed(),
            pidfd: Arc::new(process.pidfd().try_clone_to_owned()?),
        })
    }

    /// Its process id, which may be another process's once it has ended.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }
}

impl State {
    /// Records that the home's process has started.
    pub(crate) fn start(&mut self, home: Arc<ShardProcess>, parts: Option<SecondaryShards>) {
        (self.home, self.orders, self.parts) = (Some(home.clone()), Some(home), parts);
        (self.runs, self.is_cut_off, self.status_asked) = (false, false, None);
        (self.asked, self.answer) = (None, None);
        (self.statistics_asked, self.statistics) = (None, None);
        self.located = None;
        self.gated.clear();
        self.resident.start();
        (self.pausing, self.is_paused) = (None, false);
        (self.quit, self.is_quitting) = (None, false);
        self.starts += 1;
        // A part that ended before could only report that there was no home yet.
        if self.parts.as_ref().is_some_and(SecondaryShards::have_ended) {
            self.end_without_part();
        }
    }

    /// Records that the home that has just started has run since before.
    pub(crate) fn go_on(&mut self, is_paused: bool) {
        (self.runs, self.is_paused) = (true, is_paused);
    }

    /// The processes of its shards and cards on this host that have not ended.
    pub(super) fn processes(&self) -> Vec<i32> {
        let cards = self.cards.iter();
        let cards = cards.filter(|card| !pidfd::has_ended(card.pidfd.as_fd()));
        self.shards()
            .into_iter()
            .chain(cards.map(CardPidfd::pid))
            .collect()
    }

    /// The processes of its shards on this host that have not ended.
    pub(super) fn shards(&self) -> Vec<i32> {
        let home = self
            .home
            .iter()
            .filter(|home| !home.has_ended())
            .map(|home| home.pid);
        let parts = self.parts.iter().flat_map(SecondaryShards::pids);
        home.chain(parts).collect()
    }

    /// The shards of a VM that spans cells, in their order, each by its cell; empty if not all of them run.
    pub(super) fn shards_of_cells(&self) -> Vec<(u16, ShardHost)> {
        let home = self.home.iter().map(|home| ShardHost::of_process(home));
        let parts = self.parts.iter().flat_map(SecondaryShards::hosts);
        let hosts: Option<Vec<ShardHost>> = home.chain(parts).collect();
        match hosts {
            Some(hosts) if hosts.len() == self.cells.len() => self.cells.iter().copied().zip(hosts).collect(),
            _ => Vec::new(),
        }
    }

    /// Sends an order to the home, and never blocks. Returns the order's number.
    pub(super) fn order(&self, order: &Order) -> io::Result<OrderId> {
        match &self.orders {
            Some(home) => home.order(order),
            None => Err(not_running()),
        }
    }

    /// Orders the home to resume, without waiting for the answer.
    pub(super) fn order_to_resume(&mut self) -> io::Result<()> {
        let id = self.order(&Order::Resume)?;
        self.pausing = Some((id, false));
        Ok(())
    }

    /// Orders the home to quit, and waits for nothing.
    pub(crate) fn order_to_quit(&mut self) -> io::Result<()> {
        self.quit = Some(self.order(&Order::Quit)?);
        Ok(())
    }

    /// Time limit for the home to end after an order to quit: [`QUIT_LIMIT`] if it has acknowledged the
    /// order, or is of the release before and never does; else [`ACKNOWLEDGEMENT_LIMIT`]. A home whose guest
    /// has not run yet has nothing to write.
    pub(super) fn quit_limit(&self) -> Duration {
        let is_silent = |home: &Arc<ShardProcess>| self.runs && !home.acknowledges_quit();
        if self.is_quitting || self.home.as_ref().is_some_and(is_silent) {
            QUIT_LIMIT
        } else {
            ACKNOWLEDGEMENT_LIMIT
        }
    }

    /// Whether this answer pauses the VM (true) or resumes it; none if it answers another order, or refuses.
    pub(crate) fn paused_by(&mut self, to: OrderId, answer: &Answer) -> Option<bool> {
        let (asked, paused) = self.pausing?;
        if asked != to {
            return None;
        }
        self.pausing = None;
        (*answer == Answer::Done).then(|| {
            self.is_paused = paused;
            paused
        })
    }

    /// Takes an answer of the home with its files, which are dropped if no client waits for them.
    pub(crate) fn note_answer_with_files(&mut self, to: OrderId, answer: Answer, files: Vec<File>) {
        if self.statistics_asked == Some(to) {
            (self.statistics_asked, self.statistics) = (None, Some((answer, files)));
        } else {
            self.note_answer(to, answer);
        }
    }

    /// Takes an answer of the home, which may be under a guest's control: an answer to no order is dropped.
    pub(crate) fn note_answer(&mut self, to: OrderId, answer: Answer) {
        if self.asked == Some(to) {
            (self.asked, self.answer) = (None, Some(answer));
            return;
        }
        if let Some(index) = self.gated.iter().position(|asked| *asked == to) {
            self.gated.remove(index);
            return;
        }
        if self.resident.note_answer(to) {
            return;
        }
        if self.quit == Some(to) {
            self.is_quitting |= answer == Answer::Done;
            return;
        }
        if self.status_asked.is_none_or(|(_, asked)| asked != to) {
            return;
        }
        self.status = match answer {
            Answer::Status(status) => Some(Ok(status)),
            Answer::Refused { why } => Some(Err(why)),
            Answer::Done
            | Answer::Moved(_)
            | Answer::MemoryMoved { .. }
            | Answer::PageMap(_)
            | Answer::VcpuStatistics { .. } => return,
        };
        self.status_asked = None;
    }

    /// Ends the home after a part has ended without an order. While the home is being loaded it reads no
    /// orders, and may wait for memory that the part had.
    pub(super) fn end_without_part(&mut self) {
        if let (Some(home), false) = (&self.home, self.runs) {
            home.cut_off();
            self.is_cut_off = true;
        } else {
            // A home that is gone has ended. Sending never blocks, so the lock may be held.
            let _ = self.order_to_quit();
        }
    }

    /// Whether the shard that has just started is to end at once.
    pub(crate) fn is_to_end(&self) -> bool {
        self.ending || self.lost.is_some() || self.parts.as_ref().is_some_and(SecondaryShards::have_ended)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use shard_api::launch::MoveReport;

    use super::*;

    #[test]
    fn answer_to_another_order_is_dropped() {
        let id = |request| OrderId {
            incarnation: 1,
            request,
        };
        let mut state = State {
            status_asked: Some((Instant::now(), id(3))),
            asked: Some(id(4)),
            ..State::default()
        };
        let moved = || Answer::Moved(MoveReport::Done { still_ns: 1 });
        let of_another = OrderId {
            incarnation: 2,
            request: 3,
        };
        for to in [id(0), id(2), id(5), id(u64::MAX), of_another] {
            state.note_answer(to, Answer::Status(json!(1)));
            state.note_answer(to, moved());
            let why = "no".to_owned();
            state.note_answer(to, Answer::Refused { why });
        }
        // The answer is for the right order, and of the wrong kind.
        state.note_answer(id(3), moved());
        state.note_answer(id(3), Answer::Done);
        assert_eq!((&state.status, &state.answer), (&None, &None));
        assert!(state.status_asked.is_some());

        state.note_answer(id(3), Answer::Status(json!(2)));
        state.note_answer(id(4), moved());
        assert_eq!(
            (&state.status, &state.answer),
            (&Some(Ok(json!(2))), &Some(moved()))
        );
        assert!(state.status_asked.is_none());
        // A second answer to the same order changes nothing.
        state.note_answer(id(3), Answer::Status(json!(3)));
        state.note_answer(id(4), Answer::Done);
        assert_eq!(
            (&state.status, &state.answer),
            (&Some(Ok(json!(2))), &Some(moved()))
        );
    }

    #[test]
    fn only_a_confirmed_order_to_pause_or_resume_pauses_or_resumes() {
        let id = |request| OrderId {
            incarnation: 1,
            request,
        };
        let mut state = State::default();
        assert_eq!(
            state.paused_by(OrderId::default(), &Answer::Done),
            None,
            "not asked"
        );
        state.pausing = Some((id(1), true));
        assert_eq!(state.paused_by(id(2), &Answer::Done), None, "another order");
        let why = "no".to_owned();
        assert_eq!(state.paused_by(id(1), &Answer::Refused { why }), None);
        assert!(!state.is_paused);
        state.pausing = Some((id(3), true));
        assert_eq!(state.paused_by(id(3), &Answer::Done), Some(true));
        assert!(state.is_paused);
        assert_eq!(state.paused_by(id(3), &Answer::Done), None, "a second answer");
        state.pausing = Some((id(4), false));
        assert_eq!(state.paused_by(id(4), &Answer::Done), Some(false));
        assert!(!state.is_paused);
    }

    #[test]
    fn files_are_kept_for_the_order_that_asked_for_them_alone() {
        let id = |request| OrderId {
            incarnation: 1,
            request,
        };
        let file = || vec![File::open("/dev/null").unwrap()];
        let statistics = || Answer::VcpuStatistics { files: 1 };
        let mut state = State {
            statistics_asked: Some(id(2)),
            asked: Some(id(3)),
            ..State::default()
        };
        state.note_answer_with_files(id(1), statistics(), file());
        assert!(state.statistics.is_none() && state.answer.is_none());
        state.note_answer_with_files(id(2), statistics(), file());
        let (answer, files) = state.statistics.take().unwrap();
        assert_eq!((answer, files.len()), (statistics(), 1));
        state.note_answer_with_files(id(2), statistics(), file());
        assert!(state.statistics.is_none(), "a second answer");
        state.note_answer_with_files(id(3), Answer::Done, Vec::new());
        assert_eq!(state.answer, Some(Answer::Done));
    }

    #[test]
    fn refusal_is_the_answer_to_the_order() {
        let id = OrderId::default();
        let refused = || Answer::Refused { why: "no".to_owned() };
        let mut state = State {
            status_asked: Some((Instant::now(), id)),
            ..State::default()
        };
        state.note_answer(id, refused());
        assert_eq!(state.status, Some(Err("no".to_owned())));
        state.asked = Some(id);
        state.note_answer(id, refused());
        assert_eq!(state.answer, Some(refused()));
    }
}
