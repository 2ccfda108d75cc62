//! The messages between a monitor and a keeper. Each is one packet, with numbers in little-endian order:
//!
//! ```text
//! header, 16 bytes:  kind u16 | version u16 | length of the payload u32 | request u64
//! ```
//!
//! A request has a number of the monitor's choice, which its reply repeats. A report has the number 0.

use std::fmt;

use crate::spawn::{Identity, Namespaces};

/// Version of the messages.
pub const VERSION: u16 = 1;
/// Bytes of a packet at most, its header included.
pub const PACKET_BYTES_MAX: usize = 4096;
/// Greatest number of descriptors of a packet: the most that Linux sends at once.
pub const FILES_MAX: usize = 253;
/// Greatest number of words of a command line.
pub const WORDS_MAX: usize = 64;
const HEADER_BYTES: usize = 16;
/// Bytes of an error's text at most; the rest is left out.
const ERROR_BYTES_MAX: usize = 1024;

/// A message of either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Request for a process. Descriptors: program, control socket, log. Reply: `Spawned` or `Failed`.
    Spawn {
        /// The namespaces, as flags of a clone.
        flags: i32,
        /// The user and group that the process is mapped to.
        identity: Option<Identity>,
        /// Bytes of the largest file that the process may write.
        file_bytes: u64,
        /// The command line, beginning with the program's name.
        words: Vec<String>,
    },
    /// Acknowledgement of an exit: the keeper reaps the process. Reply: `Done` or `Failed`.
    Reap {
        /// Process id, as of [`Message::Spawned`].
        pid: i32,
    },
    /// Descriptors for the next slot. Reply: `Done` or `Failed`.
    Put {
        /// Whether they are the first.
        begin: bool,
        /// Whether the next slot is whole now, and takes the place of the one before. One without descriptors
        /// is no slot.
        end: bool,
    },
    /// The program that is started when the monitor is gone. Descriptor: program. Reply: `Done`.
    Successor {
        /// The command line, beginning with the program's name.
        words: Vec<String>,
    },
    /// The socket that a cell may connect to when the monitor is gone. Descriptor: a bound socket that does
    /// not listen yet. Reply: `Done` or `Failed`.
    Listen,
    /// The monitor leaves the VM to the next connection, and is not ended: it has other VMs. Reply: `Done`,
    /// and the keeper ends the connection.
    Leave,
    /// The client's lease: when the client closes it and has not sent `detach`, the keeper ends the VM unless
    /// the monitor does. Descriptor: the socket, of which the keeper reads nothing. Reply: `Done`.
    Watch {
        /// The client's order to detach, as it stands in the socket.
        detach: String,
    },
    /// The monitor is ending the VM. No reply. Sent only to a keeper that was sent `Watch`: others do not
    /// know this message.
    Ending,
    /// Request for the slot's descriptors. Reply: one or more of `Slot`.
    Take,
    /// Request to kill all processes of the VM. Reply: `Left`, at once.
    KillAll,
    /// Reply with a started process. Descriptor: its pidfd.
    Spawned {
        /// Process id; other messages name the process by it.
        pid: i32,
        /// Whether the process has the identity that it was to have.
        is_mapped: bool,
    },
    /// Reply to a request that failed.
    Failed {
        /// The kernel's number of the error, or 0.
        errno: i32,
        /// Text for a person.
        what: String,
    },
    /// Reply to a request that was carried out.
    Done,
    /// Reply with descriptors of the slot.
    Slot {
        /// Place of the packet's first descriptor in the slot.
        index: u32,
        /// Descriptors of the slot in all packets together.
        total: u32,
    },
    /// Reply with the number of processes that have been killed and not ended.
    Left {
        /// Number of processes that have not ended.
        running: u32,
    },
    /// Report of a process that has ended.
    Exited {
        /// Process id; it stays taken until the process is reaped.
        pid: i32,
        /// Its status, as `waitpid` returns it.
        status: i32,
    },
}

/// The fault of a packet that is none of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The packet or a part of it is shorter than its contents.
    Short,
    /// The packet is longer than its contents, or than a packet may be.
    Long,
    /// The version is another one.
    Version(u16),
    /// No message has this kind.
    Kind(u16),
    /// A value is none of its type: a text that is not UTF-8, a flag that is not 0 or 1, a foreign flag of a
    /// clone.
    Value,
}

