//! Files that replace a disk's file, with its owner and permissions.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use nix::unistd::geteuid;

use crate::disk::boot;
use crate::disk::fingerprint::Fingerprint;

/// A file that is being written beside the disk's file that it will replace.
pub(super) struct ReplacementFile {
    new: hostfiles::AtomicFile,
}

impl ReplacementFile {
    /// Creates a file that will be at `path`.
    pub fn begin(path: &Path) -> io::Result<Self> {
        // Follows a link to the file itself.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let new = hostfiles::AtomicFile::beside(&path)?;
        Ok(Self { new })
    }

    /// The file, open to read and to write.
    pub fn file(&self) -> &File {
        self.new.file()
    }

    /// Copies the attributes of `old`: an overlay keeps its base. Attributes may take a block, so they are
    /// written before the sizes are compared.
    pub fn inherit(&self, old: &File) -> io::Result<()> {
        if let Some(fingerprint) = Fingerprint::recorded(old) {
            fingerprint.record(self.file());
        }
        boot::record(self.file(), boot::present().as_deref())
    }

    /// Replaces `old` by the complete file, with the same owner and permissions.
    ///
    /// # Errors
    /// If another file has the name by now: a link planted by another user could redirect this file anywhere.
    pub fn replace(self, old: &File) -> io::Result<()> {
        if !self.new.is_target(old)? {
            return Err(io::Error::other(
                "another file took its name meanwhile; help: look who moves files in its directory, and \
                 try again",
            ));
        }
        let about = old.metadata()?;
        let kept = match may_give_away(self.new.folder_owner()?, about.uid(), geteuid().as_raw()) {
            true => give(self.new.file(), &about),
            false => Kept::Nothing,
        };
        let mode = rights(about.mode(), kept);
        self.new.file().set_permissions(PermissionsExt::from_mode(mode))?;
        self.new.replace()
    }

    /// Gives the complete file its name, which must be free.
    pub fn publish_new(self) -> io::Result<()> {
        self.new.publish_new()
    }
}

/// Parts of the old file's ownership that the new one keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Both,
    Group,
    Nothing,
}

/// Whether the new file may be given to the old file's owner: only in that owner's directory or this user's
/// own. In a third user's directory, that user controls the names.
fn may_give_away(folder_owner: u32, file_owner: u32, own: u32) -> bool {
    folder_owner == file_owner || folder_owner == own
}

/// Gives a file to the owner and the group of another one, as far as this user may.
fn give(file: &File, about: &std::fs::Metadata) -> Kept {
    let (owner, group) = (about.uid(), about.gid());
    // Only root can give files away; a user can give a file to one of the user's groups.
    if fchown(file, Some(owner), Some(group)).is_ok() {
        Kept::Both
    } else if fchown(file, None, Some(group)).is_ok() {
        Kept::Group
    } else {
        Kept::Nothing
    }
}

/// Mode of the new file. A group that was not kept gets no permissions, and no file becomes set-user-id.
fn rights(mode: u32, kept: Kept) -> u32 {
    match kept {
        Kept::Both | Kept::Group => mode & 0o777,
        Kept::Nothing => mode & 0o707,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: u32 = 0;
    const ALICE: u32 = 1001;
    const BOB: u32 = 1002;

    #[test]
    fn a_file_is_given_away_only_in_its_owners_directory_or_the_callers() {
        assert!(may_give_away(ALICE, ALICE, ROOT));
        assert!(may_give_away(ROOT, ALICE, ROOT));
        assert!(may_give_away(BOB, ALICE, BOB));
        assert!(!may_give_away(BOB, ALICE, ROOT));
        assert!(!may_give_away(BOB, ROOT, ROOT));
    }

    #[test]
    fn a_foreign_group_gets_no_rights_and_no_file_becomes_set_user_id() {
        assert_eq!(rights(0o104_660, Kept::Both), 0o660);
        assert_eq!(rights(0o100_660, Kept::Group), 0o660);
        assert_eq!(rights(0o106_664, Kept::Nothing), 0o604);
    }

    #[test]
    fn a_name_that_another_file_took_meanwhile_is_left_alone() {
        type Plant = fn(&Path, &Path) -> io::Result<()>;
        let plants: [Plant; 2] = [
            |other, path| std::fs::rename(other, path),
            |other, path| {
                std::fs::remove_file(path)?;
                std::os::unix::fs::symlink(other, path)
            },
        ];
        for plant in plants {
            let folder = tempfile::tempdir().unwrap();
            let (path, other) = (folder.path().join("disk"), folder.path().join("other"));
            std::fs::write(&path, "disk").unwrap();
            std::fs::write(&other, "other").unwrap();
            let old = File::open(&path).unwrap();
            let new = ReplacementFile::begin(&path).unwrap();
            plant(&other, &path).unwrap();
            let error = new.replace(&old).unwrap_err();
            assert!(error.to_string().contains("took its name"), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), b"other");
        }
    }
}
