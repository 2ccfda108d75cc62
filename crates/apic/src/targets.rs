//! Resolution of interrupt destinations to vCPUs.

use serde::{Deserialize, Serialize};

use crate::interrupt::{Delivery, Destination, Interrupt, Shorthand};
use crate::set::Set;

/// vCPUs that can be named: 0 to `VCPUS_MAX` - 1.
pub const VCPUS_MAX: u32 = 256;

/// A set of vCPUs by their APIC ids.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Targets(Set);

impl Targets {
    /// vCPUs 0 to `count` - 1, or to [`VCPUS_MAX`] - 1.
    pub fn all(count: u32) -> Self {
        (0..count.min(VCPUS_MAX)).collect()
    }

    /// Adds a vCPU. Numbers from [`VCPUS_MAX`] on are ignored.
    pub fn insert(&mut self, vcpu: u32) {
        if let Ok(vcpu) = u8::try_from(vcpu) {
            self.0.insert(vcpu);
        }
    }

    /// Removes a vCPU.
    pub fn remove(&mut self, vcpu: u32) {
        if let Ok(vcpu) = u8::try_from(vcpu) {
            self.0.remove(vcpu);
        }
    }

    /// Whether the set contains this vCPU.
    pub fn contains(&self, vcpu: u32) -> bool {
        u8::try_from(vcpu).is_ok_and(|vcpu| self.0.contains(vcpu))
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<> {
        self.0.iter().map(u32::from)
    }
}

impl FromIterator<u32> for Targets {
    fn from_iter<I: IntoIterator<Item = u32>>(vcpus: I) -> Self {
        let mut targets = Self::default();
        vcpus.into_iter().for_each(|vcpu| targets.insert(vcpu));
        targets
    }
}

/// Returns the targets of an interrupt among vCPUs 0 to `count` - 1, whose APIC ids are their numbers. `from`
/// is the sending vCPU, to which shorthands refer; `None` for a device, which uses no shorthand.
///
/// A lowest-priority interrupt goes to exactly one matching vCPU in `enabled`; among equal priorities the
/// choice is model-specific (SDM 11.6.2.4). A vector always goes to the same vCPU, since its tasks and caches
/// are there; different vectors are spread. All other interrupts go to all matching vCPUs, enabled or not: a
/// disabled APIC drops them itself, and still takes an INIT.
pub fn targets(
    interrupt: &Interrupt,
    shorthand: Shorthand,
    from: Option<u32>,
    count: u32,
    enabled: &Targets,
) -> Targets {
    let count = count.min(VCPUS_MAX);
    let sender = from.filter(|&vcpu| vcpu < count);
    let matched = match shorthand {
        Shorthand::None => named(interrupt.destination, count),
        Shorthand::Own => sender.into_iter().collect(),
        Shorthand::All => Targets::all(count),
        Shorthand::Others => (0..count).filter(|&vcpu| Some(vcpu) != sender).collect(),
    };
    if interrupt.delivery != Delivery::LowestPriority {
        return matched;
    }
    let willing = || matched.iter().filter(|&vcpu| enabled.contains(vcpu));
    let place = usize::from(interrupt.vector).checked_rem(willing().count());
    place.and_then(|place| willing().nth(place)).into_iter().collect()
}

/// SDM 11.6.2.1 for physical destinations; 11.12.10 for logical ones, with the ids that 11.12.10.2 derives.
fn named(destination: Destination, count: u32) -> Targets {
    match destination {
        Destination::Physical(Destination::BROADCAST) | Destination::Logical(Destination::BROADCAST) => {
            Targets::all(count)
        }
        Destination::Physical(id) => Some(id).filter(|&id| id < count).into_iter().collect(),
        Destination::Logical(logical) => {
            let (cluster, members) = (logical >> 16, logical & 0xFFFF);
            let of_cluster = (0..16).filter(|member| members >> member & 1 == 1);
            of_cluster
                .map(|member| cluster << 4 | member)
                .filter(|&id| id < count)
                .collect()
        }
    }
}

#[cfg(test)]
mod tests;
