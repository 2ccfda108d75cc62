//! What a host's first process is told, and the few bytes it speaks before the agent's protocol.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// TCP port the first process listens on, inside the host.
pub const PORT: u16 = 1024;

/// A connection starts with this many secret bytes.
pub const TOKEN_BYTES: usize = 32;

/// Where the program itself is found inside a host.
pub const PROGRAM: &str = "/run/lab/mirrorball";

/// Files of the programs that the program itself starts: those of shards and of keepers. They lie beside the
/// program inside a host, as outside, and at the root of the initramfs. One that the program which starts the
/// lab does not have beside it is absent.
pub const BESIDE: [&str; 2] = ["mirrorball-shard", "mirrorball-keeper"];

/// The console line that says a host is up.
pub const READY: &str = "mirrorball lab: up";

/// Everything one boot needs to know; a file of mode 0600 in the initramfs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BootConfig {
    /// The host's name.
    pub name: String,
    /// What a connection must start with.
    pub token: [u8; TOKEN_BYTES],
    /// Modules to load in order: name and parameters.
    pub modules: Vec<(String, String)>,
    /// How many of them, from the first, the root and the network need.
    pub modules_to_mount: usize,
    /// Network cards, the first being the way out.
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
    /// The way out, if this is it.
    pub gateway: Option<Ipv4Addr>,
}

/// What a connection is for: the byte after the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The agent's protocol follows.
    Agent = b'A',
    /// Write everything back, then answer one byte.
    Sync = b'S',
    /// Answer with the number of running VMs, as one byte that stops at 255.
    CountVms = b'V',
    /// Answer one byte once every CPU has run a program and taken a timer's interrupt.
    Beat = b'B',
    /// Say on the console what CPUs and stuck tasks are at, then answer one byte.
    Tell = b'T',
}

impl Purpose {
    /// What a byte stands for.
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Agent, Self::Sync, Self::CountVms, Self::Beat, Self::Tell]
            .into_iter()
            .find(|purpose| *purpose as u8 == byte)
    }
}