impl fmt::Display for Malformed {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => to.write_str("the packet is too short"),
            Self::Long => to.write_str("the packet is too long"),
            Self::Version(version) => write!(to, "the packet has version {version} instead of {VERSION}"),
            Self::Kind(kind) => write!(to, "no message has kind {kind}"),
            Self::Value => to.write_str("a value in the packet is none of its type"),
        }
    }
}

impl std::error::Error for Malformed {}

impl Message {
    /// Reads a packet. Returns the request's number and the message.
    ///
    /// # Errors
    /// [`Malformed`] if the packet is none of exactly one message.
    pub fn read(packet: &[u8]) -> Result<(u64, Self), Malformed> {
        if packet.len() > PACKET_BYTES_MAX {
            return Err(Malformed::Long);
        }
        let mut reader = Reader(packet);
        let kind = u16::from_le_bytes(reader.array()?);
        let version = u16::from_le_bytes(reader.array()?);
        let length = u32::from_le_bytes(reader.array()?) as usize;
        let request = u64::from_le_bytes(reader.array()?);
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        if reader.0.len() < length {
            return Err(Malformed::Short);
        }
        if reader.0.len() > length {
            return Err(Malformed::Long);
        }
        let message = match kind {
            1 => Self::Spawn {
                flags: reader.flags()?,
                identity: reader.identity()?,
                file_bytes: u64::from_le_bytes(reader.array()?),
                words: reader.words()?,
            },
            2 => Self::Reap { pid: reader.i32()? },
            3 => Self::Put {
                begin: reader.bool()?,
                end: reader.bool()?,
            },
            4 => Self::Successor {
                words: reader.words()?,
            },
            5 => Self::Take,
            6 => Self::KillAll,
            7 => Self::Listen,
            8 => Self::Leave,
            9 => Self::Watch {
                detach: reader.text()?,
            },
            10 => Self::Ending,
            16 => Self::Spawned {
                pid: reader.i32()?,
                is_mapped: reader.bool()?,
            },
            17 => Self::Failed {
                errno: reader.i32()?,
                what: reader.text()?,
            },
            18 => Self::Done,
            19 => Self::Slot {
                index: u32::from_le_bytes(reader.array()?),
                total: u32::from_le_bytes(reader.array()?),
            },
            21 => Self::Left {
                running: u32::from_le_bytes(reader.array()?),
            },
            20 => Self::Exited {
                pid: reader.i32()?,
                status: reader.i32()?,
            },
            other => return Err(Malformed::Kind(other)),
        };
        if !reader.0.is_empty() {
            return Err(Malformed::Long);
        }
        Ok((request, message))
    }

    /// Writes the message as a packet. Texts of errors are shortened.
    ///
    /// # Errors
    /// [`Malformed`] where the reader would refuse the packet.
    pub fn write(&self, request: u64) -> Result<Vec<u8>, Malformed> {
        let mut packet = vec![0; HEADER_BYTES];
        match self {
            Self::Spawn {
                flags,
                identity,
                file_bytes,
                words,
            } => {
                Namespaces::of_flags(*flags).ok_or(Malformed::Value)?;
                packet.extend(flags.to_le_bytes());
                packet.push(u8::from(identity.is_some()));
                if let Some(identity) = identity {
                    packet.extend(identity.uid.to_le_bytes());
                    packet.extend(identity.gid.to_le_bytes());
                }
                packet.extend(file_bytes.to_le_bytes());
                put_words(&mut packet, words)?;
            }
            Self::Reap { pid } => packet.extend(pid.to_le_bytes()),
            Self::Put { begin, end } => packet.extend([u8::from(*begin), u8::from(*end)]),
            Self::Successor { words } => put_words(&mut packet, words)?,
            Self::Take | Self::KillAll | Self::Listen | Self::Leave | Self::Ending | Self::Done => {}
            Self::Watch { detach } => put_text(&mut packet, detach)?,
            Self::Left { running } => packet.extend(running.to_le_bytes()),
            Self::Spawned { pid, is_mapped } => {
                packet.extend(pid.to_le_bytes());
                packet.push(u8::from(*is_mapped));
            }
            Self::Failed { errno, what } => {
                packet.extend(errno.to_le_bytes());
                let end = what.floor_char_boundary(ERROR_BYTES_MAX);
                put_text(
                    &mut packet,
                    &what.get(..end).unwrap_or_default().replace('\0', " "),
                )?;
            }
            Self::Slot { index, total } => {
                packet.extend(index.to_le_bytes());
                packet.extend(total.to_le_bytes());
            }
            Self::Exited { pid, status } => {
                packet.extend(pid.to_le_bytes());
                packet.extend(status.to_le_bytes());
            }
        }
        if packet.len() > PACKET_BYTES_MAX {
            return Err(Malformed::Long);
        }
        let length = (packet.len() - HEADER_BYTES) as u32;
        let header = self
            .kind()
            .to_le_bytes()
            .into_iter()
            .chain(VERSION.to_le_bytes())
            .chain(length.to_le_bytes())
            .chain(request.to_le_bytes());
        for (place, byte) in packet.iter_mut().zip(header) {
            *place = byte;
        }
        Ok(packet)
    }

