//! The processes of a spanning VM's shards beside its home, while it runs.
//!
//! Each has a thread that reads its reports. When one ends without an order, the VM ends, and the reason is
//! kept.

mod group_order;
mod statistics_order;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use locks::IgnorePoison;
use serde_json::Value;
use shard_api::launch::{Answer, Ending, Order, OrderId, Report};

use self::group_order::GroupOrder;
use self::statistics_order::StatisticsOrder;
use crate::ending::is_witness;
use crate::handle::{ShardHost, UNANSWERED_MAX};
use crate::remote::part::RemotePart;
use crate::remote::protocol::FromPart;
use crate::shard_process::ShardProcess;

/// Time limit for a shard to be ready.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for the report of a shard that has the cause of an end, after another shard has reported the
/// end itself: over hosts the two come by different connections.
const CAUSE_LIMIT: Duration = Duration::from_secs(1);

/// A started shard beside the home.
#[derive(Debug)]
pub enum SecondaryShard {
    /// The shard is on this host.
    Here {
        /// Number of its cell.
        cell: u16,
        /// The shard's process, a child of the VM's keeper.
        process: ShardProcess,
    },
    /// The shard is on another host.
    There(Arc<RemotePart>),
}

/// All shards beside the home.
#[derive(Debug)]
pub struct SecondaryShards {
    running: Vec<Running>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Running {
    part: Arc<SecondaryShard>,
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when there is a cause.
    caused: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The counters of each shard, since the last request.
    statuses: Vec<Option<Value>>,
    /// The order to one or all of them whose answers are awaited.
    group: Option<GroupOrder>,
    /// The order for statistics of vCPUs to one of them, until its files are taken.
    statistics: Option<StatisticsOrder>,
    /// Orders to vCPUs of each shard that are not answered yet, the oldest first.
    gated: Vec<VecDeque<OrderId>>,
    /// The reason why the VM ended, if it was one of them.
    cause: Option<Ending>,
    /// Whether they were ordered to end.
    ending: bool,
}

impl SecondaryShard {
    /// Waits until the shard reports that it is ready, or returns the reason why it is not. Returns the
    /// missing layers of its sandbox if its host is another than the home's: otherwise the home's sandbox
    /// lacks them, too.
    pub fn wait_until_ready(&self) -> Result<Vec<String>, String> {
        let not_ready = match self {
            Self::Here { process, .. } => {
                let failed = |error: io::Error| format!("its shard in {}: {error}", self.place());
                let deadline = Instant::now() + START_LIMIT;
                let mut reports = process.link.reports().map_err(failed)?;
                match reports.next_report_by(deadline) {
                    Some(Report::Running { .. }) => return Ok(Vec::new()),
                    Some(Report::Ended(Ending::ShardFailed { detail })) => detail,
                    Some(Report::Unlike { versions }) => process.program.unlike(versions).to_string(),
                    _ => process.kill(),
                }
            }
            Self::There(remote) => match remote.next(Some(START_LIMIT)) {
                Some(FromPart::Report(Report::Running { sandbox_missing, .. })) => {
                    let place = self.place();
                    let missing = sandbox_missing.iter().map(|line| format!("{place}: {line}"));
                    return Ok(missing.collect());
                }
                Some(FromPart::Report(Report::Ended(Ending::ShardFailed { detail }))) => detail,
                Some(FromPart::Gone(why)) => why,
                _ => remote
                    .lost()
                    .unwrap_or_else(|| "it does not get ready".to_owned()),
            },
        };
        Err(format!("its shard in {}: {not_ready}", self.place()))
    }

    /// Its cell and host, for people.
    fn place(&self) -> String {
        match self {
            Self::Here { cell, .. } => format!("cell {cell}"),
            Self::There(remote) => remote.endpoint().to_string(),
        }
    }

    /// Sends an order to it, and returns the number that its answer has. A shard on this host never blocks
    /// that. One on another host answers only the orders of [`is_awaited`](crate::remote::part::is_awaited),
    /// and statuses without their number.
    pub fn order(&self, order: &Order) -> io::Result<OrderId> {
        match self {
            Self::Here { process, .. } => process.order(order),
            Self::There(remote) => remote.order(order),
        }
    }

