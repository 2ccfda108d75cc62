//! Argument vector of a folder's process: written by the code that opens a VM's files, read by the process.
//! Pure.

use std::time::Duration;

use child_process::arguments::{self, Seal, UnknownWord};

use crate::request::Rights;

/// How long a guest may use what it has read of the folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Nothing is kept: each access is a request.
    None,
    /// Data until the file is opened again or has changed, names and attributes for a second.
    #[default]
    Auto,
    /// Everything, as long as the guest likes.
    Always,
}

impl Cache {
    const ALL: [(Self, &str); 3] = [
        (Self::None, "none"),
        (Self::Auto, "auto"),
        (Self::Always, "always"),
    ];

    /// How long the guest keeps names and attributes.
    pub fn validity(self) -> Duration {
        match self {
            Self::None => Duration::ZERO,
            Self::Auto => Duration::from_secs(1),
            Self::Always => Duration::from_secs(24 * 3600),
        }
    }
}

/// Parameters of a folder's process at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// How strictly it seals itself.
    pub seal: Seal,
    /// User and group to which it changes, which only root may choose.
    pub user: Option<(u32, u32)>,
    /// The guest's rights.
    pub rights: Rights,
    /// The guest's cache.
    pub cache: Cache,
    /// Whether files that the guest reads are passed to the shard, which shares their pages.
    pub lends: bool,
}

impl Arguments {
    /// Returns the words of the command line, without the names of program and subcommand.
    pub fn words(&self) -> Vec<String> {
        let mut words = arguments::words(self.seal, self.user);
        words.extend(self.rights.read_only.then(|| "access=read".to_owned()));
        words.extend(self.rights.xattr.then(|| "xattr=user".to_owned()));
        words.extend(self.lends.then(|| "pages=lend".to_owned()));
        let caches = Cache::ALL.iter().filter(|(cache, _)| *cache == self.cache);
        words.extend(caches.map(|(_, name)| format!("cache={name}")));
        words
    }

    /// Parses the words.
    ///
    /// # Errors
    /// Returns the word that is none of [`Arguments::words`].
    pub fn read(words: impl IntoIterator<Item = String>) -> Result<Self, UnknownWord> {
        arguments::read(words, Self::take)
    }

    fn take(&mut self, name: &str, value: &str) -> Option<()> {
        match (name, value) {
            ("sandbox", value) => self.seal = arguments::read_seal(value)?,
            ("user", value) => self.user = Some(arguments::read_user(value)?),
            ("access", "read") => self.rights.read_only = true,
            ("xattr", "user") => self.rights.xattr = true,
            ("pages", "lend") => self.lends = true,
            ("cache", value) => {
                let (cache, _) = Cache::ALL.into_iter().find(|(_, name)| *name == value)?;
                self.cache = cache;
            }
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_were_written() {
        let every = Arguments {
            seal: Seal::Require,
            user: Some((1_900_000_003, 1_900_000_004)),
            rights: Rights {
                read_only: true,
                xattr: true,
            },
            cache: Cache::Always,
            lends: true,
        };
        let off = Arguments {
            seal: Seal::Off,
            cache: Cache::None,
            ..Arguments::default()
        };
        for arguments in [every, off, Arguments::default()] {
            assert_eq!(Arguments::read(arguments.words()), Ok(arguments));
        }
    }

    #[test]
    fn word_that_is_no_argument_is_named() {
        for word in [
            "",
            "sandbox",
            "sandbox=on",
            "user=1",
            "access=write",
            "xattr=all",
            "pages=keep",
            "cache=",
        ] {
            assert_eq!(
                Arguments::read([word.to_owned()]),
                Err(UnknownWord(word.to_owned()))
            );
        }
    }
}