    fn kind(&self) -> u16 {
        match self {
            Self::Spawn { .. } => 1,
            Self::Reap { .. } => 2,
            Self::Put { .. } => 3,
            Self::Successor { .. } => 4,
            Self::Take => 5,
            Self::KillAll => 6,
            Self::Listen => 7,
            Self::Leave => 8,
            Self::Watch { .. } => 9,
            Self::Ending => 10,
            Self::Left { .. } => 21,
            Self::Spawned { .. } => 16,
            Self::Failed { .. } => 17,
            Self::Done => 18,
            Self::Slot { .. } => 19,
            Self::Exited { .. } => 20,
        }
    }
}

fn put_words(packet: &mut Vec<u8>, words: &[String]) -> Result<(), Malformed> {
    if words.is_empty() {
        return Err(Malformed::Value);
    }
    if words.len() > WORDS_MAX {
        return Err(Malformed::Long);
    }
    packet.extend((words.len() as u16).to_le_bytes());
    words.iter().try_for_each(|word| put_text(packet, word))
}

fn put_text(packet: &mut Vec<u8>, text: &str) -> Result<(), Malformed> {
    if text.contains('\0') {
        return Err(Malformed::Value);
    }
    let length = u16::try_from(text.len()).map_err(|_| Malformed::Long)?;
    packet.extend(length.to_le_bytes());
    packet.extend(text.as_bytes());
    Ok(())
}

