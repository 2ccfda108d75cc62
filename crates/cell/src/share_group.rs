//! The files that a VM shares with its group: claims on them, and a VM's spec without the files that it may
//! not share.
//!
//! [`registry::share_group`] names the groups.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use config::VmSpec;
use config::vm::{DiskDevice, DiskMode, PagesSpec, ShareSpec};
use diskstore::claim::Claim;
use registry::share_group::ShareGroup;

/// The claims of a VM on the files whose pages it maps, and the files that VMs of another group map.
#[derive(Debug)]
pub struct Claims {
    group: ShareGroup,
    held: Vec<Arc<Claim>>,
    refused: Vec<PathBuf>,
}

impl Claims {
    /// No claims yet.
    pub fn new(group: ShareGroup) -> Self {
        Self {
            group,
            held: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// The claims of a predecessor of this process.
    pub(crate) fn adopt(group: ShareGroup, held: Vec<Arc<Claim>>, refused: Vec<PathBuf>) -> Self {
        Self { group, held, refused }
    }

    /// The group that they are for.
    pub fn group(&self) -> &ShareGroup {
        &self.group
    }

    /// Claims all of `files`, or none. `path` names them. A file system without locks grants nothing.
    pub fn claim<F: AsFd>(&mut self, files: impl IntoIterator<Item = F>, path: &Path) -> bool {
        let mut claims = Vec::new();
        for file in files {
            match Claim::take(file, self.group.name()) {
                Ok(Some(claim)) => claims.push(Arc::new(claim)),
                Ok(None) | Err(_) => {
                    self.refused.push(path.to_owned());
                    return false;
                }
            }
        }
        self.held.append(&mut claims);
        true
    }

    /// The claims that were granted, in their order.
    pub fn held(&self) -> &[Arc<Claim>] {
        &self.held
    }

    /// The files that VMs of another group map.
    pub fn refused(&self) -> &[PathBuf] {
        &self.refused
    }
}

/// Whether the VM's disks map pages of files that they share. Memory of the host's pool, and that of a VM
/// that spans cells, has no such pages.
pub fn maps_pages(spec: &VmSpec) -> bool {
    let pool = matches!(spec.pages, PagesSpec::Huge2M | PagesSpec::Huge1G);
    spec.span.is_none() && !pool
}

/// The parts of a VM that may not map pages of their files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Apart {
    /// The kernel and the initramfs.
    pub boot: bool,
    /// The image's root disk.
    pub root: bool,
    /// The further disks, by their number.
    pub disks: Vec<usize>,
}

impl Apart {
    /// The spec of the VM as it runs: these parts share nothing, the others share as before. Its clones have
    /// the same spec.
    pub fn spec(&self, spec: &VmSpec) -> VmSpec {
        let mut spec = spec.clone();
        if self.boot {
            // Kernel and initramfs share as the VM does; disks that relied on that now have the setting
            // themselves.
            let (is_scanned, inherited) = match spec.share.unwrap_or_default() {
                // No mode of a disk.
                ShareSpec::Scan => (true, ShareSpec::Adaptive),
                share => (false, share),
            };
            spec.root.share.get_or_insert(inherited);
            for disk in &mut spec.disks {
                let in_place = disk.mode == DiskMode::Exclusive && disk.persistent;
                if disk.device == DiskDevice::Block && !in_place {
                    disk.share.get_or_insert(inherited);
                }
            }
            // A clone of scanned memory is scanned, too: its kernel and initramfs are kept apart anew.
            if !is_scanned {
                spec.share = Some(ShareSpec::Never);
            }
        }
        if self.root {
            spec.root.share = Some(ShareSpec::Never);
        }
        for number in &self.disks {
            if let Some(disk) = spec.disks.get_mut(*number) {
                disk.share = Some(ShareSpec::Never);
            }
        }
        spec
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn spec(text: &str) -> VmSpec {
        config::parse("vm.toml", text).unwrap()
    }

    #[test]
    fn files_are_claimed_all_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, name).unwrap();
            File::open(path).unwrap()
        };
        let (a, b) = (file("a"), file("b"));
        let claims = || Claims::new(ShareGroup::of_run().unwrap());
        let (mut one, mut other) = (claims(), claims());
        assert!(one.claim([&b], Path::new("b")));
        assert!(!other.claim([&a, &b], Path::new("disk")));
        assert_eq!(other.refused(), [PathBuf::from("disk")]);
        // The other's claim on the first file was withdrawn.
        assert!(one.claim([&a], Path::new("a")));
        drop(one);
        assert!(other.claim([&a, &b], Path::new("disk")));
    }

    #[test]
    fn the_spec_of_a_vm_that_was_kept_apart_says_what_it_does_not_share() {
        let disks = "[[disks]]\npath = \"a\"\n[[disks]]\npath = \"b\"\nshare = \"at-read\"\n\
                     [[disks]]\npath = \"c\"\nmode = \"exclusive\"\npersistent = true\n\
                     [[disks]]\npath = \"d\"\nas = \"pmem\"";
        let spec = spec(&format!("image = \"debian-12\"\nshare = \"deferred\"\n{disks}"));
        let shares = |apart: Apart| {
            let spec = apart.spec(&spec);
            config::check(&spec).unwrap();
            let disks: Vec<_> = spec.disks.iter().map(|disk| disk.share).collect();
            (spec.share, spec.root.share, disks)
        };
        let (never, deferred, at_read) = (ShareSpec::Never, ShareSpec::Deferred, ShareSpec::AtRead);
        let boot = Apart {
            boot: true,
            ..Apart::default()
        };
        assert_eq!(
            shares(boot),
            (
                Some(never),
                Some(deferred),
                vec![Some(deferred), Some(at_read), None, None]
            )
        );
        let parts = Apart {
            root: true,
            disks: vec![1],
            ..Apart::default()
        };
        assert_eq!(
            shares(parts),
            (Some(deferred), Some(never), vec![None, Some(never), None, None])
        );
        let nothing = shares(Apart::default());
        assert_eq!(nothing.1, None);
    }

    #[test]
    fn scanned_memory_stays_scanned_when_its_kernel_is_kept_apart() {
        let boot = Apart {
            boot: true,
            ..Apart::default()
        };
        let apart = boot.spec(&spec("image = \"debian-12\"\nshare = \"scan\""));
        config::check(&apart).unwrap();
        assert_eq!(
            (apart.share, apart.root.share),
            (Some(ShareSpec::Scan), Some(ShareSpec::Adaptive))
        );
    }

    #[test]
    fn memory_of_the_pool_and_that_of_several_cells_maps_no_pages() {
        assert!(maps_pages(&spec("image = \"tiny\"")));
        assert!(!maps_pages(&spec("image = \"tiny\"\npages = \"2M\"")));
        assert!(!maps_pages(&spec("image = \"tiny\"\nspan = \"auto\"\ncpus = 2")));
    }
}
