//! Descriptors on their way from a monitor to its successor, with a record of the purpose of each.
//!
//! They pass through the VM's keeper, which reads neither. The record is JSON in a file in memory, the first
//! of the descriptors.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};

use keeper::client::Keeper;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shard_api::launch::Fd;
use urpc::version::Versions;

/// The versions of the record that this program reads, and in which others can read its own record: a VM
/// passes from a program to the next release's, and back.
pub(crate) const VERSIONS: Versions = Versions::up_to(1);

/// The record, and the versions in which it can be read.
#[derive(Debug, Serialize, Deserialize)]
struct Versioned<T> {
    versions: Versions,
    record: T,
}

/// Descriptors to leave, the record's position first.
#[derive(Debug, Default)]
pub(crate) struct Leaving(Vec<OwnedFd>);

impl Leaving {
    /// Adds a copy of this descriptor. Returns its position.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn add(&mut self, file: impl AsFd) -> io::Result<Fd> {
        self.0.push(file.as_fd().try_clone_to_owned()?);
        // The record is the first.
        Ok(Fd(self.0.len()))
    }

    /// Gives all descriptors to the keeper, with their record, in place of those that it had before.
    ///
    /// # Errors
    /// If the keeper is gone, or there are no descriptors left.
    pub(crate) fn put(self, record: impl Serialize, keeper: &Keeper) -> io::Result<()> {
        let versions = VERSIONS;
        let mut file = File::from(memfd_create(c"adoption", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&serde_json::to_vec(&Versioned { versions, record })?)?;
        let files: Vec<_> = std::iter::once(file.as_fd())
            .chain(self.0.iter().map(AsFd::as_fd))
            .collect();
        keeper.put(&files)
    }
}

/// Descriptors that a predecessor left. Each can be taken once.
#[derive(Debug)]
pub(crate) struct LeftFiles(Vec<Option<OwnedFd>>);

impl LeftFiles {
    /// Reads the record among the descriptors that a keeper had.
    ///
    /// # Errors
    /// If there is no record, or it has no version in common with this program.
    pub(crate) fn read<T: DeserializeOwned>(files: Vec<OwnedFd>) -> io::Result<(T, Self)> {
        let mut left = Self(files.into_iter().map(Some).collect());
        let mut text = Vec::new();
        let mut file = File::from(left.take(Fd(0))?);
        file.rewind()?;
        file.read_to_end(&mut text)?;
        let Versioned { versions, record } = serde_json::from_slice::<Versioned<Value>>(&text)?;
        // The versions are checked before the rest, whose form another version may have changed.
        VERSIONS
            .agree(
                versions,
                "the record of a running VM",
                "the program that left the VM",
            )
            .map_err(io::Error::other)?;
        Ok((serde_json::from_value(record)?, left))
    }

    /// The descriptor at this position.
    ///
    /// # Errors
    /// If there is none, or it was taken before.
    pub(crate) fn take(&mut self, place: Fd) -> io::Result<OwnedFd> {
        let file = self.0.get_mut(place.0).and_then(Option::take);
        file.ok_or_else(|| io::Error::other(format!("descriptor {} was not left", place.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_that_was_taken_or_never_left_is_an_error() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let mut left = LeftFiles(vec![Some(null()), Some(null())]);
        left.take(Fd(1)).unwrap();
        for place in [1, 2, usize::MAX] {
            let error = left.take(Fd(place)).unwrap_err().to_string();
            assert_eq!(error, format!("descriptor {place} was not left"));
        }
    }

    fn read(text: &str) -> io::Result<Vec<u32>> {
        let mut file = File::from(memfd_create(c"record", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(text.as_bytes())?;
        LeftFiles::read(vec![file.into()]).map(|(record, _)| record)
    }

    #[test]
    fn record_of_an_unlike_version_is_refused_with_both_versions() {
        assert!(LeftFiles::read::<()>(Vec::new()).is_err());
        let newest = VERSIONS.newest;
        let text = |versions: Versions| {
            let versions = serde_json::to_string(&versions).unwrap();
            format!("{{\"versions\":{versions},\"record\":[1],\"added\":true}}")
        };
        for near in [newest, newest + 1] {
            assert_eq!(read(&text(Versions::up_to(near))).unwrap(), [1]);
        }
        let error = read(&text(Versions::up_to(newest + 2))).unwrap_err().to_string();
        let both = format!(
            "the program that left the VM speaks versions {} to {} of the record of a running VM, and this \
             program {VERSIONS}; help: ",
            newest + 1,
            newest + 2
        );
        assert!(error.starts_with(&both), "{error}");
    }
}
