//! Argument vector of a filter's process: written by the code that opens a VM's files, read by the process.
//! Pure.

use child_process::arguments::{self, Seal, UnknownWord};

use crate::filter::Resolvers;

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

impl Arguments {
    /// Returns the words of the command line, without the names of program and subcommand.
    pub fn words(&self) -> Vec<String> {
        let mut words = arguments::words(self.seal, self.user);
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
        arguments::read(words, Self::take)
    }

    fn take(&mut self, name: &str, value: &str) -> Option<()> {
        match (name, value) {
            ("sandbox", value) => self.seal = arguments::read_seal(value)?,
            ("user", value) => self.user = Some(arguments::read_user(value)?),
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
