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
    check_scan(spec)?;
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

/// The host's scanner merges small pages of memory that is in no file, of any VM with that mode.
fn check_scan(spec: &VmSpec) -> Result<(), Fault> {
    let of_root = (vec!["root".to_owned(), "share".to_owned()], spec.root.share);
    let of_disks = spec.disks.iter().enumerate().map(|(index, disk)| {
        let at = vec!["disks".into(), index.to_string(), "share".into()];
        (at, disk.share)
    });
    let mut of_a_disk = std::iter::once(of_root).chain(of_disks);
    if let Some((path, _)) = of_a_disk.find(|(_, share)| *share == Some(ShareSpec::Scan)) {
        let path: Vec<_> = path.iter().map(String::as_str).collect();
        return Err(fault(
            &path,
            "the host scans the memory of a whole VM, not that of a disk",
            "use `share = \"scan\"` of the VM, or another mode here",
        ));
    }
    if spec.share != Some(ShareSpec::Scan) {
        return Ok(());
    }
    let kept_pmem = |disk: &DiskSpec| disk.device == DiskDevice::Pmem && disk.persistent;
    let obstacles = [
        (
            spec.pages != PagesSpec::Small,
            "the host's scanner merges pages of 4 KiB",
            "leave out `pages`",
        ),
        (
            spec.prefault,
            "the host's scanner would merge the zeroes of memory that is allocated at the start",
            "leave out `prefault`",
        ),
        (
            spec.disks.iter().any(kept_pmem),
            "a pmem disk that keeps its writes is a file, which the host's scanner skips",
            "use `as = \"block\"` for the disk",
        ),
        (
            spec.share_group.is_some(),
            "the host's scanner merges pages with those of any VM that asks for it, of any group",
            "leave out `share_group`",
        ),
    ];
    match obstacles.into_iter().find(|(is_there, ..)| *is_there) {
        Some((_, cause, help)) => Err(fault(
            &["share"],
            cause,
            format!("{help}, or use another mode than `share = \"scan\"`"),
        )),
        None => Ok(()),
    }
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
