//! Start order of defined VMs: each starts after the VMs in its `after`.

use std::collections::{BTreeMap, BTreeSet};

use crate::fault::{Fault, fault};
use crate::validate::is_name;
use crate::vm::VmSpec;

/// Maximum length of a VM's `after`.
const AFTER_MAX: usize = 64;

/// Reason why there is no start order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartOrderError {
    /// A VM starts after an undefined VM.
    #[error("{vm} starts after {after}, which is not defined; define that first, or with the same command")]
    Unknown {
        /// Name of the VM with the `after`.
        vm: String,
        /// Name in its `after`.
        after: String,
    },
    /// VMs start after one another in a cycle.
    #[error("{} start after one another in a circle; leave one out of the `after` of another", .0.join(", "))]
    Cycle(Vec<String>),
}

/// Returns the VMs' names in an order in which each comes after those in its `after`; by name where both
/// orders are possible.
///
/// # Errors
/// If there is no such order.
pub fn order(vms: &BTreeMap<String, VmSpec>) -> Result<Vec<String>, StartOrderError> {
    for (vm, spec) in vms {
        if let Some(after) = spec.after.iter().find(|after| !vms.contains_key(*after)) {
            let (vm, after) = (vm.clone(), after.clone());
            return Err(StartOrderError::Unknown { vm, after });
        }
    }
    let mut order: Vec<String> = Vec::with_capacity(vms.len());
    let mut placed = BTreeSet::new();
    let mut left: BTreeMap<&String, &VmSpec> = vms.iter().collect();
    while !left.is_empty() {
        let waits = |spec: &VmSpec| spec.after.iter().any(|after| !placed.contains(after));
        let next = left.iter().find(|(_, spec)| !waits(spec));
        let Some(next) = next.map(|(name, _)| (*name).clone()) else {
            return Err(StartOrderError::Cycle(cycle(&left)));
        };
        left.remove(&next);
        placed.insert(next.clone());
        order.push(next);
    }
    Ok(order)
}

/// Returns VMs of which each waits for the next, and the last for the first. Each VM of `left` waits for
/// another of them.
fn cycle(left: &BTreeMap<&String, &VmSpec>) -> Vec<String> {
    let mut path: Vec<String> = Vec::new();
    let mut next = left.keys().next().map(|name| (*name).clone());
    while let Some(name) = next {
        if let Some(first) = path.iter().position(|passed| *passed == name) {
            return path.split_off(first);
        }
        let spec = left.get(&name);
        next = spec.and_then(|spec| spec.after.iter().find(|after| left.contains_key(after)).cloned());
        path.push(name);
    }
    path
}

/// Checks the names in a spec's `after`.
pub(crate) fn check(spec: &VmSpec) -> Result<(), Fault> {
    if spec.after.len() > AFTER_MAX {
        let message = format!("{} VMs to start after", spec.after.len());
        return Err(fault(&["after"], message, format!("{AFTER_MAX} at most")));
    }
    for (index, name) in spec.after.iter().enumerate() {
        let at = index.to_string();
        if !is_name(name) {
            let message = format!("{name:?} can't name a VM");
            return Err(fault(&["after", &at], message, "write the name of a defined VM"));
        }
        if Some(name) == spec.name.as_ref() {
            return Err(fault(
                &["after", &at],
                "a VM that starts after itself",
                "leave it out",
            ));
        }
        if spec.after[..index].contains(name) {
            return Err(fault(
                &["after", &at],
                format!("{name} is named twice"),
                "leave one out",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(name: &str, after: &[&str]) -> VmSpec {
        let text = format!("name = {name:?}\nimage = \"x\"\nafter = {after:?}\n");
        crate::parse("vm.toml", &text).unwrap()
    }

    fn vms(all: &[(&str, &[&str])]) -> BTreeMap<String, VmSpec> {
        all.iter()
            .map(|(name, after)| ((*name).to_owned(), spec(name, after)))
            .collect()
    }

    #[test]
    fn each_vm_starts_after_the_vms_that_it_names() {
        let all = vms(&[
            ("app", &["db", "cache"]),
            ("cache", &[]),
            ("db", &["disk"]),
            ("disk", &[]),
            ("web", &["app"]),
        ]);
        assert_eq!(order(&all).unwrap(), ["cache", "disk", "db", "app", "web"]);
        assert!(order(&BTreeMap::new()).unwrap().is_empty());
    }

    #[test]
    fn unknown_names_and_cycles_are_refused_by_name() {
        let unknown = order(&vms(&[("a", &["b"])])).unwrap_err().to_string();
        assert_eq!(
            unknown,
            "a starts after b, which is not defined; define that first, or with the same command"
        );
        let circle = vms(&[
            ("a", &["b"]),
            ("b", &["c"]),
            ("c", &["d"]),
            ("d", &["b"]),
            ("e", &[]),
        ]);
        let StartOrderError::Cycle(names) = order(&circle).unwrap_err() else {
            panic!("no circle");
        };
        assert_eq!(names, ["b", "c", "d"]);
    }

    #[test]
    fn names_in_a_file_are_checked() {
        for (after, why) in [
            ("[\"-a\"]", "\"-a\" can't name a VM"),
            ("[\"x\", \"me\"]", "a VM that starts after itself"),
            ("[\"x\", \"y\", \"x\"]", "x is named twice"),
        ] {
            let text = format!("name = \"me\"\nimage = \"x\"\nafter = {after}\n");
            assert_eq!(crate::parse("vm.toml", &text).unwrap_err().message, why);
        }
        let many: Vec<String> = (0..=AFTER_MAX).map(|number| format!("\"v{number}\"")).collect();
        let text = format!("image = \"x\"\nafter = [{}]\n", many.join(", "));
        assert_eq!(
            crate::parse("vm.toml", &text).unwrap_err().message,
            "65 VMs to start after"
        );
    }

    proptest! {
        /// Each graph has an order in which all VMs come after those that they name, or a cycle of its edges.
        #[test]
        fn order_respects_every_edge_and_a_reported_cycle_exists(
            edges in prop::collection::vec((0..8_usize, 0..8_usize), 0..14)
        ) {
            let name = |number: usize| format!("v{number}");
            let vm = |number| (name(number), spec(&name(number), &[]));
            let mut all: BTreeMap<String, VmSpec> = (0..8).map(vm).collect();
            for (vm, after) in edges.into_iter().filter(|(vm, after)| vm != after) {
                all.get_mut(&name(vm)).expect("there").after.push(name(after));
            }
            match order(&all) {
                Ok(order) => {
                    prop_assert_eq!(order.len(), all.len());
                    for (at, vm) in order.iter().enumerate() {
                        prop_assert!(all[vm].after.iter().all(|after| order[..at].contains(after)));
                    }
                }
                Err(StartOrderError::Cycle(names)) => {
                    for (at, vm) in names.iter().enumerate() {
                        prop_assert!(all[vm].after.contains(&names[(at + 1) % names.len()]));
                    }
                }
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
