//! Kernel modules that a guest needs before it has its root, in loading order.
//!
//! Dependencies are read from the modules themselves (the `depends=` of their `.modinfo`), so no `depmod` is
//! needed. A missing module is built in or does not exist; the guest then works without it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{ImageError, failed};

/// Modules for the root, the agent and the devices a VM always has, most urgent first.
pub const WANTED: [&str; 16] = [
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "vmw_vsock_virtio_transport",
    "virtio_pmem",
    "nd_pmem",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "pvpanic_mmio",
    "pvpanic_pci",
    "button",
    "evdev",
    "af_packet",
    "virtiofs",
];

/// The modules of a kernel: name to file.
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
}

impl Modules {
    /// Finds the modules under `lib/modules/<release>`.
    pub fn find(folder: &Path) -> Result<Self, ImageError> {
        let mut files = BTreeMap::new();
        let mut folders = vec![folder.to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).map_err(failed("read", &folder))? {
                let entry = entry.map_err(failed("read", &folder))?;
                // Not through symbolic links: `build` and `source` lead out.
                let kind = entry.file_type().map_err(failed("read", entry.path()))?;
                let path = entry.path();
                if kind.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "ko")
                    && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
                {
                    files.insert(normal(stem), path);
                }
            }
        }
        Ok(Self { files })
    }

    /// Returns the files of [`WANTED`] and all their dependencies, each after its dependencies.
    pub fn needed(&self) -> Result<Vec<PathBuf>, ImageError> {
        let order = order(&WANTED, &mut |name| match self.files.get(name) {
            None => Ok(None),
            Some(path) => {
                let bytes = fs::read(path).map_err(failed("read", path))?;
                Ok(Some(depends_of(&bytes)))
            }
        })?;
        Ok(order
            .iter()
            .filter_map(|name| self.files.get(name).cloned())
            .collect())
    }
}

/// Returns the dependencies of a module; `None` for a name that is no module.
type Depends<'a, E> = dyn FnMut(&str) -> Result<Option<Vec<String>>, E> + 'a;

/// Sorts `wanted` and its dependencies so that each module comes after its dependencies. `depends` returns
/// the dependencies of a module, or `None` for a name that is no module.
pub fn order<E>(wanted: &[&str], depends: &mut Depends<E>) -> Result<Vec<String>, E> {
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    for name in wanted {
        visit(&normal(name), depends, &mut seen, &mut order)?;
    }
    Ok(order)
}

fn visit<E>(
    name: &str,
    depends: &mut Depends<E>,
    seen: &mut BTreeSet<String>,
    order: &mut Vec<String>,
) -> Result<(), E> {
    // Marked before its dependencies, so that a cycle (which a kernel does not have) ends.
    if !seen.insert(name.to_owned()) {
        return Ok(());
    }
    if let Some(needs) = depends(name)? {
        for need in needs {
            visit(&need, depends, seen, order)?;
        }
        order.push(name.to_owned());
    }
    Ok(())
}

/// The kernel takes `-` and `_` for the same in module names.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the `depends=` of a module. The whole file is searched for the string: nothing else in a module
/// follows a zero byte with this word.
fn depends_of(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = module.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = &module[start + KEY.len()..];
    let end = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
    let value = String::from_utf8_lossy(&value[..end]);
    value
        .split(',')
        .filter(|name| !name.is_empty())
        .map(normal)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depends(name: &str) -> Result<Option<Vec<String>>, ()> {
        let needs: &[&str] = match name {
            "virtio_net" => &["virtio", "net_failover"],
            "net_failover" => &["failover"],
            "virtio" | "failover" => &[],
            "a" => &["b"],
            "b" => &["a"],
            _ => return Ok(None),
        };
        Ok(Some(needs.iter().map(|need| need.to_string()).collect()))
    }

    #[test]
    fn module_follows_its_dependencies_and_occurs_once() {
        let order = order(&["virtio-net", "virtio", "builtin"], &mut depends).unwrap();
        assert_eq!(order, ["virtio", "failover", "net_failover", "virtio_net"]);
    }

    #[test]
    fn dependency_cycle_terminates() {
        assert_eq!(order(&["a"], &mut depends).unwrap(), ["b", "a"]);
    }

    #[test]
    fn dependencies_are_read_from_the_module() {
        let module = b"\x7fELF..\0license=GPL\0depends=virtio,virtio-ring\0name=x\0";
        assert_eq!(depends_of(module), ["virtio", "virtio_ring"]);
        assert!(depends_of(b"\0depends=\0").is_empty() && depends_of(b"").is_empty());
    }
}
