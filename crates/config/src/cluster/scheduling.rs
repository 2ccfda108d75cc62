//! Division of the CPUs of a host's cells among their VMs, in a cluster file.

use std::ops::Not;

use policy::cpu::MILLISECOND;
use policy::cpu::tunables::Tunables;
use serde::{Deserialize, Serialize};

use super::ClusterSpec;
use crate::fault::{Fault, fault};

/// Greatest value of a time, nanoseconds: half of the time for which a vCPU may be stopped at most.
const TIME_MAX: u64 = 2_500 * MILLISECOND;

/// Scheduler of a cell's CPUs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuScheduler {
    /// Linux divides the CPUs among the threads of vCPUs.
    #[default]
    Linux,
    /// A driver for each CPU chooses the vCPU that it runs; the vCPUs of a VM run together.
    Gangs,
}

/// Scheduler of the CPUs, and its times.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulingSpec {
    /// The scheduler.
    pub cpus: CpuScheduler,
    /// Times and bounds of the drivers; those of [`Tunables::default`] when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tunables: Option<Tunables>,
    /// Whether cells move vCPUs to idle CPUs of other cells by themselves.
    // Omitted by default, so that a process of an older release can read the cluster's files.
    #[serde(skip_serializing_if = "Not::not")]
    pub lend_cpus: bool,
}

impl ClusterSpec {
    /// Checks that no two cells drive one CPU, that no vCPU moves between drivers or cells of one CPU, that
    /// Linux gets no tunables, and that each tunable is within its range.
    pub(super) fn check_scheduling(&self) -> Result<(), Fault> {
        let Some(spec) = &self.scheduling else {
            return Ok(());
        };
        if spec.cpus == CpuScheduler::Gangs && self.shared_cpus {
            return Err(fault(
                &["scheduling", "cpus"],
                "gangs on CPUs that cells may share: two drivers would stop each other's vCPUs",
                "leave out `shared_cpus`, or write `cpus = \"linux\"`",
            ));
        }
        if spec.lend_cpus && (spec.cpus == CpuScheduler::Gangs || self.shared_cpus) {
            return Err(match spec.cpus {
                CpuScheduler::Gangs => fault(
                    &["scheduling", "lend_cpus"],
                    "a vCPU on another cell's CPU would leave the drivers, and its VM's gang with it",
                    "leave out `lend_cpus`, or write `cpus = \"linux\"`",
                ),
                CpuScheduler::Linux => fault(
                    &["scheduling", "lend_cpus"],
                    "cells that share CPUs have none to lend",
                    "leave out `lend_cpus`, or `shared_cpus`",
                ),
            });
        }
        let Some(tunables) = &spec.tunables else {
            return Ok(());
        };
        if spec.cpus == CpuScheduler::Linux {
            return Err(fault(
                &["scheduling", "tunables"],
                "tunables of the drivers, which `cpus = \"linux\"` does not start",
                "write `cpus = \"gangs\"`, or leave out the tunables",
            ));
        }
        for (key, value, least, most) in ranges(tunables) {
            if !(least..=most).contains(&value) {
                return Err(fault(
                    &["scheduling", "tunables", key],
                    format!("{key} = {value} is not within {least} to {most}"),
                    "write a value within the range, or leave the key out",
                ));
            }
        }
        Ok(())
    }
}

/// Greatest rate of halts that can be named: no vCPU reaches it, so that none leaves its gang.
const HALTS_MAX: u64 = 1_000_000_000;

/// Name, value and range of each tunable. A tick is at most a slice, which is at most what a period of
/// entitlement has room for.
fn ranges(tunables: &Tunables) -> [(&'static str, u64, u64, u64); 23] {
    let t = tunables;
    let (millisecond, tick, period) = (MILLISECOND, t.tick_ns, t.entitlement_period_ns);
    [
        ("tick_ns", tick, millisecond, 100 * millisecond),
        ("entitlement_period_ns", period, tick, TIME_MAX),
        ("slice_ns", t.slice_ns, tick, TIME_MAX),
        (
            "idle_delay_intra_node_ns",
            t.idle_delay_intra_node_ns,
            0,
            TIME_MAX,
        ),
        (
            "idle_delay_inter_node_ns",
            t.idle_delay_inter_node_ns,
            0,
            TIME_MAX,
        ),
        (
            "idle_search_interval_ns",
            t.idle_search_interval_ns,
            100_000,
            TIME_MAX,
        ),
        ("idle_search_queues_max", t.idle_search_queues_max.into(), 1, 1024),
        (
            "region_balance_period_ns",
            t.region_balance_period_ns,
            tick,
            TIME_MAX,
        ),
        (
            "machine_balance_period_ns",
            t.machine_balance_period_ns,
            tick,
            TIME_MAX,
        ),
        ("disparity", t.disparity.into(), 1, 63),
        ("move_hold_ns", t.move_hold_ns, 0, TIME_MAX),
        ("halt_hysteresis_ns", t.halt_hysteresis_ns, 0, tick),
        (
            "halt_hysteresis_high_ns",
            t.halt_hysteresis_high_ns,
            t.halt_hysteresis_ns,
            TIME_MAX,
        ),
        ("halt_window_ns", t.halt_window_ns, tick, TIME_MAX),
        ("halts_high_per_s", t.halts_high_per_s, 1, HALTS_MAX),
        ("halts_low_per_s", t.halts_low_per_s, 0, t.halts_high_per_s),
        ("light_permille", t.light_permille, 0, 1_000),
        (
            "straggler_timeout_ns",
            t.straggler_timeout_ns,
            100_000,
            t.slice_ns,
        ),
        ("straggler_hold_ns", t.straggler_hold_ns, 0, TIME_MAX),
        ("stall_timeout_ns", t.stall_timeout_ns, 2 * tick, TIME_MAX),
        ("sleeper_credit_ns", t.sleeper_credit_ns, 0, TIME_MAX),
        ("overdue_ns", t.overdue_ns, t.slice_ns, TIME_MAX),
        (
            "clock_step_max_ns",
            t.clock_step_max_ns,
            1_000 * millisecond,
            60_000 * millisecond,
        ),
    ]
}
