//! Keys of a VM that starts from a template.
//!
//! A template has booted with the image's kernel, the memory, the vCPUs, and as many disks and cards of the
//! same kinds. A key that would change the booted machine is refused by name: it must not be ignored.

use crate::fault::{Fault, fault};
use crate::vm::{DiskDevice, NetKind, PagesSpec, ShareSpec, VmSpec};

/// Checks that a template can serve all keys of a VM that starts warm.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    if !spec.warm {
        return Ok(());
    }
    if spec.image.is_none() {
        return Err(fault(
            &["warm"],
            "a warm start without an image, of which a template could be made",
            "name an `image`, or leave out `warm`",
        )
        .or_by_flag("name one with --image, or leave out --warm"));
    }
    let unserved = other_machine(spec)
        .or_else(|| other_memory(spec))
        .or_else(|| other_device(spec));
    let Some((path, why)) = unserved else {
        return Ok(());
    };
    let key = path.last().copied().unwrap_or_default();
    Err(fault(
        &path,
        format!("a VM that starts from a template can't have this: {why}"),
        format!("leave out `{key}` or `warm`"),
    )
    .or_by_flag("leave out the flag or --warm"))
}

/// A key that needs another machine, or another start of the guest, than the template's.
fn other_machine(spec: &VmSpec) -> Option<(Vec<&'static str>, &'static str)> {
    let kernel = spec.kernel.as_ref();
    let cmdline = kernel.is_some_and(|kernel| kernel.path.is_none());
    [
        (
            cmdline,
            vec!["kernel", "cmdline"],
            "its kernel has read its command line",
        ),
        (kernel.is_some(), vec!["kernel"], "it runs the image's kernel"),
        (
            spec.root.persistent,
            vec!["root", "persistent"],
            "its root disk has writes of the template below its own",
        ),
        (
            !spec.folders.is_empty(),
            vec!["folders"],
            "its machine has no shared folder",
        ),
        (
            !spec.shared.is_empty(),
            vec!["shared"],
            "its machine has no shared region",
        ),
        (spec.span.is_some(), vec!["span"], "its state is that of one cell"),
    ]
    .into_iter()
    .find_map(|(is_set, path, why)| is_set.then_some((path, why)))
}

/// A key that needs other memory than a private mapping of the template's file.
fn other_memory(spec: &VmSpec) -> Option<(Vec<&'static str>, &'static str)> {
    let never = Some(ShareSpec::Never);
    [
        (
            spec.resident.is_some(),
            "resident",
            "its memory is mapped from a file, and not paged",
        ),
        (
            !spec.nodes.is_empty(),
            "nodes",
            "its guest has seen a machine of one node",
        ),
        (
            !spec.memory_nodes.is_empty(),
            "memory_nodes",
            "its memory is that of all VMs of the template",
        ),
        (
            spec.pages != PagesSpec::Small,
            "pages",
            "its memory is mapped from a file, in pages of 4 KiB",
        ),
        (
            spec.prefault,
            "prefault",
            "its memory is that of all VMs of the template until it writes",
        ),
        (!spec.balloon, "balloon", "its guest has seen a balloon"),
        (
            spec.share == never || spec.root.share == never,
            "share",
            "it shares the template's memory",
        ),
    ]
    .into_iter()
    .find_map(|(is_set, key, why)| is_set.then(|| (vec![key], why)))
}

/// A disk or card that needs more of the machine than a place.
fn other_device(spec: &VmSpec) -> Option<(Vec<&'static str>, &'static str)> {
    let cards = spec.nets.as_deref().unwrap_or_default();
    let has_pmem = spec.disks.iter().any(|disk| disk.device == DiskDevice::Pmem);
    let has_tap = cards.iter().any(|card| card.kind == NetKind::Tap);
    [
        (
            has_pmem,
            vec!["disks"],
            "its machine has disks, and no persistent memory (`as = \"pmem\"`)",
        ),
        (
            has_tap,
            vec!["nets"],
            "its machine has cards of the kinds `user` and `subnet`, and none on a TAP device",
        ),
    ]
    .into_iter()
    .find_map(|(is_set, path, why)| is_set.then_some((path, why)))
}
