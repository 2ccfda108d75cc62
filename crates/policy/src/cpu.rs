//! CPU scheduling: which vCPU each CPU runs, and which vCPU moves to which CPU.
//!
//! Each CPU has one [`driver::Driver`], the only writer of its run queue. A driver takes one event at a time
//! and returns effects. It reads what other CPUs publish through a [`view::View`], which may be stale, and
//! acts on another CPU by a message to its driver only, which may refuse (Multikernel, sections 4.2 to 4.5;
//! Cellular Disco, sections 2.3 and 4). `docs/design/scheduling.md` has the invariants and the argument why
//! the drivers agree.

pub mod affinity;
pub mod assignment;
pub mod cell_balancer;
pub mod clock;
pub mod dependency;
pub mod driver;
pub mod entitlement;
pub mod entry;
pub mod gang;
pub mod halt_rate;
pub mod idle_balancer;
pub mod load_tree;
pub mod message;
pub mod periodic_balancer;
pub mod reserved_time;
pub mod run_queue;
pub mod set;
pub mod topology;
pub mod tunables;
pub mod view;
pub mod windows;
pub mod word;

/// Time or a duration, nanoseconds. Points of time are those of one monotonic clock of the host.
pub type Nanos = u64;

/// Nanoseconds of a microsecond.
pub const MICROSECOND: Nanos = 1_000;
/// Nanoseconds of a millisecond.
pub const MILLISECOND: Nanos = 1_000_000;

/// CPU of the machine, numbered from 0 over all cells.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct CpuId(pub u16);

/// Slot number of a VM, unique among the cells that share CPUs.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct VmId(pub u16);

/// Name of a vCPU, unique among the cells that share CPUs.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct VcpuId {
    /// Slot number of its VM.
    pub vm: VmId,
    /// Its number within the VM, from 0.
    pub index: u16,
}

impl CpuId {
    /// The number as an index of tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
