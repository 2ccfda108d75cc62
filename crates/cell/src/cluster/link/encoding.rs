//! The bytes of a message between cells: MessagePack with the names of fields and kinds, so that a cell of
//! the release before decodes a message with new fields ([`urpc::version`]).

use std::io::{self, Cursor};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The bytes of `message`.
///
/// # Errors
/// If a value has no such form, as a map of unknown length.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    rmp_serde::to_vec_named(message).map_err(io::Error::other)
}

/// Decodes the bytes of one message; none may be left over.
///
/// # Errors
/// `InvalidData` if the bytes are no message. Lengths within the bytes that are greater than the rest
/// take no memory.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    let mut reader = rmp_serde::Deserializer::new(Cursor::new(bytes));
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let message = T::deserialize(&mut reader).map_err(invalid)?;
    match reader.position() {
        at if at == bytes.len() as u64 => Ok(message),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Older {
        Vote { claim: u64 },
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Newer {
        Vote {
            claim: u64,
            #[serde(default)]
            gathered: Vec<u16>,
        },
        Added,
    }

    #[test]
    fn message_of_the_next_release_is_read_without_the_fields_that_are_new() {
        let vote = Newer::Vote {
            claim: 7,
            gathered: vec![1, 2],
        };
        assert_eq!(
            decode::<Older>(&encode(&vote).unwrap()).unwrap(),
            Older::Vote { claim: 7 }
        );
        // A kind that is new is never sent to an older cell, and ends the link.
        assert!(decode::<Older>(&encode(&Newer::Added).unwrap()).is_err());
    }

    #[test]
    fn message_of_the_last_release_is_read_with_defaults() {
        let bytes = encode(&Older::Vote { claim: 7 }).unwrap();
        let vote = Newer::Vote {
            claim: 7,
            gathered: Vec::new(),
        };
        assert_eq!(decode::<Newer>(&bytes).unwrap(), vote);
    }

    #[test]
    fn bytes_that_are_no_message_or_more_than_one_are_refused() {
        let whole = encode(&Older::Vote { claim: 7 }).unwrap();
        for length in 0..whole.len() {
            assert!(decode::<Older>(&whole[..length]).is_err());
        }
        assert!(decode::<Older>(&[&whole[..], &[0]].concat()).is_err());
        // An array of 2^32 - 1 elements, of which none follows.
        assert!(decode::<Vec<u64>>(&[0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    }
}
