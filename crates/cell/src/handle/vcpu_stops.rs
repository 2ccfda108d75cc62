//! Stops of single vCPUs, each by a lease.
//!
//! The shard that the vCPU is in carries out the order. Of a VM that spans cells, the home reports where its
//! vCPUs are. The answer is kept, and requested again after a move, or when a shard refuses. A stop waits for
//! a move that is under way, for a short time: so no stop is renewed while a vCPU is to move, and a stopped
//! vCPU moves when its lease is over, after 100 ms at most. A move that takes place after its time limit
//! ends a stop.

use std::io;
use std::time::Duration;

use locks::IgnorePoison;
use shard_api::launch::{Order, VCPU_STOP_MS_MAX};

use super::VmHandle;
use super::pins::VcpuLocation;

/// Time limit for a move, pause or update that is under way. A move takes milliseconds as a rule.
const UPDATE_LIMIT: Duration = Duration::from_secs(1);
/// Greatest number of shards that receive the order: a vCPU may move late, more than once.
const SHARDS_MAX: usize = 3;

impl VmHandle {
    /// Stops a vCPU for `for_ms` milliseconds from now, or renews its stop. It goes on by itself.
    ///
    /// # Errors
    /// If the time is not within the limits, the VM does not run or has no such vCPU, the stop would be too
    /// long with its renewals, or a vCPU moves for longer than [`UPDATE_LIMIT`].
    pub fn stop_vcpu(&self, vcpu: u8, for_ms: u16) -> io::Result<()> {
        if !(1..=VCPU_STOP_MS_MAX).contains(&for_ms) {
            return Err(io::Error::other(format!(
                "a vCPU is stopped for 1 to {VCPU_STOP_MS_MAX} ms at a time, not for {for_ms} ms"
            )));
        }
        self.order_where_it_is(vcpu, &Order::StopVcpu { vcpu, for_ms })
    }

    /// Ends the stop of a vCPU before its deadline.
    ///
    /// # Errors
    /// As [`VmHandle::stop_vcpu`].
    pub fn continue_vcpu(&self, vcpu: u8) -> io::Result<()> {
        self.order_where_it_is(vcpu, &Order::ContinueVcpu { vcpu })
    }

    /// Sends an order to the shard that a vCPU is in.
    fn order_where_it_is(&self, vcpu: u8, order: &Order) -> io::Result<()> {
        if self.state().cells.is_empty() {
            return self.confirm(order);
        }
        // Several clients may renew a stop: they wait for each other, and not as for a move.
        let _stopping = self.0.stopping.lock().ignore_poison();
        let updating = self.begin_update_within(UPDATE_LIMIT);
        let _updating = updating.ok_or_else(|| {
            io::Error::other("a vCPU of the VM moves, or the VM is changed or paused, just now; try again")
        })?;
        let locations = self.known_locations()?;
        let mut asked = vec![shard_of(vcpu, &locations)?];
        loop {
            let shard = asked[asked.len() - 1];
            let Err(refusal) = self.confirm_by_one(shard, order) else {
                return Ok(());
            };
            self.state().located = None;
            let found = self.known_locations().ok();
            let now = found.and_then(|locations| shard_of(vcpu, &locations).ok());
            match next_shard(&asked, now) {
                Some(next) => asked.push(next),
                None => return Err(refusal),
            }
        }
    }

    /// The locations of the vCPUs as they were last reported, since no vCPU was to move; else requests them.
    pub(super) fn known_locations(&self) -> io::Result<Vec<VcpuLocation>> {
        let known = self.state().located.clone();
        if let Some(known) = known {
            return Ok(known);
        }
        let locations = self.locations()?;
        self.state().located = Some(locations.clone());
        Ok(locations)
    }
}

/// The shard of a vCPU.
fn shard_of(vcpu: u8, locations: &[VcpuLocation]) -> io::Result<usize> {
    let location = locations.get(usize::from(vcpu));
    let location = location.ok_or_else(|| io::Error::other(format!("the VM has no vCPU {vcpu}")))?;
    Ok(location.shard)
}

/// The shard that receives the order after the shards of `asked` have refused it, the last one last; none if
/// the vCPU is still in that one, is not known to be in any (`now`), or has moved too often.
fn next_shard(asked: &[usize], now: Option<usize>) -> Option<usize> {
    now.filter(|now| asked.len() < SHARDS_MAX && asked.last() != Some(now))
}

#[cfg(test)]
mod tests;
