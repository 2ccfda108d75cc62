//! New files that take the place of a disk's file, with its owner and rights.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use nix::unistd::geteuid;

use crate::disk::boot;
use crate::disk::fingerprint::Fingerprint;

/// A disk's file that is being written, beside the name that it will have.
pub(super) struct ReplacementFile {
    new: hostfiles::AtomicFile,
}

impl ReplacementFile {
    /// Begins a file that is to be at `path`.
    pub fn begin(path: &Path) -> io::Result<Self> {
        // Not beside a link but where the file itself is.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let new = hostfiles::AtomicFile::beside(&path)?;
        Ok(Self { new })
    }

    /// The file, open to read and to write.
    pub fn file(&self) -> &File {
        self.new.file()
    }

    /// Gives the file the records of `old`: an overlay keeps its base. Records may take a block of their own,
    /// so they are written before the two are compared.
    pub fn inherit(&self, old: &File) -> io::Result<()> {
        if let Some(fingerprint) = Fingerprint::recorded(old) {
            fingerprint.record(self.file());
        }
        boot::record(self.file(), boot::present().as_deref())
    }

    /// Puts the complete file in the place of `old`, with the same owner and rights.
    ///
    /// # Errors
    /// When another file has the name by now: a link that another user put there would lead this one to any place.
    pub fn replace(self, old: &File) -> io::Result<()> {
        if !self.new.is_target(old)? {
            return Err(io::Error::other(
                "another file took its name meanwhile; help: look who moves files in its directory, and try again",
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

/// The parts of the old file's ownership that the new one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Both,
    Group,
    Nothing,
}

/// Whether the owner of the old file may get the new one: the directory is theirs, or this user's own. In a directory of a third
/// user that user decides about names there.
fn may_give_away(folder_owner: u32, file_owner: u32, own: u32) -> bool {
    folder_owner == file_owner || folder_owner == own
}

/// Gives a file to the owner and the group of another one, as far as this user may.
fn give(file: &File, about: &std::fs::Metadata) -> Kept {
    let (owner, group) = (about.uid(), about.gid());
    // Only root can give files away; a user can give one to a group that the user is in.
    if fchown(file, Some(owner), Some(group)).is_ok() {
        Kept::Both
    } else if fchown(file, None, Some(group)).is_ok() {
        Kept::Group
    } else {
        Kept::Nothing
    }
}

/// The new file's mode. A group that was not kept has no rights in it, and no file is made set-user-id.
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
