//! Cells on which a VM depends: those of which it uses a CPU, memory or a device.
//!
//! A VM ends with each cell on which it depends (Cellular Disco, section 2.3). A dependency begins with the
//! first use and ends with the last one; each use is recorded where it begins and where it ends.

use std::collections::BTreeMap;

/// Kind of use.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Use {
    /// vCPUs on CPUs of the cell.
    Cpu,
    /// Pages of the cell's memory.
    Memory,
    /// Devices of the cell.
    Device,
}

/// Uses of one VM, by cell and kind.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Dependencies(BTreeMap<(u16, Use), u64>);

impl Dependencies {
    /// Records `count` further uses. Returns whether the dependency on the cell began.
    pub fn begin(&mut self, cell: u16, kind: Use, count: u64) -> bool {
        let is_new = count > 0 && !self.has(cell);
        if count > 0 {
            *self.0.entry((cell, kind)).or_default() += count;
        }
        is_new
    }

    /// Records the end of `count` uses; of all if there are fewer. Returns whether the dependency on the cell
    /// ended.
    pub fn end(&mut self, cell: u16, kind: Use, count: u64) -> bool {
        let Some(uses) = self.0.get_mut(&(cell, kind)) else {
            return false;
        };
        *uses = uses.saturating_sub(count);
        if *uses > 0 {
            return false;
        }
        self.0.remove(&(cell, kind));
        !self.has(cell)
    }

    /// Records the move of one vCPU. Returns whether a dependency on the new cell began, and whether that on
    /// the old one ended. The new one begins first, so that a move inside a cell changes nothing.
    pub fn move_vcpu(&mut self, from: u16, to: u16) -> (bool, bool) {
        (self.begin(to, Use::Cpu, 1), self.end(from, Use::Cpu, 1))
    }

    /// Whether the VM depends on a cell.
    pub fn has(&self, cell: u16) -> bool {
        self.0
            .range((cell, Use::Cpu)..=(cell, Use::Device))
            .next()
            .is_some()
    }

    /// The cells on which the VM depends, ascending.
    pub fn cells(&self) -> Vec<u16> {
        let mut cells: Vec<u16> = self.0.keys().map(|key| key.0).collect();
        cells.dedup();
        cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependency_begins_with_the_first_use_and_ends_with_the_last() {
        let mut uses = Dependencies::default();
        assert!(uses.begin(1, Use::Cpu, 2) && !uses.begin(1, Use::Memory, 5));
        assert_eq!(uses.move_vcpu(1, 3), (true, false));
        assert_eq!(uses.move_vcpu(1, 3), (false, false));
        assert_eq!(uses.cells(), [1, 3]);
        assert!(!uses.end(1, Use::Memory, 4) && uses.end(1, Use::Memory, 1));
        assert_eq!(uses.cells(), [3]);
        assert_eq!(uses.move_vcpu(3, 3), (false, false));
        assert!(!uses.end(2, Use::Device, 1) && !uses.begin(2, Use::Device, 0));
    }
}
