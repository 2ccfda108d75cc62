//! Changes to what a running VM uses of its host.
//!
//! As JSON, a limit that is absent stays, and one that is `null` is taken away.

use config::{Fault, Size, VmSpec};
use serde::{Deserialize, Deserializer, Serialize};

/// Changes to limits and pins. A changed limit needs what the same key of a VM file needs: root and control groups.
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
        !self.changes_limits() && self.pins.is_empty()
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
    fn limit_that_no_vm_file_may_have_is_refused_with_help() {
        let spec = config::parse("vm.toml", "image = \"x\"\nmemory = \"512M\"\n").unwrap();
        for wrong in [
            json!({ "cpu_weight": 0 }),
            json!({ "cpu_limit": 0.001 }),
            json!({ "memory_limit": "128M" }),
        ] {
            let fault = update(wrong.clone()).applied_to(&spec).unwrap_err();
            assert!(!fault.mend.is_empty(), "{wrong}");
        }
        serde_json::from_value::<Update>(json!({ "cpus": 2 })).unwrap_err();
    }
}
