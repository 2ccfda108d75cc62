//! Checks of memory sharing.

use super::is_name;
use crate::fault::{Fault, fault};
use crate::vm::{DiskDevice, DiskMode, DiskSpec, PagesSpec, ShareSpec, VmSpec};

fn wanted(share: ShareSpec) -> bool {
    share != ShareSpec::Never
}

/// First place where a spec requests shared memory.
pub(crate) fn asked_to_share(spec: &VmSpec) -> Option<Vec<String>> {
    let places = [
        (vec!["share".to_owned()], spec.share),
        (vec!["root".into(), "share".into()], spec.root.share),
    ];
    let disks = spec.disks.iter().enumerate().map(|(index, disk)| {
        let at = vec!["disks".into(), index.to_string(), "share".into()];
        (at, disk.share)
    });
    let mut all = places.into_iter().chain(disks);
    all.find_map(|(path, share)| share.is_some_and(wanted).then_some(path))
}

/// Sharing works on 4 KiB pages of files that are never written.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let pool = matches!(spec.pages, PagesSpec::Huge2M | PagesSpec::Huge1G);
    if let Some(path) = asked_to_share(spec).filter(|_| pool) {
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        return Err(fault(
            &path,
            "memory made of the pool's huge pages can't share 4 KiB pages",
            "use `pages = \"thp\"` or `\"4K\"`, `share = \"never\"`, or a disk `as = \"pmem\"`",
        )
        .or_by_flag("use `--pages thp` or `4K`, or `--share never`"));
    }
    for (index, disk) in spec.disks.iter().enumerate() {
        let at = ["disks", &index.to_string(), "share"];
        if disk.share.is_some() && disk.device == DiskDevice::Pmem {
            return Err(fault(
                &at,
                "a pmem disk is mapped: it always shares",
                "drop `share`, or use `as = \"block\"`",
            ));
        }
        let in_place = disk.mode == DiskMode::Exclusive && disk.persistent;
        if disk.share.is_some_and(wanted) && in_place {
            return Err(fault(
                &at,
                "a disk that is written in place can't share memory",
                "drop `share`, or use `mode = \"private\"`",
            ));
        }
    }
    Ok(())
}

/// A group has its own copies of images, so no file that outlives a VM may depend on them.
pub(super) fn check_group(spec: &VmSpec) -> Result<(), Fault> {
    let Some(group) = &spec.share_group else {
        return Ok(());
    };
    if !is_name(group) {
        return Err(fault(
            &["share_group"],
            format!("{group:?} can't name a group"),
            "letters, digits, `-`, `_` and `.`, 63 at most, not starting with `-` or `.`",
        ));
    }
    let kept = |disk: &DiskSpec| disk.persistent && disk.mode == DiskMode::Private;
    if spec.root.persistent || spec.disks.iter().any(kept) {
        return Err(fault(
            &["share_group"],
            "a share group, and a private disk that keeps its writes: they would stand on the group's copy \
             of the image",
            "leave out `persistent`, or give the VM an exclusive disk",
        ));
    }
    Ok(())
}
