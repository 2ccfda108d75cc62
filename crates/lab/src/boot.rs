//! Boot configuration of a host's first process, and the preamble before the agent's protocol.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// TCP port on which the first process listens, inside the host.
pub const PORT: u16 = 1024;

/// Length of the secret token at the start of a connection, in bytes.
pub const TOKEN_BYTES: usize = 32;

/// Path of the program inside a host.
pub const PROGRAM: &str = "/run/lab/mirrorball";

/// Files of the programs that the program itself starts: those of shards and of keepers. They are beside the
/// program inside a host, as outside, and at the root of the initramfs. A program is absent if the program
/// that starts the lab does not have it beside itself.
pub const BESIDE: [&str; 2] = ["mirrorball-shard", "mirrorball-keeper"];

/// Console line that reports that a host is up.
pub const READY: &str = "mirrorball lab: up";

/// Configuration of one boot; a file of mode 0600 in the initramfs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BootConfig {
    /// The host's name.
    pub name: String,
    /// Token with which a connection must start.
    pub token: [u8; TOKEN_BYTES],
    /// Modules to load in order: name and parameters.
    pub modules: Vec<(String, String)>,
    /// Number of them, from the first, that the root and the network need.
    pub modules_to_mount: usize,
    /// Network cards; the first one leads outside.
    pub cards: Vec<NetworkCard>,
    /// Names and addresses of the lab's hosts.
    pub names: Vec<(String, Ipv4Addr)>,
    /// Directories whose files never change once they are there: cached by the host's page cache.
    pub cached: Vec<PathBuf>,
    /// The outer machine's clock, seconds since 1970.
    pub time_s: u64,
}

/// A network card of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NetworkCard {
    /// Six bytes in hexadecimal with colons, lower case.
    pub mac: String,
    /// Its address, in a network of 256.
    pub address: Ipv4Addr,
    /// Gateway, if this card leads outside.
    pub gateway: Option<Ipv4Addr>,
}

/// Purpose of a connection: the byte after the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The agent's protocol follows.
    Agent = b'A',
    /// Write all dirty data back, then reply with one byte.
    Sync = b'S',
    /// Reply with the number of running VMs, as one byte that saturates at 255.
    CountVms = b'V',
    /// Reply with one byte once every CPU has run a program and taken a timer interrupt.
    Beat = b'B',
    /// Print the state of CPUs and stuck tasks on the console, then reply with one byte.
    Tell = b'T',
}

impl Purpose {
    /// Decodes a purpose.
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Agent, Self::Sync, Self::CountVms, Self::Beat, Self::Tell]
            .into_iter()
            .find(|purpose| *purpose as u8 == byte)
    }
}
