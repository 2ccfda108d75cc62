//! Messages between programs of one host: a line of JSON each, with the versions of its protocol that the
//! sender speaks.
//!
//! A receiver compares the versions before it reads the rest ([`urpc::version`]). It refuses a request of an
//! unknown kind ([`MessageError::Unknown`]).

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use urpc::version::{VersionMismatch, Versions};

/// One program's side of a protocol.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    /// Name for errors, as "the protocol of clients".
    pub name: &'static str,
    /// Program at the other end, as "the cell".
    pub peer: &'static str,
    /// Supported versions.
    pub versions: Versions,
}

/// A message as it is sent.
#[derive(Debug, Serialize)]
pub struct Sent<'a, T> {
    versions: Versions,
    #[serde(flatten)]
    message: &'a T,
}

/// A message as it is received.
#[derive(Deserialize)]
struct Received {
    /// A program that sends no versions speaks the first.
    #[serde(default)]
    versions: Versions,
    #[serde(flatten)]
    message: Map<String, Value>,
}

/// Reason why a line is rejected. One line.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The sender has no version in common with this program.
    #[error(transparent)]
    VersionMismatch(#[from] VersionMismatch),
    /// The line is no message of this version.
    #[error(
        "{peer} sent what is no message of {name}, of which this program speaks {ours} ({error}); help: \
         where another release of this program runs, upgrade the older one"
    )]
    Unknown {
        /// The sender, as a word for the error.
        peer: &'static str,
        /// Name of the protocol that was expected.
        name: &'static str,
        /// Versions that this program speaks.
        ours: Versions,
        /// Error of the parser.
        error: serde_json::Error,
    },
}

impl Protocol {
    /// Adds the versions to `message`, which is an object in JSON.
    pub fn sent<'a, T>(&self, message: &'a T) -> Sent<'a, T> {
        let versions = self.versions;
        Sent { versions, message }
    }

    /// Formats `message`, which is an object in JSON, as a line.
    ///
    /// # Errors
    /// If it is none.
    pub fn write(&self, message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(&self.sent(message))?;
        line.push(b'\n');
        Ok(line)
    }

    /// Parses the message of a line.
    ///
    /// # Errors
    /// If its sender shares no version with this program, or this version has no such message.
    pub fn read<T: DeserializeOwned>(&self, line: &str) -> Result<T, MessageError> {
        let unknown = |error| MessageError::Unknown {
            peer: self.peer,
            name: self.name,
            ours: self.versions,
            error,
        };
        let Received { versions, message } = serde_json::from_str(line).map_err(unknown)?;
        self.versions.agree(versions, self.name, self.peer)?;
        serde_json::from_value(Value::Object(message)).map_err(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROTOCOL: Protocol = Protocol {
        name: "the protocol of clients",
        peer: "the cell",
        versions: Versions::up_to(3),
    };

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", tag = "ask")]
    enum Ask {
        Ping,
        Lend { to: u16 },
    }

    fn sent(newest: u16, message: &impl Serialize) -> String {
        let versions = Versions::up_to(newest);
        String::from_utf8(Protocol { versions, ..PROTOCOL }.write(message).unwrap()).unwrap()
    }

    #[test]
    fn message_of_the_same_release_or_one_apart_is_read_without_fields_that_are_new() {
        for newest in 2..=4 {
            for ask in [Ask::Ping, Ask::Lend { to: 5 }] {
                let mut line: Value = serde_json::from_str(&sent(newest, &ask)).unwrap();
                line["added"] = 1.into();
                assert_eq!(PROTOCOL.read::<Ask>(&line.to_string()).unwrap(), ask);
            }
        }
    }

    #[test]
    fn message_of_an_unlike_version_is_refused_whatever_else_it_holds() {
        for newest in [1, 5] {
            let line = sent(newest, &serde_json::json!({ "ask": "levitate" }));
            let error = PROTOCOL.read::<Ask>(&line).unwrap_err();
            assert!(matches!(error, MessageError::VersionMismatch(_)), "{error}");
        }
        // A message without versions has the first version.
        assert!(matches!(
            PROTOCOL.read::<Ask>("{\"ask\":\"ping\"}"),
            Err(MessageError::VersionMismatch(_))
        ));
    }

    #[test]
    fn line_that_is_no_message_is_refused_with_the_versions_and_help() {
        let unknown = sent(3, &serde_json::json!({ "ask": "levitate" }));
        for line in [
            unknown.as_str(),
            "",
            "[]",
            "1",
            "{}",
            "{\"versions\":1,\"ask\":\"ping\"}",
        ] {
            let error = PROTOCOL.read::<Ask>(line).unwrap_err().to_string();
            assert!(
                error.contains("versions ") && error.contains("; help: "),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
