//! Exits of vCPUs from the guest, by kind.

use std::collections::BTreeMap;

use bench::Outcome;
use serde_json::Value;

/// KVM's own count for all VMs of the host, including exits that the kernel served.
const KVM_COUNT: &str = "/sys/kernel/debug/kvm/exits";
/// Its name beside the kinds that the shards count.
const ALL: &str = "all, the kernel's own included";

/// Counts by kind, of all vCPUs together.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Exits(pub BTreeMap<String, u64>);

impl Exits {
    /// Counts of a VM's `status`: those of each shard if it spans cells, else of its only one. KVM's count
    /// beside them if it can be read; no other VM may run then.
    pub fn of(status: &Value) -> Outcome<Self> {
        let mut exits = Self::counted(status)?;
        if let Ok(text) = std::fs::read_to_string(KVM_COUNT) {
            exits.0.insert(ALL.to_owned(), text.trim().parse()?);
        }
        Ok(exits)
    }

    fn counted(status: &Value) -> Outcome<Self> {
        let mut exits = Self::default();
        match status["span"]["shards"].as_array() {
            Some(shards) => shards.iter().for_each(|shard| exits.add(&shard["exits"])),
            None => exits.add(&status["exits"]),
        }
        if exits.0.is_empty() {
            return Err(format!("the VM's status has no exits: {status}").into());
        }
        Ok(exits)
    }

    /// Adds the counts of a vCPU or of a list of them.
    fn add(&mut self, told: &Value) {
        if let Some(list) = told.as_array() {
            list.iter().for_each(|one| self.add(one));
        }
        for (kind, count) in told.as_object().into_iter().flatten() {
            *self.0.entry(kind.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
    }

    /// Counts since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |kind: &String| before.0.get(kind).copied().unwrap_or(0);
        let rest = |(kind, count): (&String, &u64)| (kind.clone(), count.saturating_sub(earlier(kind)));
        Self(self.0.iter().map(rest).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn exits(counts: &[(&str, u64)]) -> Exits {
        Exits(
            counts
                .iter()
                .map(|(kind, count)| ((*kind).to_owned(), *count))
                .collect(),
        )
    }

    #[test]
    fn the_exits_of_all_vcpus_and_shards_are_added() {
        let plain = json!({ "exits": [{ "port": 3, "mmio": 1 }, { "port": 4, "mmio": 0 }] });
        assert_eq!(
            Exits::counted(&plain).expect("told"),
            exits(&[("mmio", 1), ("port", 7)])
        );
        let spanning = json!({
            "exits": [{ "port": 100 }],
            "span": { "cells": [0, 1], "shards": [
                { "cell": 0, "exits": [{ "port": 1, "halt": 2 }] },
                { "cell": 1, "exits": { "halt": 5 } },
            ] },
        });
        assert_eq!(
            Exits::counted(&spanning).expect("told"),
            exits(&[("halt", 7), ("port", 1)])
        );
    }

    #[test]
    fn a_vm_that_tells_no_exits_is_an_error() {
        assert!(Exits::counted(&json!({ "unavailable": "the VM is ending" })).is_err());
    }

    #[test]
    fn those_of_a_time_are_the_difference() {
        let (before, after) = (exits(&[("port", 3)]), exits(&[("halt", 2), ("port", 10)]));
        assert_eq!(after.since(&before), exits(&[("halt", 2), ("port", 7)]));
    }
}
