//! Changes to the host resources that a running VM uses.
//!
//! In JSON, an absent limit stays, and `null` removes the limit.

use std::collections::BTreeMap;

use config::{DiskName, Fault, Size, VmSpec};
use serde::{Deserialize, Deserializer, Serialize};

/// Changes to limits, resident memory, pins and memory nodes. A changed limit needs the same as its key in a
/// VM file: root and control groups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Update {
    /// New CPU weight.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<Option<u16>>,
    /// New limit of host CPUs.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub cpu_limit: Option<Option<f64>>,
    /// New CPU time that its cell reserves for it, in CPUs.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub cpu_reservation: Option<Option<f64>>,
    /// New limit of host memory.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Option<Size>>,
    /// New limit of guest memory in the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<Size>,
    /// vCPUs to pin or unpin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<Pin>,
    /// Host nodes for the VM's memory; any node when empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_nodes: Option<Vec<u32>>,
    /// New limits of requests to disks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskUpdate>,
}

/// Changes to the limits of one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskUpdate {
    /// The disk.
    pub disk: DiskName,
    /// New limit of bytes per second.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Option<Size>>,
    /// New limit of requests per second.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub operations: Option<Option<u32>>,
}

impl DiskUpdate {
    fn apply_to(&self, spec: &mut VmSpec) -> Result<(), Fault> {
        let limits = spec.disk_limits(self.disk)?;
        *limits.bandwidth = self.bandwidth.unwrap_or(*limits.bandwidth);
        *limits.operations = self.operations.unwrap_or(*limits.operations);
        Ok(())
    }
}

/// Pages of a VM's memory, as the host's kernel counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPages {
    /// The size of a page, KiB.
    pub page_kib: u64,
    /// Pages on each node of the host.
    #[serde(with = "pairs")]
    pub nodes: BTreeMap<u32, u64>,
}

/// Serializes a map as pairs: JSON keys of an internally tagged message can't be numbers.
mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(
        map: &BTreeMap<u32, u64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        map.iter().collect::<Vec<_>>().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<u32, u64>, D::Error> {
        let pairs = Vec::<(u32, u64)>::deserialize(deserializer)?;
        Ok(pairs.into_iter().collect())
    }
}

/// Location of a VM's memory after a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Pages, if the host reports them.
    pub pages: Option<MemoryPages>,
    /// Reason why they are unknown.
    pub unknown: Option<String>,
}

/// Host CPUs that a vCPU runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// The vCPU's number.
    pub vcpu: u8,
    /// Numbers of the CPUs; empty means all CPUs that the VM may use.
    pub cpus: Vec<usize>,
}

/// Deserializes a present value, `null` included.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

