//! Threads of the vCPUs of a VM that spans cells of one host, and orders to them by its home's process.

use std::io;

use shard_api::launch::Order;

use super::VmHandle;
use super::pins::ShardHost;
use crate::affinity::threads_of;

/// vCPUs of one boot of a VM that spans cells, until one of them moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpanThreads {
    /// Number of the boot.
    pub(crate) starts: u64,
    /// Threads by the number of the vCPU.
    pub(crate) threads: Vec<SpanThread>,
}

/// Thread that runs a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanThread {
    pub(crate) cell: u16,
    /// Number of the shard among the VM's.
    pub(crate) shard: usize,
    pub(crate) shard_pid: i32,
    pub(crate) thread_id: i32,
    /// Time for which it has run or waited for a CPU, milliseconds.
    pub(crate) wanted_ms: u64,
}

impl VmHandle {
    /// Whether the VM spans cells, and all of them are on this host.
    pub(crate) fn spans_this_host(&self) -> bool {
        let state = self.state();
        !state.cells.is_empty() && !state.has_remote_parts
    }

    /// The threads of the vCPUs of a VM that spans cells. May wait for a report of the shards after a boot or
    /// a move.
    ///
    /// # Errors
    /// If the VM does not run, or a vCPU moves just now.
    pub(crate) fn span_threads(&self) -> io::Result<SpanThreads> {
        let busy = || io::Error::other("a vCPU of the VM moves, or the VM is changed, just now");
        // The threads are read without this lock: meanwhile the gate could give no order to the VM's vCPUs.
        let (starts, locations, shards) = {
            let _updating = self.try_begin_update().ok_or_else(busy)?;
            let (starts, runs) = {
                let state = self.state();
                (state.starts, state.runs)
            };
            if !runs {
                return Err(io::Error::other("the VM does not run"));
            }
            let locations = self.known_locations()?;
            (starts, locations, self.state().shards_of_cells())
        };
        let mut found = Vec::new();
        for (cell, shard) in &shards {
            let ShardHost::Here(pid) = shard else {
                return Err(io::Error::other("a shard is on another host"));
            };
            found.push((*cell, *pid, threads_of(*pid)?));
        }
        let thread = |(vcpu, location): (u8, &super::pins::VcpuLocation)| {
            let (cell, shard_pid, threads) = found.get(location.shard)?;
            let known = threads.iter().find(|thread| thread.vcpu == vcpu)?;
            Some(SpanThread {
                cell: *cell,
                shard: location.shard,
                shard_pid: *shard_pid,
                thread_id: known.id,
                wanted_ms: known.ran_ms.saturating_add(known.waited_ms),
            })
        };
        let threads: Option<Vec<SpanThread>> = (0..).zip(&locations).map(thread).collect();
        let threads = threads.ok_or_else(|| io::Error::other("not all of its vCPUs run"))?;
        // A process id is the shard's as long as that runs.
        let state = self.state();
        if state.starts != starts || state.shards_of_cells().len() != shards.len() {
            return Err(io::Error::other("the VM ended or rebooted meanwhile"));
        }
        if state.located.as_ref() != Some(&locations) {
            return Err(busy());
        }
        Ok(SpanThreads { starts, threads })
    }

    /// Sends an order to a vCPU of the boot with the number `starts`, to a shard by its number, and never
    /// blocks. Not sent while a vCPU moves: a stopped one moves when its lease is over. Returns whether it
    /// was sent.
    pub(crate) fn gate_in(&self, starts: u64, shard: usize, order: &Order) -> bool {
        let Some(_updating) = self.try_begin_update() else {
            return false;
        };
        let Some(index) = shard.checked_sub(1) else {
            return self.gate(starts, order);
        };
        let state = self.state();
        let parts = state
            .parts
            .as_ref()
            .filter(|_| state.runs && state.starts == starts);
        parts.is_some_and(|parts| parts.gate(index, order))
    }
}
