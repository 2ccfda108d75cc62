//! State of other CPUs that a driver reads. All of it may be stale.

use super::entry::VcpuEntry;
use super::windows::WindowState;
use super::word::Word;
use super::{CpuId, VcpuId, VmId};

/// Terms of a VM, set by its cell and constant for the drivers but for the window, which time changes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Terms {
    /// Number of its vCPUs.
    pub vcpus: u16,
    /// Weight of its gang's time beside that of others on the same CPUs; 100 is usual, 0 counts as 1.
    pub weight: u32,
    /// CPU time that it may use in each period, thousandths of a CPU, if that is limited.
    pub cap_permille: Option<u32>,
    /// CPU time that it has before others in each period, thousandths of a CPU.
    pub reservation_permille: u32,
    /// Whether its busy vCPUs run together.
    pub is_gang: bool,
    /// Whether it may run now, of a VM that spans cells.
    pub window: WindowState,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            vcpus: 1,
            weight: super::entitlement::WEIGHT_DEFAULT,
            cap_permille: None,
            reservation_permille: 0,
            is_gang: true,
            window: WindowState::Absent,
        }
    }
}

/// Published state of the machine: shared memory inside a cell, messages of other cells. Implementations
/// may return values of up to three ticks ago.
pub trait View {
    /// Word that a CPU's driver published last: its running gang, mode and load.
    fn word(&self, cpu: CpuId) -> Word;
    /// Entry of a vCPU. One that does not exist is idle.
    fn vcpu(&self, vcpu: VcpuId) -> VcpuEntry;
    /// vCPU in a slot of a CPU's queue, below [`Word::queued`].
    fn queued(&self, cpu: CpuId, slot: usize) -> Option<VcpuId>;
    /// A CPU's copy of its node of the load tree at a level; level 0 is its own load.
    fn load(&self, cpu: CpuId, level: usize) -> u32;
    /// Weight, reservation and cap of a VM.
    fn terms(&self, vm: VmId) -> Terms;
    /// Whether affinity lets a vCPU run on a CPU.
    fn may_run(&self, vcpu: VcpuId, cpu: CpuId) -> bool;
    /// Whether a vCPU already depends on a cell: uses any of its CPUs, memory or devices.
    fn depends_on(&self, vcpu: VcpuId, cell: u16) -> bool;
}
