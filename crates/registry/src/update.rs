//! Changes to what a running VM uses of its host.
//!
//! As JSON, a limit that is absent stays, and one that is `null` is taken away.

use std::collections::BTreeMap;

use config::{Fault, Size, VmSpec};
use serde::{Deserialize, Deserializer, Serialize};

/// Changes to limits, pins and nodes of memory. A changed limit needs what the same key of a VM file needs: root and control groups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Update {
    /// Another weight.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<Option<u16>>,
    /// Another limit of the host's CPUs.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub cpu_limit: Option<Option<f64>>,
    /// Another limit of the host's memory.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Option<Size>>,
    /// vCPUs that get CPUs of their own, or lose them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pins: Vec<Pin>,
    /// Nodes of the host that the VM's memory is to lie on; on any when empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_nodes: Option<Vec<u32>>,
}

/// The pages of a VM's memory, as the host's kernel counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPages {
    /// The size of a page, KiB.
    pub page_kib: u64,
    /// Pages on each node of the host.
    #[serde(with = "pairs")]
    pub nodes: BTreeMap<u32, u64>,
}

/// A map as pairs: a message that says its kind beside its fields has no keys that are numbers.
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

/// Where a VM's memory lies after it has moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Its pages, if the host shows them.
    pub pages: Option<MemoryPages>,
    /// The reason why they are not known.
    pub unknown: Option<String>,
}

/// The CPUs of the host that a vCPU runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    /// The vCPU's number.
    pub vcpu: u8,
    /// The CPUs' numbers; all that the VM may use when there is none.
    pub cpus: Vec<usize>,
}

/// Reads what is there, be it `null`.
fn given<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

impl Update {
    /// Whether nothing is to change.
    pub fn is_empty(&self) -> bool {
        !self.changes_limits() && self.pins.is_empty() && self.memory_nodes.is_none()
    }

    /// Whether a limit or a weight is to change.
    pub fn changes_limits(&self) -> bool {
        self.cpu_weight.is_some() || self.cpu_limit.is_some() || self.memory_limit.is_some()
    }

    /// The spec of a VM after the change.
    ///
    /// # Errors
    /// If a VM file may not say that.
    pub fn applied_to(&self, spec: &VmSpec) -> Result<VmSpec, Fault> {
        let mut spec = spec.clone();
        spec.cpu_weight = self.cpu_weight.unwrap_or(spec.cpu_weight);
        spec.cpu_limit = self.cpu_limit.unwrap_or(spec.cpu_limit);
        spec.memory_limit = self.memory_limit.unwrap_or(spec.memory_limit);
        if let Some(nodes) = &self.memory_nodes {
            spec.memory_nodes.clone_from(nodes);
        }
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
        // The same after a way over a socket.
        assert_eq!(update(serde_json::to_value(&changed).unwrap()), changed);
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
        // A program from before the key reads the record of a VM that does not use it.
        let spec = serde_json::to_value(all.applied_to(&spec).unwrap()).unwrap();
        assert!(spec.get("memory_nodes").is_none(), "{spec}");
        update(json!({ "memory_nodes": [0, 0] }))
            .applied_to(&unchanged)
            .unwrap_err();
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
}
