//! Descriptors on their way from a monitor to its successor, with a record of what each is for.
//!
//! They go by the VM's keeper, which reads neither. The record is JSON in a file in memory, the first of the descriptors.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};

use keeper::client::Keeper;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use shard_api::launch::Fd;
use shard_api::version::VERSION;

/// The record, and the version of the program that wrote it.
#[derive(Debug, Serialize, Deserialize)]
struct Versioned<T> {
    version: String,
    record: T,
}

/// Descriptors that are to be left, the record's place first.
#[derive(Debug, Default)]
pub(crate) struct Leaving(Vec<OwnedFd>);

impl Leaving {
    /// Adds a copy of this one. Returns its place.
    ///
    /// # Errors
    /// If this process has no descriptors left.
    pub(crate) fn add(&mut self, file: impl AsFd) -> io::Result<Fd> {
        self.0.push(file.as_fd().try_clone_to_owned()?);
        // The record is the first.
        Ok(Fd(self.0.len()))
    }

    /// Gives all to the keeper, with their record, in place of what it had before.
    ///
    /// # Errors
    /// If the keeper is gone, or there are no descriptors left.
    pub(crate) fn put(self, record: impl Serialize, keeper: &Keeper) -> io::Result<()> {
        let version = VERSION.to_owned();
        let mut file = File::from(memfd_create(c"adoption", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&serde_json::to_vec(&Versioned { version, record })?)?;
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
    /// Reads the record among what a keeper had.
    ///
    /// # Errors
    /// If there is none, or it is of another version.
    pub(crate) fn read<T: DeserializeOwned>(files: Vec<OwnedFd>) -> io::Result<(T, Self)> {
        let mut left = Self(files.into_iter().map(Some).collect());
        let mut text = Vec::new();
        let mut file = File::from(left.take(Fd(0))?);
        file.rewind()?;
        file.read_to_end(&mut text)?;
        let Versioned { version, record } = serde_json::from_slice::<Versioned<Value>>(&text)?;
        // Before the rest, which another version may write in another way.
        if version != VERSION {
            return Err(io::Error::other(format!(
                "the VM was left by version {version:?}, and this is version {VERSION:?}"
            )));
        }
        Ok((serde_json::from_value(record)?, left))
    }

    /// The descriptor at this place.
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

    #[test]
    fn record_of_another_version_is_refused_with_both_versions() {
        let mut file = File::from(memfd_create(c"record", MFdFlags::MFD_CLOEXEC).unwrap());
        assert!(LeftFiles::read::<()>(Vec::new()).is_err());
        file.write_all(b"{\"version\":\"0.0.9\",\"record\":[1]}").unwrap();
        let error = LeftFiles::read::<()>(vec![file.into()]).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("the VM was left by version \"0.0.9\", and this is version {VERSION:?}")
        );
    }
}
