//! Parts of a cell that starts: its scheduler, its state and its sockets.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

use config::cluster::{CellPlan, CpuScheduler};
use hostinfo::{facts, topology};
use protocol::CellId;
use registry::cluster::files::{CellFiles, Files};

use super::assertions::Asserted;
use super::{allocation_rate, places, remote_cells};
use crate::cluster::hosts::Hosts;
use crate::cluster::membership::Membership;
use crate::cluster::state::{State, borrowing_limits};
use crate::scheduler::Scheduler;
use crate::socket::bind;

/// Starts the drivers of the cell's CPUs, if the cluster file asks for them.
pub(super) fn start_scheduler(files: &Files, plan: &CellPlan) -> io::Result<Option<Scheduler>> {
    let scheduling = files.scheduling()?;
    if scheduling.cpus == CpuScheduler::Linux {
        return Ok(None);
    }
    let facts: knowledge::Base = topology::discover().into_iter().collect();
    let nodes = facts::nodes(&knowledge::Machine::of(&facts), |_| true);
    Scheduler::start(&plan.cpus, &nodes, scheduling.tunables.unwrap_or_default()).map(Some)
}

/// State of a cell that starts, from the records of lent memory, VMs, cordon and cells, and the facts.
pub(super) fn initial_state(
    me: CellId,
    plan: CellPlan,
    own: &CellFiles,
    files: &Files,
    hosts: Option<&Hosts>,
    membership: Option<&Membership>,
    asserted: Asserted,
) -> io::Result<State> {
    let expected = membership.zip(hosts);
    let expected = expected.map_or_else(Vec::new, |(membership, hosts)| {
        remote_cells::expected(membership, &hosts.site())
    });
    let Asserted { capacity, costs } = asserted;
    if let Some(hosts) = hosts {
        hosts.set_route_costs(costs.route_costs());
    }
    let (cpus, memory_bytes) = (plan.cpus.len(), plan.memory_bytes);
    let borrowing = files.borrowing()?;
    let limits = borrowing_limits(&borrowing, allocation_rate::measure, cpus, memory_bytes);
    let lent = own.lent()?;
    let requested = lent.is_some().then(|| own.lent_on_request()).transpose()?;
    let mut state = State::new(me, std::process::id(), plan, lent, places::running(files)?)
        .with_borrowing(limits, requested)
        .with_cordon(own.is_cordoned())
        .with_regions(files.regions()?)
        .with_route_costs(costs)
        .expecting(expected);
    state.assert(capacity);
    Ok(state)
}

/// A socket in place of the one that a dead process left.
pub(super) fn fresh(path: &Path) -> io::Result<UnixListener> {
    let _ = std::fs::remove_file(path);
    bind(path)
}
