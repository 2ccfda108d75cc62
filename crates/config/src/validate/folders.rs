//! The shared folders of a VM.

use crate::fault::{Fault, fault};
use crate::vm::{FolderSpec, PagesSpec, VmSpec};

/// Maximum number of shared folders of a VM, each with a process of its own.
const FOLDERS_MAX: usize = 8;
/// Maximum length of a tag (Virtio 1.2, section 5.11.4), bytes.
const TAG_BYTES_MAX: usize = 36;

/// Checks that each folder has a tag of its own and shares no pages that the guest writes, and that the VM
/// is in one cell.
pub(super) fn check(spec: &VmSpec) -> Result<(), Fault> {
    let folders = &spec.folders;
    if folders.is_empty() {
        return Ok(());
    }
    if spec.span.is_some() {
        return Err(fault(
            &["folders"],
            "a shared folder, and a span: a VM that spans cells has none",
            "leave out `folders` or `span`",
        )
        .or_by_flag("leave out `--folder` or `--span`"));
    }
    if folders.len() > FOLDERS_MAX {
        return Err(fault(
            &["folders"],
            format!("{} shared folders", folders.len()),
            format!("{FOLDERS_MAX} at most"),
        ));
    }
    for (index, folder) in folders.iter().enumerate() {
        let at = index.to_string();
        if !is_tag(&folder.tag) {
            return Err(fault(
                &["folders", &at, "tag"],
                format!("{:?} can't name a folder in the guest", folder.tag),
                format!(
                    "letters, digits, `-`, `_` and `.`, {TAG_BYTES_MAX} at most, not starting with `-` or `.`"
                ),
            ));
        }
        if folder.share
            && let Some((why, help)) = unshareable(spec, folder)
        {
            return Err(fault(&["folders", &at, "share"], why, help));
        }
        if folders[..index].iter().any(|other| other.tag == folder.tag) {
            return Err(fault(
                &["folders", &at, "tag"],
                format!("two folders have the tag {}", folder.tag),
                "give each a tag of its own: the guest mounts by it",
            ));
        }
    }
    Ok(())
}

/// Returns why the pages of a folder can't be shared, and help.
fn unshareable(spec: &VmSpec, folder: &FolderSpec) -> Option<(&'static str, &'static str)> {
    if !folder.read_only {
        return Some((
            "the pages of a folder that the guest writes can't be shared",
            "add `read_only = true`, or leave out `share`",
        ));
    }
    if matches!(spec.pages, PagesSpec::Huge2M | PagesSpec::Huge1G) {
        return Some((
            "memory made of the pool's huge pages can't share 4 KiB pages",
            "use `pages = \"thp\"` or `\"4K\"`, or leave out `share`",
        ));
    }
    let paged = (
        "a VM whose memory is paged maps no pages of a folder",
        "leave out `resident` or `share`",
    );
    spec.resident.is_some().then_some(paged)
}

fn is_tag(tag: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=TAG_BYTES_MAX).contains(&tag.len()) && tag.bytes().all(is_plain) && !tag.starts_with(['-', '.'])
}
