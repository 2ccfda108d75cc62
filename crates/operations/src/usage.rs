//! Use of this host's CPUs and memory by cells, VMs and vCPUs, as `mirrorball top` shows it.
//!
//! A [`Collector`] takes a [`Reading`]: the counters at one moment, from the registry, the cells, the
//! processes that serve VMs, and the host's `/proc`. Each source has a time limit, so that one that does not
//! answer delays no other. Two readings make a [`Sample`], whose rates are differences of counters. A figure
//! that no source reports is `None`.

mod collector;
mod in_flight;
mod rates;
mod reading;
mod sample;
mod sources;
#[cfg(test)]
mod tests;

pub use collector::{Collector, SOURCE_LIMIT};
pub use reading::{
    CellReading, CellState, Counters, CpuQueue, CpuReading, MovedBy, QueueMoves, Reading, Unknown,
    VcpuReading, VmReading, VmState,
};
pub use sample::{CpuUse, CpuVcpu, Sample, VcpuUse, VmUse};