    /// Passes the shard's reports, with their files, to `heard` until it ends. Returns its last report, or a
    /// description of its end.
    fn reports(&self, mut heard: impl FnMut(Report, Vec<File>)) -> Result<Ending, String> {
        match self {
            Self::Here { process, .. } => {
                let mut reports = process.link.reports().map_err(|error| error.to_string())?;
                loop {
                    match reports.next_report() {
                        Some(Report::Ended(ending)) => return Ok(ending),
                        Some(report) => heard(report, reports.take_files()),
                        // A broken shard sends no further reports.
                        None => {
                            let gone = process.kill();
                            return process.ending_of_exit(&gone).ok_or(gone);
                        }
                    }
                }
            }
            Self::There(remote) => {
                let mut last = None;
                loop {
                    match remote.next(None) {
                        Some(FromPart::Report(Report::Ended(ending))) => last = Some(ending),
                        Some(FromPart::Report(report)) => heard(remote.numbered(report), Vec::new()),
                        Some(FromPart::Answered(answer)) => {
                            let report = remote.answered(answer);
                            report.into_iter().for_each(|report| heard(report, Vec::new()));
                        }
                        // The sender of the request has the answer already.
                        Some(FromPart::OfHost { .. }) => {}
                        // Only now it has ended.
                        Some(FromPart::Gone(why)) => return last.ok_or(why),
                        Some(FromPart::Lost(_)) | None => {
                            return Err(remote.lost().unwrap_or_else(|| "its monitor is gone".to_owned()));
                        }
                    }
                }
            }
        }
    }

    /// Its process, if that is on this host and has not ended.
    fn pid(&self) -> Option<i32> {
        match self {
            Self::Here { process, .. } => (!process.has_ended()).then_some(process.pid),
            Self::There(_) => None,
        }
    }

    /// Ends its process and waits for that, so that a reader of its reports comes to their end.
    fn end(&self) {
        if let Self::Here { process, .. } = self {
            process.wait();
            // The watcher must read the end of the socket, even if another process holds the shard's end.
            process.link.shut_down();
        }
    }
}

impl SecondaryShards {
    /// Watches them. Other threads call `told` when one has answered, and `ended` when the VM must end
    /// because of one.
    pub fn watch(
        parts: Vec<SecondaryShard>,
        told: impl Fn() + Clone + Send + 'static,
        ended: impl Fn() + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        {
            let mut state = shared.lock();
            state.statuses = vec![None; parts.len()];
            state.gated = vec![VecDeque::new(); parts.len()];
        }
        let mut all = Self {
            running: parts.into_iter().map(Running::from).collect(),
            shared,
        };
        for (index, one) in all.running.iter_mut().enumerate() {
            let (shared, part) = (all.shared.clone(), one.part.clone());
            let (told, ended) = (told.clone(), ended.clone());
            let watcher = std::thread::Builder::new()
                .name("part".into())
                .spawn(move || shared.watch(index, &part, &told, &ended))?;
            one.watcher = Some(watcher);
        }
        Ok(all)
    }

    /// Shards on this host, each with its cell.
    pub(crate) fn here(&self) -> impl Iterator<Item = (u16, &ShardProcess)> {
        self.running.iter().filter_map(|one| match &*one.part {
            SecondaryShard::Here { cell, process } => Some((*cell, process)),
            SecondaryShard::There(_) => None,
        })
    }

    /// Where each of them is; none for one on this host that has ended.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = Option<ShardHost>> {
        self.running.iter().map(|one| match &*one.part {
            SecondaryShard::Here { process, .. } => ShardHost::of_process(process),
            SecondaryShard::There(remote) => Some(ShardHost::There(remote.clone())),
        })
    }

