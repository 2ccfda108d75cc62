//! Argument vector of a filter's process: written by the code that opens a VM's files, read by the process.
//! Pure.

use crate::filter::Resolvers;

/// How strictly the process seals itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seal {
    /// Applies the layers that the host allows.
    #[default]
    Auto,
    /// Applies every layer, or ends.
    Require,
    /// Applies nothing.
    Off,
}

impl Seal {
    const ALL: [(Self, &str); 3] = [
        (Self::Auto, "auto"),
        (Self::Require, "require"),
        (Self::Off, "off"),
    ];
}

/// Parameters of a filter's process at its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// How strictly it seals itself.
    pub seal: Seal,
    /// User and group to which it changes, which only root may choose.
    pub user: Option<(u32, u32)>,
    /// Name servers that passt offers.
    pub resolvers: Resolvers,
    /// Ports of the guest to which UDP is forwarded.
    pub udp_ports: Vec<u16>,
}

/// A word of the command line that is no argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no argument")]
pub struct UnknownWord(pub String);

impl Arguments {
    /// Returns the words of the command line, without the names of program and subcommand.
    pub fn words(&self) -> Vec<String> {
        let seals = Seal::ALL.iter().filter(|(seal, _)| *seal == self.seal);
        let mut words: Vec<String> = seals.map(|(_, name)| format!("sandbox={name}")).collect();
        words.extend(self.user.map(|(uid, gid)| format!("user={uid}:{gid}")));
        words.extend(self.resolvers.at_gateway.then(|| "resolver=gateway".to_owned()));
        let direct = self.resolvers.direct.iter();
        words.extend(direct.map(|address| format!("resolver={address}")));
        words.extend(self.udp_ports.iter().map(|port| format!("udp={port}")));
        words
    }

    /// Parses the words.
    ///
    /// # Errors
    /// Returns the word that is none of [`Arguments::words`].
    pub fn read(words: impl IntoIterator<Item = String>) -> Result<Self, UnknownWord> {
        let mut arguments = Self::default();
        for word in words {
            arguments.take(&word).ok_or(UnknownWord(word))?;
        }
        Ok(arguments)
    }

    fn take(&mut self, word: &str) -> Option<()> {
        let (name, value) = word.split_once('=')?;
        match (name, value) {
            ("sandbox", value) => {
                let (seal, _) = Seal::ALL.into_iter().find(|(_, name)| *name == value)?;
                self.seal = seal;
            }
            ("user", value) => {
                let (uid, gid) = value.split_once(':')?;
                self.user = Some((uid.parse().ok()?, gid.parse().ok()?));
            }
            ("resolver", "gateway") => self.resolvers.at_gateway = true,
            ("resolver", address) => self.resolvers.direct.push(address.parse().ok()?),
            ("udp", port) => self.udp_ports.push(port.parse().ok()?),
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
            resolvers: Resolvers {
                direct: vec!["198.51.100.53".parse().unwrap(), "2001:db8::53".parse().unwrap()],
                at_gateway: true,
            },
            udp_ports: vec![53, 7000],
        };
        let off = Arguments {
            seal: Seal::Off,
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
            "sandbox=",
            "sandbox=on",
            "user=1",
            "user=:",
            "user=-1:2",
            "resolver=dns",
            "udp=65536",
            "tcp=80",
            "--help",
        ] {
            let words = ["sandbox=auto", word].map(String::from);
            assert_eq!(Arguments::read(words), Err(UnknownWord(word.to_owned())));
        }
    }
}
