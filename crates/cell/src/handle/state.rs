//! What a monitor knows of a VM while its shards start, run and end.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use serde_json::Value;
use shard_api::launch::{MoveReport, Order};

use crate::parts::Parts;
use crate::remote::clock::keeper::Clocks;
use crate::shard_process::ShardProcess;

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Where orders go, while the home takes them.
    pub(crate) orders: Option<Arc<ShardProcess>>,
    /// The home's process, while it runs.
    pub(crate) home: Option<Arc<ShardProcess>>,
    /// The home has said that it runs: from then on it looks at orders.
    pub(crate) runs: bool,
    /// The home was killed because a part ended.
    pub(crate) is_cut_off: bool,
    pub(crate) status: Option<Value>,
    /// When the home was asked for its status, if it has not answered yet.
    pub(crate) status_asked: Option<Instant>,
    /// No shard starts any more.
    pub(super) over: bool,
    /// Somebody wants the end: a reboot ends it too.
    pub(crate) ending: bool,
    /// Clients that wait for an answer.
    pub(super) asking: usize,
    /// The cells of a VM that spans them, in the order of its shards.
    pub(crate) cells: Vec<u16>,
    /// Frames that its cards were not allowed to send.
    pub(crate) filtered: Arc<AtomicU64>,
    /// Of a VM over several hosts.
    pub(crate) clocks: Option<Clocks>,
    /// Its shards beside the home, while they run.
    pub(crate) parts: Option<Parts>,
    /// What became of the last move.
    pub(crate) moved: Option<MoveReport>,
    /// Why a cell that it spans is lost, if one is.
    pub(crate) lost: Option<String>,
}

impl State {
    /// The home's process has started.
    pub(crate) fn start(&mut self, home: Arc<ShardProcess>, parts: Option<Parts>) {
        (self.home, self.orders, self.parts) = (Some(home.clone()), Some(home), parts);
        (self.runs, self.is_cut_off, self.status_asked) = (false, false, None);
        // One that ended before could only tell that there was no home yet.
        if self.parts.as_ref().is_some_and(Parts::have_ended) {
            self.end_without_part();
        }
    }

    /// A part has ended before it was told to, and the home must end too. While it is being loaded it looks at no orders, and may
    /// wait for memory that the part had.
    pub(super) fn end_without_part(&mut self) {
        if let (Some(home), false) = (&self.home, self.runs) {
            home.cut_off();
            self.is_cut_off = true;
        } else if let Some(home) = &self.orders {
            // One that is gone has ended. No order waits, so the lock may be held.
            let _ = home.order(&Order::Quit);
        }
    }

    /// Whether the shard that has just started is to end at once.
    pub(crate) fn is_to_end(&self) -> bool {
        self.ending || self.parts.as_ref().is_some_and(Parts::have_ended)
    }
}