    /// The shards on other hosts.
    pub(crate) fn remote(&self) -> Vec<Arc<RemotePart>> {
        let remote = self.running.iter().filter_map(|one| match &*one.part {
            SecondaryShard::Here { .. } => None,
            SecondaryShard::There(remote) => Some(remote.clone()),
        });
        remote.collect()
    }

    /// The processes of the shards on this host.
    pub fn pids(&self) -> Vec<i32> {
        self.running.iter().filter_map(|one| one.part.pid()).collect()
    }

    /// Whether one has ended without an order.
    pub fn have_ended(&self) -> bool {
        self.shared.lock().cause.is_some()
    }

    /// One of them, by its number among them.
    pub fn get(&self, index: usize) -> Option<Arc<SecondaryShard>> {
        Some(self.running.get(index)?.part.clone())
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<SecondaryShard>> {
        self.running.iter().map(|one| one.part.clone()).collect()
    }

    /// Begins an order to all of them. There is one order at a time, to one or all.
    pub fn begin_order(&self) -> PendingOrder {
        self.shared.lock().group = Some(GroupOrder::new(self.running.len()));
        PendingOrder {
            shared: self.shared.clone(),
            parts: self.all().into_iter().enumerate().collect(),
        }
    }

    /// Begins an order to one of them, by its number among them; none if there is no such shard.
    pub fn begin_order_to_one(&self, index: usize) -> Option<PendingOrder> {
        let part = self.get(index)?;
        self.shared.lock().group = Some(GroupOrder::to_one(self.running.len(), index));
        Some(PendingOrder {
            shared: self.shared.clone(),
            parts: vec![(index, part)],
        })
    }

    /// Sends an order to a vCPU of one of them, on this host, without waiting for the answer. Never blocks.
    /// Returns false if there is no such shard, or [`UNANSWERED_MAX`] such orders are not answered.
    pub(crate) fn gate(&self, index: usize, order: &Order) -> bool {
        let part = self.running.get(index).map(|one| &*one.part);
        let Some(SecondaryShard::Here { process, .. }) = part else {
            return false;
        };
        // Under the lock, so that the answer finds its order.
        let mut state = self.shared.lock();
        let Some(gated) = state
            .gated
            .get_mut(index)
            .filter(|gated| gated.len() < UNANSWERED_MAX)
        else {
            return false;
        };
        let sent = process.order(order);
        gated.extend(sent.as_ref().ok());
        sent.is_ok()
    }

    /// Orders one of them, on this host, to pass files of statistics of its vCPUs, beginning with `first`.
    /// Never blocks. Returns false if there is no such shard, or it reads no orders. There is one such order
    /// at a time.
    pub fn order_statistics(&self, index: usize, first: u8) -> bool {
        let part = self.running.get(index).map(|one| &*one.part);
        let Some(SecondaryShard::Here { process, .. }) = part else {
            return false;
        };
        // Under the lock, so that the answer finds its order.
        let mut state = self.shared.lock();
        let sent = process.order(&Order::VcpuStatistics { first });
        state.statistics = sent.ok().map(|id| StatisticsOrder::new(index, id));
        state.statistics.is_some()
    }

    /// Whether no answer to [`SecondaryShards::order_statistics`] is awaited.
    pub fn has_statistics(&self) -> bool {
        let state = self.shared.lock();
        state.statistics.as_ref().is_none_or(StatisticsOrder::is_over)
    }

    /// Takes the files that the shard has passed, which may be of any type. Ends the order.
    pub fn take_statistics(&self) -> Vec<File> {
        let order = self.shared.lock().statistics.take();
        order.map_or_else(Vec::new, StatisticsOrder::into_files)
    }

    /// Drops their last status, and returns all, for the next order.
    pub fn begin_status(&self) -> Vec<Arc<SecondaryShard>> {
        self.shared.lock().statuses.fill(None);
        self.all()
    }

    /// Their counters, when all have reported them.
    pub fn statuses(&self) -> Option<Vec<Value>> {
        self.shared.lock().statuses.iter().cloned().collect()
    }

    /// Ends all shards, since the VM has ended with this last report of the home. Returns the reason, if it
    /// was one of them.
    pub fn end(mut self, home: Option<&Ending>) -> Option<Ending> {
        if home.is_some_and(is_witness) {
            self.shared.wait_for_cause();
        }
        self.stop();
        self.shared.lock().cause.take()
    }

    fn stop(&mut self) {
        self.shared.lock().ending = true;
        for one in &self.running {
            let _ = one.part.order(&Order::Quit);
        }
        for one in &mut self.running {
            one.part.end();
            if let Some(watcher) = one.watcher.take() {
                let _ = watcher.join();
            }
        }
    }
}

/// An order to one or all shards beside the home, until dropped.
#[derive(Debug)]
pub struct PendingOrder {
    shared: Arc<Shared>,
    /// The shards that receive it, with their numbers.
    parts: Vec<(usize, Arc<SecondaryShard>)>,
}

impl PendingOrder {
    /// Sends the order to its shards.
    pub fn send(&self, order: &Order) {
        for (index, part) in &self.parts {
            let sent = part.order(order).map_err(|error| error.to_string());
            if let Some(group) = &mut self.shared.lock().group {
                group.sent(*index, sent);
            }
        }
    }

