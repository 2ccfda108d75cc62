//! Translates a VM's spec into launch settings of its shard. Pure.

use config::VmSpec;
use config::vm::{OnFullSpec, PagesSpec, SandboxSpec, ShareSpec};
use shard_api::launch::{
    DiskLimit, DiskLimits, MemoryLaunch, NodeLaunch, OnFull, Pages, SandboxLaunch, SandboxPolicy, Share,
};

pub(super) fn on_full(spec: OnFullSpec) -> OnFull {
    match spec {
        OnFullSpec::Error => OnFull::Error,
        OnFullSpec::Pause => OnFull::Pause,
    }
}

/// The sharing mode of a disk with the setting `own`. A VM whose memory is paged maps nothing: any mode but
/// `never` lets pages leave memory that the disk's image has.
pub(super) fn share(spec: &VmSpec, own: Option<ShareSpec>) -> Share {
    match own.or(spec.share).unwrap_or_default() {
        // All memory is scanned, besides.
        ShareSpec::Adaptive | ShareSpec::Scan => Share::Adaptive,
        ShareSpec::Deferred => Share::Deferred,
        ShareSpec::AtRead => Share::AtRead,
        ShareSpec::Never => Share::Never,
    }
}

/// The sharing mode of the kernel and the initramfs, which a VM whose memory is paged does not map.
pub(super) fn share_boot(spec: &VmSpec) -> Share {
    match spec.resident {
        Some(_) => Share::Never,
        None => share(spec, None),
    }
}

/// The limits of requests to the disks.
pub(crate) fn disk_limits(spec: &VmSpec) -> DiskLimits {
    let root = &spec.root;
    let limit = |bandwidth: Option<config::Size>, requests| DiskLimit {
        bytes: bandwidth.map(|size| size.0),
        requests,
    };
    let others = spec.disks.iter();
    DiskLimits {
        root: limit(root.bandwidth, root.operations),
        others: others
            .map(|disk| limit(disk.bandwidth, disk.operations))
            .collect(),
    }
}

pub(super) fn memory(spec: &VmSpec) -> MemoryLaunch {
    MemoryLaunch {
        bytes: spec.memory.0,
        pages: match spec.pages {
            PagesSpec::Small => Pages::Small,
            PagesSpec::Transparent => Pages::Transparent,
            PagesSpec::Huge2M => Pages::Huge2M,
            PagesSpec::Huge1G => Pages::Huge1G,
        },
        prefault: spec.prefault,
        host_nodes: spec.memory_nodes.clone(),
        // Known when the VM has its place.
        homes: Vec::new(),
        paging: None,
        scan: spec.share == Some(ShareSpec::Scan),
    }
}

/// NUMA nodes of the guest. The default distance is 10 from a node to itself and 20 to another.
pub(super) fn nodes(spec: &VmSpec) -> Vec<NodeLaunch> {
    spec.nodes
        .iter()
        .enumerate()
        .map(|(index, node)| NodeLaunch {
            vcpus: config::cpulist::parse(&node.cpus).unwrap_or_default(),
            memory_bytes: node.memory.0,
            distances: node.distances.clone().unwrap_or_else(|| {
                (0..spec.nodes.len())
                    .map(|to| if to == index { 10 } else { 20 })
                    .collect()
            }),
            latencies_ps: Vec::new(),
            bandwidths_mb_s: Vec::new(),
            host_node: node.host_node,
        })
        .collect()
}

pub(super) fn sandbox(policy: SandboxSpec) -> SandboxLaunch {
    SandboxLaunch {
        policy: match policy {
            SandboxSpec::Auto => SandboxPolicy::Auto,
            SandboxSpec::Require => SandboxPolicy::Require,
            SandboxSpec::Off => SandboxPolicy::Off,
        },
        ..SandboxLaunch::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_spec_are_those_of_its_disks_in_order() {
        let text = "image = \"x\"\nroot = { bandwidth = \"1M\" }\n[[disks]]\npath = \"/a\"\n[[disks]]\n\
                    path = \"/b\"\noperations = 7\n";
        let limits = disk_limits(&config::parse("vm.toml", text).unwrap());
        let limit = |bytes, requests| DiskLimit { bytes, requests };
        assert_eq!(limits.root, limit(Some(1 << 20), None));
        assert_eq!(limits.others, [limit(None, None), limit(None, Some(7))]);
    }

    #[test]
    fn disks_of_scanned_memory_share_by_the_adaptive_rule() {
        let spec = |text: &str| config::parse("web.toml", &format!("image = \"tiny\"\n{text}")).unwrap();
        let scanned = spec("share = \"scan\"");
        assert!(memory(&scanned).scan);
        assert_eq!(
            (share(&scanned, None), share_boot(&scanned)),
            (Share::Adaptive, Share::Adaptive)
        );
        let apart = share(&scanned, Some(ShareSpec::Never));
        assert_eq!(apart, Share::Never, "a disk's own mode");
        assert!(!memory(&spec("share = \"at-read\"")).scan);
        assert!(!memory(&spec("")).scan);
    }

    #[test]
    fn disks_of_a_paged_vm_keep_their_sharing_mode_and_its_kernel_is_a_copy() {
        let spec = |more: &str| {
            let text = format!("image = \"tiny\"\n{more}");
            config::parse("web.toml", &text).unwrap()
        };
        let paged = spec("resident = \"64M\"");
        assert_eq!(
            (share(&paged, None), share_boot(&paged)),
            (Share::Adaptive, Share::Never)
        );
        assert_eq!(share(&paged, Some(ShareSpec::Never)), Share::Never);
        let apart = spec("resident = \"64M\"\nshare = \"never\"");
        assert_eq!(share(&apart, None), Share::Never);
        assert_eq!(share_boot(&spec("share = \"at-read\"")), Share::AtRead);
    }
}