/// The bytes that are not read yet.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Short)?;
        self.0 = rest;
        Ok(*first)
    }

    fn i32(&mut self) -> Result<i32, Malformed> {
        self.array().map(i32::from_le_bytes)
    }

    fn bool(&mut self) -> Result<bool, Malformed> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            _ => Err(Malformed::Value),
        }
    }

    fn flags(&mut self) -> Result<i32, Malformed> {
        let namespaces = Namespaces::of_flags(self.i32()?).ok_or(Malformed::Value)?;
        Ok(namespaces.flags())
    }

    fn identity(&mut self) -> Result<Option<Identity>, Malformed> {
        if !self.bool()? {
            return Ok(None);
        }
        Ok(Some(Identity {
            uid: u32::from_le_bytes(self.array()?),
            gid: u32::from_le_bytes(self.array()?),
        }))
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        let (text, rest) = self.0.split_at_checked(length).ok_or(Malformed::Short)?;
        self.0 = rest;
        let text = std::str::from_utf8(text).map_err(|_| Malformed::Value)?;
        if text.contains('\0') {
            return Err(Malformed::Value);
        }
        Ok(text.to_owned())
    }

    fn words(&mut self) -> Result<Vec<String>, Malformed> {
        let count = usize::from(u16::from_le_bytes(self.array()?));
        if count == 0 {
            return Err(Malformed::Value);
        }
        if count > WORDS_MAX {
            return Err(Malformed::Long);
        }
        (0..count).map(|_| self.text()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    fn each() -> Vec<Message> {
        let identity = Identity {
            uid: 1_900_000_003,
            gid: u32::MAX,
        };
        vec![
            Message::Spawn {
                flags: libc::CLONE_NEWUSER | libc::CLONE_NEWPID,
                identity: Some(identity),
                file_bytes: u64::MAX,
                words: words(&["mirrorball-shard", "ä VM", ""]),
            },
            Message::Spawn {
                flags: 0,
                identity: None,
                file_bytes: 0,
                words: words(&["x"]),
            },
            Message::Reap { pid: 7 },
            Message::Put {
                begin: true,
                end: false,
            },
            Message::Successor {
                words: words(&["mirrorball", "monitor"]),
            },
            Message::Take,
            Message::KillAll,
            Message::Listen,
            Message::Leave,
            Message::Watch {
                detach: "\"detach\"\n".to_owned(),
            },
            Message::Ending,
            Message::Left { running: 3 },
            Message::Spawned {
                pid: i32::MAX,
                is_mapped: true,
            },
            Message::Failed {
                errno: libc::EPERM,
                what: "newuidmap: refused".to_owned(),
            },
            Message::Done,
            Message::Slot {
                index: 253,
                total: 254,
            },
            Message::Exited { pid: 1, status: -1 },
        ]
    }

    #[test]
    fn each_message_is_read_as_it_was_written() {
        for message in each() {
            let packet = message.write(u64::MAX - 1).unwrap();
            assert_eq!(Message::read(&packet), Ok((u64::MAX - 1, message)));
        }
    }

    #[test]
    fn packet_that_is_cut_or_lengthened_is_refused() {
        for message in each() {
            let packet = message.write(1).unwrap();
            for length in 0..packet.len() {
                assert_eq!(
                    Message::read(&packet[..length]),
                    Err(Malformed::Short),
                    "{message:?}"
                );
                // A length in the header that fits the packet does not help.
                if let Some(payload) = length.checked_sub(HEADER_BYTES) {
                    let mut cut = packet[..length].to_vec();
                    cut[4..8].copy_from_slice(&(payload as u32).to_le_bytes());
                    assert_eq!(Message::read(&cut), Err(Malformed::Short), "{message:?}");
                }
            }
            let mut longer = packet.clone();
            longer.push(0);
            assert_eq!(Message::read(&longer), Err(Malformed::Long));
            let payload = (longer.len() - HEADER_BYTES) as u32;
            longer[4..8].copy_from_slice(&payload.to_le_bytes());
            assert_eq!(Message::read(&longer), Err(Malformed::Long), "{message:?}");
        }
        assert_eq!(Message::read(&[0; PACKET_BYTES_MAX + 1]), Err(Malformed::Long));
    }

    #[test]
    fn packet_with_a_value_that_is_none_is_refused() {
        let changed = |message: Message, at: usize, byte: u8| {
            let mut packet = message.write(1).unwrap();
            packet[at] = byte;
            Message::read(&packet)
        };
        assert_eq!(changed(Message::Done, 2, 2), Err(Malformed::Version(2)));
        assert_eq!(changed(Message::Done, 0, 99), Err(Malformed::Kind(99)));
        let put = Message::Put {
            begin: true,
            end: true,
        };
        assert_eq!(changed(put, HEADER_BYTES, 2), Err(Malformed::Value));
        let spawn = || each().swap_remove(1);
        // CLONE_VM, and a signal in the lowest byte.
        assert_eq!(changed(spawn(), HEADER_BYTES + 1, 1), Err(Malformed::Value));
        assert_eq!(changed(spawn(), HEADER_BYTES, 9), Err(Malformed::Value));
        let successor = Message::Successor { words: words(&["x"]) };
        let last = successor.write(1).unwrap().len() - 1;
        for byte in [0, 0xff] {
            assert_eq!(changed(successor.clone(), last, byte), Err(Malformed::Value));
        }
        assert_eq!(changed(successor.clone(), HEADER_BYTES, 0), Err(Malformed::Value));
        assert_eq!(changed(successor.clone(), HEADER_BYTES, 2), Err(Malformed::Short));
        assert_eq!(changed(successor, HEADER_BYTES, 65), Err(Malformed::Long));
    }

    #[test]
    fn message_that_a_reader_would_refuse_is_not_written() {
        let successor = |words| Message::Successor { words }.write(1);
        assert_eq!(successor(Vec::new()), Err(Malformed::Value));
        assert_eq!(successor(words(&["a\0b"])), Err(Malformed::Value));
        assert_eq!(
            successor(vec![String::new(); WORDS_MAX + 1]),
            Err(Malformed::Long)
        );
        assert_eq!(
            successor(vec!["x".repeat(PACKET_BYTES_MAX)]),
            Err(Malformed::Long)
        );
        assert_eq!(successor(vec!["x".repeat(1 << 16)]), Err(Malformed::Long));
        // The text of an error is shortened instead, between two characters.
        let what = "ä".repeat(PACKET_BYTES_MAX);
        let packet = Message::Failed { errno: 0, what }.write(1).unwrap();
        let what = "ä".repeat(ERROR_BYTES_MAX / 2);
        assert_eq!(
            Message::read(&packet),
            Ok((1, Message::Failed { errno: 0, what }))
        );
    }
}