    /// The outcome, or none while answers are missing. An error has one line. `is_late` says that no answer
    /// is awaited any longer.
    pub fn outcome(&self, is_late: bool) -> Option<Result<(), String>> {
        let outcome = self.shared.lock().group.as_ref()?.outcome(is_late)?;
        let place = |index: usize| {
            let part = self.parts.iter().find(|(of, _)| *of == index);
            part.map_or_else(String::new, |(_, part)| part.place())
        };
        Some(outcome.map_err(|(index, failure)| format!("its shard in {}: {failure}", place(index))))
    }
}

impl Drop for PendingOrder {
    fn drop(&mut self) {
        self.shared.lock().group = None;
    }
}

impl From<SecondaryShard> for Running {
    fn from(part: SecondaryShard) -> Self {
        Self {
            part: Arc::new(part),
            watcher: None,
        }
    }
}

impl Drop for SecondaryShards {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn watch(&self, index: usize, part: &SecondaryShard, told: &impl Fn(), ended: &impl Fn()) {
        let ending = part.reports(|report, files| {
            let Report::Answer { to, answer } = report else {
                return;
            };
            let mut state = self.lock();
            let statistics = state.statistics.as_mut();
            if statistics.is_some_and(|order| order.answered(index, to, files)) {
                drop(state);
                told();
                return;
            }
            if let Some(gated) = state.gated.get_mut(index)
                && let Some(asked) = gated.iter().position(|asked| *asked == to)
            {
                gated.remove(asked);
                return;
            }
            if let Answer::Status(status) = answer {
                // All receive the request as one, so the number does not matter.
                state.statuses[index] = Some(status);
            } else {
                let Some(group) = &mut state.group else { return };
                group.answered(index, to, &answer);
            }
            drop(state);
            told();
        });
        let mut state = self.lock();
        state.group.iter_mut().for_each(|group| group.lost(index));
        let statistics = state.statistics.iter_mut();
        statistics.for_each(|order| order.lost(index));
        if state.ending {
            drop(state);
            told();
            return;
        }
        let cause = match ending {
            Ok(Ending::ShardFailed { detail }) | Err(detail) => Ending::ShardFailed {
                detail: format!("in {}: {detail}", part.place()),
            },
            Ok(ending) => ending,
        };
        // The first one counts; a shard that has only seen another's end may have reported before that one.
        if state.cause.as_ref().is_none_or(is_witness) {
            state.cause = Some(cause);
        }
        drop(state);
        self.caused.notify_all();
        told();
        ended();
    }

    /// Waits for a while until one of them is known to have ended by itself.
    fn wait_for_cause(&self) {
        let is_open = |state: &mut State| state.cause.as_ref().is_none_or(is_witness);
        drop(self.caused.wait_timeout_while(self.lock(), CAUSE_LIMIT, is_open));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().ignore_poison()
    }
}
