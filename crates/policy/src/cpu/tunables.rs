//! Times and bounds of CPU scheduling: a named constant with its source for each, and the values in force.

use serde::{Deserialize, Serialize};

use super::{MICROSECOND, MILLISECOND, Nanos};

/// Longest run of a gang before its rank changes. The paper names none. Ours: three ticks, so that a switch
/// of eight CPUs (about 50 us in the simulator) costs less than a fifth of a percent.
pub const SLICE: Nanos = 30 * MILLISECOND;
/// Period of a driver's tick, at which it publishes its word and its nodes of the load tree. Cellular Disco,
/// section 4.2: "every 10 ms timer tick".
pub const TICK: Nanos = 10 * MILLISECOND;
/// Time since its vCPU was descheduled before an idle CPU of the same node takes it. Cellular Disco, section
/// 4.2: 4 ms, the best of 1 to 10 ms; the range made a difference of 1 to 2%.
pub const IDLE_DELAY_INTRA_NODE: Nanos = 4 * MILLISECOND;
/// The same for an idle CPU of another node of the cell: 6 ms (section 4.2).
pub const IDLE_DELAY_INTER_NODE: Nanos = 6 * MILLISECOND;
/// Least time between two searches of an idle CPU. Ours: a quarter of the shortest delay.
pub const IDLE_SEARCH_INTERVAL: Nanos = MILLISECOND;
/// Run queues that one search of an idle CPU reads at most. Ours: keeps the cost flat in large cells.
pub const IDLE_SEARCH_QUEUES_MAX: u16 = 32;
/// Period of the balancer of each region of eight CPUs. Cellular Disco, section 4.2: 20 ms.
pub const REGION_BALANCE_PERIOD: Nanos = 20 * MILLISECOND;
/// Period of the balancer of the whole machine. Cellular Disco, section 4.2: 80 ms.
pub const MACHINE_BALANCE_PERIOD: Nanos = 80 * MILLISECOND;
/// Greatest difference of loads, in vCPUs, that is not balanced. Cellular Disco, section 4.2: one.
pub const DISPARITY: u32 = 1;
/// Time for which a moved vCPU stays before the periodic balancer moves it again. The paper has no such
/// rule. Ours: one pass over the machine, against moves back and forth.
pub const MOVE_HOLD: Nanos = 80 * MILLISECOND;
/// Time in the halted state after which a vCPU no longer belongs to its gang. Ours: four times the 50 us for
/// which a guest's lock sleeps.
pub const HALT_HYSTERESIS: Nanos = 200 * MICROSECOND;
/// Window over which halts of a vCPU are counted, of the time in which no driver stops it. Ours: ten ticks,
/// so that a vCPU leaves or joins its gang ten times a second at most.
pub const HALT_WINDOW: Nanos = 100 * MILLISECOND;
/// Rate of halts from which a vCPU may be better off without its gang. Ours: a halt is noticed within a
/// millisecond, so that at this rate a gang may leave a quarter of the CPU unused.
pub const HALTS_HIGH_PER_S: u64 = 250;
/// Rate of halts below which a busy vCPU joins its gang again. Ours: a fifth, so that a rate that varies does
/// not move it in and out.
pub const HALTS_LOW_PER_S: u64 = 50;
/// The same for a vCPU with a high rate of halts. Ours: two ticks, far above its halts, so that its CPU does
/// not change hands at each of them.
pub const HALT_HYSTERESIS_HIGH: Nanos = 2 * TICK;
/// Share of a CPU, thousandths, up to which such a vCPU runs beside a gang. Ours: a gang of two loses twice
/// that share at most when the CPUs are taken from it at different times, an eighth here.
pub const LIGHT_PERMILLE: u64 = 62;
/// Time for which a driver waits for the other CPUs of a gang that it has started. Ours: far above a message
/// and a switch (tens of microseconds), below a tenth of a slice.
pub const STRAGGLER_TIMEOUT: Nanos = 2 * MILLISECOND;
/// Time for which a driver does not start a gang of which a CPU did not follow. Ours: one slice.
pub const STRAGGLER_HOLD: Nanos = SLICE;
/// Time without a new word after which a CPU counts as stalled. Ours: five ticks, more than the three ticks
/// by which a word may be stale and the tick that publishes it.
pub const STALL_TIMEOUT: Nanos = 50 * MILLISECOND;
/// Period over which caps and reservations are counted. Ours: that of the kernel's `cpu.max`.
pub const ENTITLEMENT_PERIOD: Nanos = 100 * MILLISECOND;
/// Virtual time by which a VM that has slept may be ahead of the CPU on which it wakes. Ours: half a slice.
pub const SLEEPER_CREDIT: Nanos = SLICE / 2;
/// Time of waiting after which a VM's virtual time falls to that of the VM that runs in its place. Ours: no
/// vCPU waits much longer, whatever its VM used while it was alone; weights are exact up to a ratio of 33.
pub const OVERDUE: Nanos = 1_000 * MILLISECOND;
/// Step of the clock beyond which a driver takes it for a jump. Ours: a hundred ticks.
pub const CLOCK_STEP_MAX: Nanos = 1_000 * MILLISECOND;

