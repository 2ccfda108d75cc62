//! Kernel modules of a lab host: which, and in which order.
//!
//! Debian's packages carry no `modules.dep`, so the order comes from each module's own `.modinfo`.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::LabError;
use crate::error::Context;

/// Modules every lab host loads at boot, with their parameters.
///
/// Nested virtualization inside a lab host is switched off: nothing uses it and it costs time.
pub const WANTED: &[(&str, &str)] = &[
    ("virtio_pci", ""),
    ("virtio_net", ""),
    ("9pnet_virtio", ""),
    ("9p", ""),
    ("kvm_amd", "nested=0"),
    ("tun", ""),
    ("veth", ""),
    ("bridge", ""),
    ("vhost_net", ""),
    ("vhost_vsock", ""),
    ("loop", ""),
    // ext4 requests it by name, which no user-space helper here can serve.
    ("crc32c_generic", ""),
    ("ext4", ""),
    ("overlay", ""),
    ("sch_netem", ""),
    ("hwpoison_inject", ""),
];

/// How many of [`WANTED`], from the first, a host needs for its root and its network.
const WANTED_TO_MOUNT: usize = 4;

/// A name for [`WANTED`], the same whenever the modules are.
pub fn wanted_name() -> String {
    // FNV-1a.
    let names = WANTED.iter().flat_map(|(name, _)| name.bytes().chain([0]));
    let hash = names.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    format!("{:08x}", hash as u32)
}

/// A module file to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its name, with underscores.
    pub name: String,
    /// Its file, not compressed.
    pub path: PathBuf,
    /// Parameters that the kernel gets with it, separated by spaces.
    pub parameters: String,
}

/// The wanted modules and all they depend on, in the order to load them, from a `lib/modules/VERSION`
/// directory. A wanted module that isn't there is an error only when the host can't boot without it.
pub fn in_order(directory: &Path) -> Result<Vec<Module>, LabError> {
    let mut files = HashMap::new();
    index(directory, &mut files)?;
    let mut order = LoadOrder {
        directory,
        files: &files,
        seen: HashSet::new(),
        modules: Vec::new(),
    };
    for (position, (name, parameters)) in WANTED.iter().enumerate() {
        let needed = position <= WANTED_TO_MOUNT;
        if needed || files.contains_key(*name) {
            order.add(name, parameters)?;
        }
    }
    Ok(order.modules)
}

/// How many of the modules, in their order, a host needs for its root and its network.
pub fn count_to_mount(modules: &[Module]) -> usize {
    let needed = &WANTED[..WANTED_TO_MOUNT];
    modules
        .iter()
        .rposition(|module| needed.iter().any(|(name, _)| *name == module.name))
        .map_or(modules.len(), |last| last + 1)
}

struct LoadOrder<'a> {
    directory: &'a Path,
    files: &'a HashMap<String, PathBuf>,
    seen: HashSet<String>,
    modules: Vec<Module>,
}

impl LoadOrder<'_> {
    fn add(&mut self, name: &str, parameters: &str) -> Result<(), LabError> {
        if !self.seen.insert(name.to_string()) {
            return Ok(());
        }
        let path = self.files.get(name).ok_or_else(|| LabError::NoModule {
            name: name.to_string(),
            directory: self.directory.to_path_buf(),
        })?;
        let content = fs::read(path).on("read", path)?;
        for dependency in depends(&content) {
            self.add(&dependency, "")?;
        }
        self.modules.push(Module {
            name: name.to_string(),
            path: path.clone(),
            parameters: parameters.to_string(),
        });
        Ok(())
    }
}

/// Returns the dependencies in a module's `.modinfo`.
fn depends(content: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(start) = content.windows(KEY.len()).position(|window| window == KEY) else {
        return Vec::new();
    };
    let value = content[start + KEY.len()..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    String::from_utf8_lossy(value)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

fn index(directory: &Path, files: &mut HashMap<String, PathBuf>) -> Result<(), LabError> {
    for entry in fs::read_dir(directory).on("read", directory)? {
        let entry = entry.on("read", directory)?;
        let path = entry.path();
        let kind = entry.file_type().on("look at", &path)?;
        if kind.is_dir() {
            index(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "ko")
            && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
        {
            files.insert(stem.replace('-', "_"), path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        assert_eq!(depends(b"x\0depends=kvm,ccp-x\0y"), ["kvm", "ccp_x"]);
        assert_eq!(depends(b"x\0depends=\0y"), Vec::<String>::new());
        assert_eq!(depends(b"no such thing"), Vec::<String>::new());
    }

    #[test]
    fn modules_are_loaded_after_their_dependencies() {
        let directory = tempfile::tempdir().unwrap();
        let chain = [
            ("virtio_pci", "virtio"),
            ("virtio", ""),
            ("virtio_net", "virtio"),
            ("9pnet_virtio", "9pnet"),
            ("9pnet", ""),
            ("9p", "9pnet"),
            ("kvm-amd", "kvm"),
            ("kvm", ""),
        ];
        for (name, depends) in chain {
            fs::write(
                directory.path().join(format!("{name}.ko")),
                format!("\0depends={depends}\0"),
            )
            .unwrap();
        }
        let modules = in_order(directory.path()).unwrap();
        assert_eq!(count_to_mount(&modules), 6);
        let order: Vec<String> = modules.into_iter().map(|m| m.name).collect();
        assert_eq!(
            order,
            [
                "virtio",
                "virtio_pci",
                "virtio_net",
                "9pnet",
                "9pnet_virtio",
                "9p",
                "kvm",
                "kvm_amd"
            ]
        );
    }
}
