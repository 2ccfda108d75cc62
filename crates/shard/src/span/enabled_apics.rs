//! Set of vCPUs with an enabled local APIC, by the records of one shard. A lowest-priority interrupt goes to
//! one of them.
//!
//! Reports of one shard about a vCPU arrive in order, but a report of the previous owner may arrive later.
//! So, as with owners ([`super::owner_table`]), a report with fewer moves changes nothing.

use apic::Targets;

/// Enabled local APICs of a VM.
#[derive(Debug)]
pub struct EnabledApics {
    now: Targets,
    /// Moves of each vCPU at its last report.
    versions: Vec<u64>,
}

impl EnabledApics {
    /// Returns the set at the start of the VM: none of `count` vCPUs.
    pub fn new(count: usize) -> Self {
        Self {
            now: Targets::default(),
            versions: vec![0; count],
        }
    }

    /// Updates the state of a vCPU by a report that it sent after `version` moves.
    pub fn update(&mut self, vcpu: u8, version: u64, is_enabled: bool) {
        let Some(known) = self.versions.get_mut(usize::from(vcpu)) else {
            return;
        };
        if version < *known {
            return;
        }
        *known = version;
        if is_enabled {
            self.now.insert(u32::from(vcpu));
        } else {
            self.now.remove(u32::from(vcpu));
        }
    }

    /// Returns the vCPUs with an enabled local APIC, by the records of this shard.
    pub fn now(&self) -> Targets {
        self.now
    }
}