/// The values in force. Keys of a file have the unit in their name.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tunables {
    /// See [`SLICE`].
    pub slice_ns: Nanos,
    /// See [`TICK`].
    pub tick_ns: Nanos,
    /// See [`IDLE_DELAY_INTRA_NODE`].
    pub idle_delay_intra_node_ns: Nanos,
    /// See [`IDLE_DELAY_INTER_NODE`].
    pub idle_delay_inter_node_ns: Nanos,
    /// See [`IDLE_SEARCH_INTERVAL`].
    pub idle_search_interval_ns: Nanos,
    /// See [`IDLE_SEARCH_QUEUES_MAX`].
    pub idle_search_queues_max: u16,
    /// See [`REGION_BALANCE_PERIOD`].
    pub region_balance_period_ns: Nanos,
    /// See [`MACHINE_BALANCE_PERIOD`].
    pub machine_balance_period_ns: Nanos,
    /// See [`DISPARITY`].
    pub disparity: u32,
    /// See [`MOVE_HOLD`].
    pub move_hold_ns: Nanos,
    /// See [`HALT_HYSTERESIS`].
    pub halt_hysteresis_ns: Nanos,
    /// See [`HALT_HYSTERESIS_HIGH`].
    pub halt_hysteresis_high_ns: Nanos,
    /// See [`LIGHT_PERMILLE`].
    pub light_permille: u64,
    /// See [`HALT_WINDOW`].
    pub halt_window_ns: Nanos,
    /// See [`HALTS_HIGH_PER_S`].
    pub halts_high_per_s: u64,
    /// See [`HALTS_LOW_PER_S`].
    pub halts_low_per_s: u64,
    /// See [`STRAGGLER_TIMEOUT`].
    pub straggler_timeout_ns: Nanos,
    /// See [`STRAGGLER_HOLD`].
    pub straggler_hold_ns: Nanos,
    /// See [`STALL_TIMEOUT`].
    pub stall_timeout_ns: Nanos,
    /// See [`ENTITLEMENT_PERIOD`].
    pub entitlement_period_ns: Nanos,
    /// See [`SLEEPER_CREDIT`].
    pub sleeper_credit_ns: Nanos,
    /// See [`OVERDUE`].
    pub overdue_ns: Nanos,
    /// See [`CLOCK_STEP_MAX`].
    pub clock_step_max_ns: Nanos,
}

impl Default for Tunables {
    fn default() -> Self {
        Self {
            slice_ns: SLICE,
            tick_ns: TICK,
            idle_delay_intra_node_ns: IDLE_DELAY_INTRA_NODE,
            idle_delay_inter_node_ns: IDLE_DELAY_INTER_NODE,
            idle_search_interval_ns: IDLE_SEARCH_INTERVAL,
            idle_search_queues_max: IDLE_SEARCH_QUEUES_MAX,
            region_balance_period_ns: REGION_BALANCE_PERIOD,
            machine_balance_period_ns: MACHINE_BALANCE_PERIOD,
            disparity: DISPARITY,
            move_hold_ns: MOVE_HOLD,
            halt_hysteresis_ns: HALT_HYSTERESIS,
            halt_hysteresis_high_ns: HALT_HYSTERESIS_HIGH,
            light_permille: LIGHT_PERMILLE,
            halt_window_ns: HALT_WINDOW,
            halts_high_per_s: HALTS_HIGH_PER_S,
            halts_low_per_s: HALTS_LOW_PER_S,
            straggler_timeout_ns: STRAGGLER_TIMEOUT,
            straggler_hold_ns: STRAGGLER_HOLD,
            stall_timeout_ns: STALL_TIMEOUT,
            entitlement_period_ns: ENTITLEMENT_PERIOD,
            sleeper_credit_ns: SLEEPER_CREDIT,
            overdue_ns: OVERDUE,
            clock_step_max_ns: CLOCK_STEP_MAX,
        }
    }
}
