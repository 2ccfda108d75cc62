//! The shared folders of a VM.

use crate::fault::{Fault, fault};
use crate::vm::VmSpec;

/// Maximum number of shared folders of a VM, each with a process of its own.
const FOLDERS_MAX: usize = 8;
/// Maximum length of a tag (Virtio 1.2, section 5.11.4), bytes.
const TAG_BYTES_MAX: usize = 36;

/// Checks that each folder has a tag of its own, and that the VM is in one cell.
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

fn is_tag(tag: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=TAG_BYTES_MAX).contains(&tag.len()) && tag.bytes().all(is_plain) && !tag.starts_with(['-', '.'])
}
