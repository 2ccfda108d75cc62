//! Entry of a vCPU: published by the driver of the CPU on whose queue it is.

use super::{CpuId, Nanos};

/// Whether a vCPU has work, and a CPU.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum VcpuState {
    /// Halted for longer than the hysteresis. Its gang does not need it.
    #[default]
    Idle,
    /// Has work and no CPU.
    Waiting,
    /// Chosen by its CPU's driver.
    Running,
    /// Has halted often: Linux runs it beside the chosen vCPU, and its gang does not need it.
    Ungated,
}

impl VcpuState {
    /// Whether it competes for its CPU with its gang: it waits, or is chosen.
    pub fn is_gated(self) -> bool {
        matches!(self, Self::Waiting | Self::Running)
    }
}

/// State of a vCPU that the driver of its CPU publishes. The driver that gives the vCPU away writes the entry
/// for the last time before it sends the vCPU, so each entry has one writer at a time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct VcpuEntry {
    /// CPU on whose queue it is, or to which it is on its way.
    pub cpu: CpuId,
    /// Whether it has work, and a CPU.
    pub state: VcpuState,
    /// Its part of its VM's virtual time; the sum of all parts, which may wrap, is the VM's.
    pub vtime: Nanos,
    /// Time at which it began to wait, or was last charged.
    pub since: Nanos,
    /// Number of the entitlement period that `used_us` counts.
    pub period: u32,
    /// CPU time in that period, microseconds.
    pub used_us: u32,
}

impl VcpuEntry {
    /// The entry in four integers.
    pub fn pack(&self) -> [u64; 4] {
        let state = match self.state {
            VcpuState::Idle => 0,
            VcpuState::Waiting => 1,
            VcpuState::Running => 2,
            VcpuState::Ungated => 3,
        };
        [
            u64::from(self.cpu.0) << 2 | state,
            self.vtime,
            self.since,
            u64::from(self.period) << 32 | u64::from(self.used_us),
        ]
    }

    /// The entry of four integers. Any four are one.
    pub fn unpack([place, vtime, since, used]: [u64; 4]) -> Self {
        Self {
            cpu: CpuId((place >> 2) as u16),
            state: match place & 3 {
                0 => VcpuState::Idle,
                1 => VcpuState::Waiting,
                2 => VcpuState::Running,
                _ => VcpuState::Ungated,
            },
            vtime,
            since,
            period: (used >> 32) as u32,
            used_us: used as u32,
        }
    }

    /// CPU time in the entitlement period `period`, microseconds.
    pub fn used_us(&self, period: u32) -> u64 {
        if self.period == period {
            u64::from(self.used_us)
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packed_entry_is_read_back(parts in any::<[u64; 4]>()) {
            let entry = VcpuEntry::unpack(parts);
            prop_assert_eq!(VcpuEntry::unpack(entry.pack()), entry);
            prop_assert_eq!(entry.used_us(entry.period.wrapping_add(1)), 0);
        }
    }
}