impl Update {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        let is_placed = !self.pins.is_empty() || self.memory_nodes.is_some();
        let is_limited = self.changes_limits() || self.cpu_reservation.is_some() || self.resident.is_some();
        !is_limited && !is_placed && self.disks.is_empty()
    }

    /// Whether it changes a limit or a weight that control groups enforce.
    pub fn changes_limits(&self) -> bool {
        self.cpu_weight.is_some() || self.cpu_limit.is_some() || self.memory_limit.is_some()
    }

    /// Returns the spec of a VM after the change.
    ///
    /// # Errors
    /// If the changed spec is invalid in a VM file.
    pub fn applied_to(&self, spec: &VmSpec) -> Result<VmSpec, Fault> {
        let mut spec = spec.clone();
        spec.cpu_weight = self.cpu_weight.unwrap_or(spec.cpu_weight);
        spec.cpu_limit = self.cpu_limit.unwrap_or(spec.cpu_limit);
        spec.cpu_reservation = self.cpu_reservation.unwrap_or(spec.cpu_reservation);
        spec.memory_limit = self.memory_limit.unwrap_or(spec.memory_limit);
        spec.resident = self.resident.or(spec.resident);
        if let Some(nodes) = &self.memory_nodes {
            spec.memory_nodes.clone_from(nodes);
        }
        self.disks.iter().try_for_each(|disk| disk.apply_to(&mut spec))?;
        config::check(&spec)?;
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn update(json: serde_json::Value) -> Update {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn absent_limit_stays_and_null_takes_it_away() {
        let text = "image = \"x\"\ncpu_weight = 200\ncpu_limit = 1.5\nmemory_limit = \"1G\"\n";
        let spec = config::parse("vm.toml", text).unwrap();
        let changed = update(json!({ "cpu_weight": 300, "cpu_limit": null }));
        let after = changed.applied_to(&spec).unwrap();
        assert_eq!((after.cpu_weight, after.cpu_limit), (Some(300), None));
        assert_eq!(after.memory_limit, spec.memory_limit);
        assert!(update(json!({})).is_empty());
        assert!(!update(json!({ "memory_limit": null })).is_empty());
        // The same after a round trip over a socket.
        assert_eq!(update(serde_json::to_value(&changed).unwrap()), changed);
    }

    #[test]
    fn reservation_of_cpu_time_needs_no_control_group_and_is_at_most_the_limit() {
        let spec = config::parse("vm.toml", "image = \"x\"\ncpus = 2\ncpu_limit = 1.5\n").unwrap();
        let reserved = update(json!({ "cpu_reservation": 0.5 }));
        assert!(!reserved.is_empty() && !reserved.changes_limits());
        let spec = reserved.applied_to(&spec).unwrap();
        assert_eq!(spec.cpu_reservation, Some(0.5));
        let kept = update(json!({ "cpu_weight": 300 })).applied_to(&spec).unwrap();
        assert_eq!(kept.cpu_reservation, Some(0.5));
        for wrong in [json!({ "cpu_reservation": 1.6 }), json!({ "cpu_limit": 0.4 })] {
            let fault = update(wrong).applied_to(&spec).unwrap_err();
            assert!(
                fault.message.contains("more than its `cpu_limit`"),
                "{}",
                fault.message
            );
        }
        let ended = update(json!({ "cpu_reservation": null }))
            .applied_to(&spec)
            .unwrap();
        // A program older than the key can read the record of a VM that does not use it.
        let ended = serde_json::to_value(ended).unwrap();
        assert!(ended.get("cpu_reservation").is_none(), "{ended}");
    }

    #[test]
    fn nodes_of_memory_change_alone_and_all_of_them_are_no_key_of_the_spec() {
        let spec = config::parse("vm.toml", "image = \"x\"\nmemory_nodes = [1]\n").unwrap();
        let unchanged = update(json!({ "cpu_weight": 300 })).applied_to(&spec).unwrap();
        assert_eq!(unchanged.memory_nodes, [1]);
        let changed = update(json!({ "memory_nodes": [0, 2] }));
        assert!(!changed.is_empty() && !changed.changes_limits());
        assert_eq!(changed.applied_to(&spec).unwrap().memory_nodes, [0, 2]);
        let all = update(json!({ "memory_nodes": [] }));
        assert!(!all.is_empty());
        // A program older than the key can read the record of a VM that does not use it.
        let spec = serde_json::to_value(all.applied_to(&spec).unwrap()).unwrap();
        assert!(spec.get("memory_nodes").is_none(), "{spec}");
        update(json!({ "memory_nodes": [0, 0] }))
            .applied_to(&unchanged)
            .unwrap_err();
    }

    #[test]
    fn resident_memory_changes_alone_and_within_its_least() {
        let spec = config::parse("vm.toml", "image = \"x\"\nresident = \"64M\"\n").unwrap();
        let changed = update(json!({ "resident": "32M" }));
        assert!(!changed.is_empty() && !changed.changes_limits());
        assert_eq!(changed.applied_to(&spec).unwrap().resident, Some(Size(32 << 20)));
        let fault = update(json!({ "resident": "15M" }))
            .applied_to(&spec)
            .unwrap_err();
        assert!(fault.message.contains("15M"), "{}", fault.message);
        assert_eq!(
            update(json!({})).applied_to(&spec).unwrap().resident,
            spec.resident
        );
    }

    #[test]
    fn report_of_where_memory_lies_comes_whole_over_the_socket() {
        let report = MemoryReport {
            pages: Some(MemoryPages {
                page_kib: 4,
                nodes: [(0, 16), (3, 1 << 40)].into(),
            }),
            unknown: None,
        };
        let answer = crate::control::Answer::MemoryPlaced(report.clone());
        let text = serde_json::to_string(&answer).unwrap();
        let crate::control::Answer::MemoryPlaced(read) = serde_json::from_str(&text).unwrap() else {
            panic!("{text}");
        };
        assert_eq!(read, report);
    }

    #[test]
    fn limit_that_no_vm_file_may_have_is_refused_with_help() {
        let spec = config::parse("vm.toml", "image = \"x\"\nmemory = \"512M\"\n").unwrap();
        for wrong in [
            json!({ "cpu_weight": 0 }),
            json!({ "cpu_limit": 0.001 }),
            json!({ "memory_limit": "128M" }),
        ] {
            let fault = update(wrong.clone()).applied_to(&spec).unwrap_err();
            assert!(!fault.help.is_empty(), "{wrong}");
        }
        serde_json::from_value::<Update>(json!({ "cpus": 2 })).unwrap_err();
    }

    #[test]
    fn change_of_any_one_key_is_a_change_and_only_limits_change_limits() {
        for (one, changes_limits) in [
            (json!({ "cpu_weight": null }), true),
            (json!({ "cpu_limit": null }), true),
            (json!({ "memory_limit": null }), true),
            (json!({ "resident": "64M" }), false),
            (json!({ "pins": [{ "vcpu": 0, "cpus": [] }] }), false),
            (json!({ "memory_nodes": [] }), false),
        ] {
            let update = update(one.clone());
            assert!(!update.is_empty(), "{one}");
            assert_eq!(update.changes_limits(), changes_limits, "{one}");
        }
    }
}
