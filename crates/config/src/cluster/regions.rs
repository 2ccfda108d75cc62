//! Regions of memory that VMs of a cluster share.

use serde::{Deserialize, Serialize};

use super::ClusterSpec;
use crate::fault::{Fault, fault};
use crate::size::Size;
use crate::validate::is_name;

/// Granularity of a region: the guest maps persistent memory with large pages.
pub const REGION_STEP_BYTES: u64 = 2 << 20;
/// Maximum size of a region.
const REGION_BYTES_MAX: u64 = 1 << 40;
/// Maximum number of regions of a cluster.
const REGIONS_MAX: usize = 64;
/// Maximum number of patterns of one list.
const PATTERNS_MAX: usize = 64;

/// A region of memory that several VMs map.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionSpec {
    /// Name by which VM files refer to it.
    pub name: String,
    /// Its size, a multiple of 2M.
    pub size: Size,
    /// The cell that gives its memory.
    pub cell: u16,
    /// Names of the VMs that may read it; `*` stands for any characters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<String>,
    /// Names of the VMs that may read and write it; `*` stands for any characters.
    pub writers: Vec<String>,
}

/// A VM's access to a region.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegionAccess {
    /// The VM reads it.
    Read,
    /// The VM reads and writes it.
    Write,
}

impl RegionSpec {
    /// Whether a VM of this name may have this access. VMs that may write may also read.
    pub fn allows(&self, vm: &str, access: RegionAccess) -> bool {
        let matches = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, vm));
        matches(&self.writers) || access == RegionAccess::Read && matches(&self.readers)
    }
}

/// Whether `name` matches `pattern`, in which `*` stands for any characters. The time is bounded by the
/// product of the lengths.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(start) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let end = parts.pop().unwrap_or_default();
    // The first place of each part leaves most for the parts behind it.
    for part in parts {
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(end)
}

impl ClusterSpec {
    pub(super) fn check_regions(&self) -> Result<(), Fault> {
        if self.shared.len() > REGIONS_MAX {
            return Err(fault(
                &["shared"],
                format!("{} shared regions", self.shared.len()),
                format!("a cluster has {REGIONS_MAX} at most"),
            ));
        }
        for (index, region) in self.shared.iter().enumerate() {
            let at = index.to_string();
            self.check_region(region, &at)?;
            if self.shared[..index].iter().any(|other| other.name == region.name) {
                return Err(fault(
                    &["shared", &at, "name"],
                    format!("a region {} is in the file already", region.name),
                    "give each region a name of its own",
                ));
            }
            let before = self.shared[..=index].iter();
            let of_cell = before.filter(|other| other.cell == region.cell);
            let bytes = of_cell.fold(0_u64, |sum, other| sum.saturating_add(other.size.0));
            let cell = self.cells.get(usize::from(region.cell));
            if let Some(memory) = cell
                .and_then(|cell| cell.memory)
                .filter(|memory| memory.0 < bytes)
            {
                return Err(fault(
                    &["shared", &at, "size"],
                    format!("the regions of cell {} are larger than its {memory}", region.cell),
                    "make the regions smaller, or place one in another cell",
                ));
            }
        }
        Ok(())
    }

    fn check_region(&self, region: &RegionSpec, at: &str) -> Result<(), Fault> {
        check_region_name(&region.name, &["shared", at, "name"])?;
        let bytes = region.size.0;
        if bytes == 0 || !bytes.is_multiple_of(REGION_STEP_BYTES) || bytes > REGION_BYTES_MAX {
            return Err(fault(
                &["shared", at, "size"],
                format!("a region of {}", region.size),
                "write a multiple of 2M, from 2M to 1T",
            ));
        }
        if self
            .cells
            .get(usize::from(region.cell))
            .is_none_or(|cell| cell.left)
        {
            return Err(fault(
                &["shared", at, "cell"],
                format!("there is no cell {}", region.cell),
                "name a cell of this file: the first [[cells]] table is cell 0",
            ));
        }
        for (key, patterns) in [("readers", &region.readers), ("writers", &region.writers)] {
            if patterns.len() > PATTERNS_MAX {
                return Err(fault(
                    &["shared", at, key],
                    format!("{} names", patterns.len()),
                    format!("{PATTERNS_MAX} at most; `*` stands for any characters"),
                ));
            }
            for (index, pattern) in patterns.iter().enumerate() {
                if !is_name(&pattern.replace('*', "x")) {
                    return Err(fault(
                        &["shared", at, key, &index.to_string()],
                        format!("no VM has a name like {pattern:?}"),
                        "write a VM's name, or a part of it and `*`, as \"db-*\"",
                    ));
                }
            }
        }
        if region.writers.is_empty() {
            return Err(fault(
                &["shared", at, "writers"],
                "no VM may write the region, so it stays zero",
                "name a VM, as writers = [\"db-*\"]",
            ));
        }
        Ok(())
    }
}

/// Checks a region's name at `path`.
pub(crate) fn check_region_name(name: &str, path: &[&str]) -> Result<(), Fault> {
    if is_name(name) {
        return Ok(());
    }
    Err(fault(
        path,
        format!("{name:?} can't name a shared region"),
        "letters, digits, `-`, `_` and `.`, 63 at most, not starting with `-` or `.`",
    ))
}

#[cfg(test)]
mod tests;
