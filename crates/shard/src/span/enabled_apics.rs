//! Which vCPUs have their interrupt controller enabled, as one shard knows it: lowest-priority interrupts go to one of them.
//!
//! What a shard says of a vCPU comes in order, but what the shard before said may come later. So, as with owners
//! ([`super::owner_table`]), what was said after fewer moves changes nothing.

use apic::Targets;

/// All vCPUs of a VM.
#[derive(Debug)]
pub struct EnabledApics {
    now: Targets,
    /// Moves of each vCPU when it said so.
    versions: Vec<u64>,
}

impl EnabledApics {
    /// As the VM starts: none of `count`.
    pub fn new(count: usize) -> Self {
        Self {
            now: Targets::default(),
            versions: vec![0; count],
        }
    }

    /// A vCPU that had moved `version` times has said so.
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

    /// Those that are, as far as is known here.
    pub fn now(&self) -> Targets {
        self.now
    }
}
