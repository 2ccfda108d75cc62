//! Pause and resume of a VM, and of all its shards if it spans cells.
//!
//! The shards beside the home are paused first, and the home, which has the devices, last: their vCPUs may
//! wait for a device until they pause. So the home's answer decides whether the VM is paused, as for a VM
//! with one shard. Resumes take the same order: a shard that goes on may send packets to a paused one. If one
//! shard fails, all go on. Page servers and receivers of packets take no part in a pause, so no shard waits
//! for one that is paused.

use std::io;
use std::time::Duration;

use shard_api::launch::{Answer, Order};

use super::{VmHandle, not_an_answer};
use crate::secondary_shards::{PendingOrder, SecondaryShards};

/// Time limit for the shards beside the home to answer. A shard refuses after 2 s.
const PARTS_LIMIT: Duration = Duration::from_secs(3);

impl VmHandle {
    /// Pauses the VM until [`VmHandle::resume`].
    ///
    /// # Errors
    /// If the VM does not run, or a shard refuses, ends or does not answer in time: then all shards go on.
    pub fn pause(&self) -> io::Result<()> {
        if self.state().ending {
            return Err(io::Error::other("the VM is ending"));
        }
        let paused = self.confirm_by_all(&Order::Pause);
        if paused.is_err() {
            // A shard may obey later, when no client waits any more. The home's answer to this order makes
            // the record true.
            self.order_to_go_on();
        }
        paused
    }

    /// Resumes a paused VM.
    ///
    /// # Errors
    /// If a shard ends or does not answer in time. Then the VM stays paused, and can be resumed again.
    pub fn resume(&self) -> io::Result<()> {
        self.confirm_by_all(&Order::Resume)
    }

    /// Sends each vCPU a non-maskable interrupt.
    ///
    /// # Errors
    /// If the VM does not run, or does not answer in time.
    pub fn nmi(&self) -> io::Result<()> {
        self.confirm(&Order::Nmi)
    }

    /// Pauses or resumes all shards as in the VM's record, after another process may have ended while it
    /// paused or resumed the VM. Waits for no answer: a shard that obeys already changes nothing.
    pub(crate) fn align_shards(&self, is_paused: bool) {
        let order = if is_paused { Order::Pause } else { Order::Resume };
        self.order_parts(&order);
        // The record is true already, so this is no event.
        let _ = self.order(&order);
    }

    /// Orders all shards to go on, without waiting for their answers.
    fn order_to_go_on(&self) {
        self.order_parts(&Order::Resume);
        let _ = self.state().order_to_resume();
    }

    /// Sends an order to all shards beside the home.
    fn order_parts(&self, order: &Order) {
        let parts = self
            .state()
            .parts
            .as_ref()
            .map_or_else(Vec::new, SecondaryShards::all);
        for part in parts {
            // A shard that is gone ends the VM.
            let _ = part.order(order);
        }
    }

    /// Sends an order to all shards, the home last, and waits for their confirmations.
    fn confirm_by_all(&self, order: &Order) -> io::Result<()> {
        if self.state().parts.is_none() {
            return self.confirm(order);
        }
        // No vCPU moves between the shards meanwhile, and no other client pauses or resumes.
        let _updating = self.begin_update();
        let (group, starts) = {
            let state = self.state();
            let group = state
                .parts
                .as_ref()
                .filter(|_| state.runs)
                .map(SecondaryShards::begin_order);
            (group, state.starts)
        };
        if let Some(group) = group {
            self.confirm_by_parts(&group, starts, order)?;
        }
        self.confirm(order)
    }

    /// Sends an order to one shard, 0 for the home, and waits for its confirmation. Needs
    /// [`VmHandle::begin_update`].
    pub(super) fn confirm_by_one(&self, shard: usize, order: &Order) -> io::Result<()> {
        let Some(index) = shard.checked_sub(1) else {
            return self.confirm(order);
        };
        let (group, starts) = {
            let state = self.state();
            let parts = state.parts.as_ref().filter(|_| state.runs);
            let group = parts.and_then(|parts| parts.begin_order_to_one(index));
            (group, state.starts)
        };
        let group = group.ok_or_else(not_running)?;
        self.confirm_by_parts(&group, starts, order)
    }

    /// Sends an order to shards beside the home, and waits for their confirmations. `starts` is the number of
    /// starts of a home when the order began.
    fn confirm_by_parts(&self, group: &PendingOrder, starts: u64, order: &Order) -> io::Result<()> {
        // This is not under the lock: a part on another host may take a while.
        group.send(order);
        drop(self.wait(PARTS_LIMIT, |state| {
            group.outcome(false).is_some() || state.over || state.starts != starts
        }));
        let outcome = group.outcome(true);
        outcome
            .unwrap_or_else(|| Err("its shards do not answer".to_owned()))
            .map_err(io::Error::other)
    }

    /// Sends an order that is only confirmed. A shard that loads its VM would obey it much later.
    pub(super) fn confirm(&self, order: &Order) -> io::Result<()> {
        if !self.state().runs {
            return Err(not_running());
        }
        match self.act(order)? {
            Answer::Done => Ok(()),
            other => Err(not_an_answer(&other)),
        }
    }
}

fn not_running() -> io::Error {
    io::Error::other("the VM does not run yet")
}

#[cfg(test)]
mod tests;
