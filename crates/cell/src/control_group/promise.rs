//! Memory of a VM's group that the kernel keeps from programs outside (`memory.min`).
//!
//! The kernel keeps a group's memory only as far as each group above it has as much to keep. So the group of
//! all VMs has the sum of its groups' promises. Several processes add it up, each after its own change; where
//! one is lost meanwhile, the sum is too small, and [`check`] reports that.

use std::fs;
use std::io;
use std::path::Path;

use config::Size;

use super::put;

const FILE: &str = "memory.min";

/// Sets the promise of a group, and removes that of a VM without one. A host that refuses keeps less, which
/// [`check`] finds.
pub(super) fn set(group: &Path, promised: Option<Size>) {
    let promised = promised.map_or(0, |promised| promised.0);
    // A group without a promise has none from its start.
    if promised == 0 && read(group).unwrap_or(0) == 0 {
        return;
    }
    let _ = put(&group.join(FILE), &promised.to_string());
    if let Some(ours) = group.parent() {
        add_up(ours);
    }
}

/// Sets the promise of the group `ours` to the sum of those below it.
pub(super) fn add_up(ours: &Path) {
    let sum = sum(ours);
    // The user's other groups have nothing promised, and their file may not be this user's.
    if read(ours).unwrap_or(0) != sum {
        let _ = put(&ours.join(FILE), &sum.to_string());
    }
}

/// Whether the kernel keeps `promised` for a group, by the value that it has accepted.
///
/// # Errors
/// The reason why it does not.
pub(super) fn check(group: &Path, promised: Size) -> Result<(), String> {
    let unreadable =
        |error: io::Error| format!("the kernel's {FILE} of its control group is not known: {error}");
    let own = read(group).map_err(unreadable)?;
    if own < promised.0 {
        return Err(format!(
            "the kernel keeps {} of {promised} for its control group",
            Size(own)
        ));
    }
    let ours = group.parent().ok_or("its control group has none above it")?;
    let (all, sum) = (read(ours).map_err(unreadable)?, sum(ours));
    if all < sum {
        return Err(format!(
            "the kernel keeps {} for the control groups of all VMs, and {} are promised",
            Size(all),
            Size(sum)
        ));
    }
    // The kernel's root has no such file. In a container, this root is a group of the host.
    let root = ours.parent().map(read);
    match root {
        Some(Ok(root)) if root < sum => Err(format!(
            "the kernel keeps {} for the control group of this container, and {} are promised to VMs",
            Size(root),
            Size(sum)
        )),
        _ => Ok(()),
    }
}

/// The sum of the promises of the groups below `ours`.
fn sum(ours: &Path) -> u64 {
    let groups = fs::read_dir(ours).into_iter().flatten().flatten();
    let promises = groups.filter_map(|group| read(&group.path()).ok());
    promises.fold(0, u64::saturating_add)
}

/// The promise of a group, bytes.
fn read(group: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(group.join(FILE))?;
    match text.trim() {
        "max" => Ok(u64::MAX),
        number => number.parse().map_err(io::Error::other),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A folder like one of groups: the kernel makes the file with a group.
    fn groups(names: &[&str]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let root = tempfile::tempdir().unwrap();
        let ours = root.path().join("ours");
        let all = std::iter::once(ours.clone()).chain(names.iter().map(|name| ours.join(name)));
        let folders: Vec<PathBuf> = all.collect();
        for folder in &folders {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join(FILE), "0\n").unwrap();
        }
        (root, folders)
    }

    fn shrink(folder: &Path, bytes: u64) {
        fs::write(folder.join(FILE), format!("{bytes}\n")).unwrap();
    }

    /// Writes over a whole file, as the kernel's files are.
    fn set_whole(group: &Path, bytes: u64) {
        for folder in [group, group.parent().unwrap()] {
            fs::write(folder.join(FILE), "0").unwrap();
        }
        set(group, Some(Size(bytes)));
    }

    #[test]
    fn promise_holds_when_the_kernel_has_as_much_for_all_groups_above() {
        let (root, folders) = groups(&["one", "two", "plain"]);
        set_whole(&folders[1], 128 * MIB);
        set_whole(&folders[2], 64 * MIB);
        assert_eq!(read(&folders[0]).unwrap(), 192 * MIB, "the sum");
        assert_eq!(check(&folders[1], Size(128 * MIB)), Ok(()));
        assert_eq!(check(&folders[2], Size(64 * MIB)), Ok(()));

        let why = check(&folders[2], Size(65 * MIB)).unwrap_err();
        assert!(why.contains("keeps 64M of 65M"), "{why}");
        shrink(&folders[0], 191 * MIB);
        let why = check(&folders[1], Size(128 * MIB)).unwrap_err();
        assert!(
            why.contains("keeps 191M for the control groups of all VMs"),
            "{why}"
        );
        shrink(&folders[0], 192 * MIB);
        // A container's root is a group of the host.
        shrink(root.path(), 0);
        let why = check(&folders[1], Size(128 * MIB)).unwrap_err();
        assert!(why.contains("of this container"), "{why}");
        fs::write(root.path().join(FILE), "max\n").unwrap();
        assert_eq!(check(&folders[1], Size(128 * MIB)), Ok(()));
        fs::remove_file(folders[1].join(FILE)).unwrap();
        let why = check(&folders[1], Size(128 * MIB)).unwrap_err();
        assert!(why.contains("is not known"), "{why}");
    }

    #[test]
    fn group_without_a_promise_changes_no_file() {
        let (_root, folders) = groups(&["plain"]);
        for folder in &folders {
            fs::remove_file(folder.join(FILE)).unwrap();
        }
        set(&folders[1], None);
        assert!(folders.iter().all(|folder| !folder.join(FILE).exists()));
        assert!(check(&folders[1], Size(0)).is_err(), "nothing is known of it");
    }
}
