//! The messages of the protocol.
//!
//! A connection is a sequence of frames in both directions, each a kind, a length and that many bytes
//! (`frame`). The client opens with a [`Request`]; the server answers it with [`Kind::Ready`] or
//! [`Kind::Refused`]; then:
//!
//! | request | client sends | server sends |
//! | --- | --- | --- |
//! | ping | | |
//! | exec, exec-kept, attach | stdin, stdin-end, window-size, signal | stdout, stderr, and finally exit |
//! | put | data, and finally end | done |
//! | get | | data, and finally end |
//! | identify, is-up, renew | | |
//!
//! `Refused` may replace any frame of the server, and is its last frame.
//!
//! An agent in a guest may be older than its client, and refuses a request that it does not know: one of the
//! release before has neither exec-kept nor attach, and one of a release without warm starts neither is-up
//! nor renew.

pub mod frame;

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

pub use frame::{Decoder, FRAME_BYTES_MAX, Frame, FrameError, HEADER_BYTES, Kind};

/// Request of the client; the first frame of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "op")]
pub enum Request {
    /// Returns the agent's version, which shows that the guest is up.
    Ping,
    /// Runs a program.
    Exec(ExecRequest),
    /// Runs a program that is kept for a while if the connection ends before the program does.
    ExecKept {
        /// Id by which another connection attaches to it; the client chooses it.
        id: String,
        /// Program, environment and terminal, as of [`Request::Exec`].
        program: ExecRequest,
    },
    /// Goes on with a kept program, in place of the connection that it has or had.
    Attach {
        /// Id that the client of [`Request::ExecKept`] chose.
        id: String,
    },
    /// Receives a file from the client (`cp host → guest`).
    Put {
        /// Absolute path in the guest; a directory receives the file under `name`.
        path: String,
        /// The source's file name.
        name: String,
        /// Permission bits.
        mode: u32,
    },
    /// Sends a file to the client (`cp guest → host`).
    Get {
        /// Absolute path in the guest.
        path: String,
    },
    /// Gives the guest another identity than its parent's; the reply follows the change.
    Identify(Identity),
    /// Returns whether the guest has finished its start ([`Ready::is_up`]).
    IsUp,
    /// Gives a guest that resumed from a template an identity of its own; the reply follows the change.
    Renew(Renewal),
}

/// The identity of a guest that resumed from a template: that of a clone, and the ids that a boot would have
/// drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Renewal {
    /// Name, addresses, random numbers and time.
    pub identity: Identity,
    /// Id for `/etc/machine-id`: 32 hexadecimal digits.
    pub machine_id: String,
    /// Id of the boot, a UUID.
    pub boot_id: String,
    /// The VM's disks beside the image's, in whose places the template had others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<ReplacedDisk>,
}

/// A disk in whose place the template had another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplacedDisk {
    /// Serial of both disks.
    pub serial: String,
    /// Size of the template's disk, in sectors of 512 bytes. The VM's disk has another size.
    pub template_sectors: u64,
}

/// The identity of a clone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// Name of the guest.
    pub hostname: String,
    /// For each network card, its old and new hardware address.
    pub cards: Vec<CardAddress>,
    /// Seed of the kernel's random number generator, unique to this guest. From then on the numbers differ
    /// from the parent's.
    pub seed: Vec<u8>,
    /// Current time, nanoseconds since 1970.
    pub unix_ns: u64,
}

/// A network card's new hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardAddress {
    /// Old address.
    pub from: [u8; 6],
    /// New address.
    pub to: [u8; 6],
    /// IPv4 settings of the card's network, for a card of a subnet. Absent from a client of an older release;
    /// an older agent ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Settings>,
}

/// IPv4 settings of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ipv4Settings {
    /// Address of the card.
    pub address: Ipv4Addr,
    /// Number of bits of its network's prefix, at most 32.
    pub prefix_bits: u8,
    /// Address of the network's gateway.
    pub gateway: Ipv4Addr,
}

/// A program to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program (found on PATH when it has no slash) and arguments.
    pub argv: Vec<String>,
    /// Added to the agent's own environment.
    pub env: Vec<(String, String)>,
    /// Working directory; the root when absent.
    pub cwd: Option<String>,
    /// Size of a terminal to run the program in; without it the program has pipes.
    pub tty: Option<WindowSize>,
}

/// The server accepts the request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// The agent's version.
    pub version: String,
    /// For get: size of the file in bytes, if it has one (files of `/proc` have none).
    #[serde(default)]
    pub size: Option<u64>,
    /// For get: permission bits of the file.
    #[serde(default)]
    pub mode: Option<u32>,
    /// For attach: the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached: Option<Attached>,
    /// For is-up: whether the guest has finished its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_up: Option<bool>,
}

/// A kept program at the time when a client attaches to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Bytes of its output that were dropped while it had no client. Output that was on its way to the client
    /// before is not counted.
    pub dropped_bytes: u64,
    /// Whether it runs in a terminal.
    pub has_terminal: bool,
}

/// The end of a file's data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Number of bytes sent.
    pub bytes: u64,
    /// SHA-256 of the bytes, in hexadecimal.
    pub sha256: String,
}

/// Size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Number of rows.
    pub rows: u16,
    /// Number of columns.
    pub cols: u16,
}

/// End of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitStatus {
    /// Low eight bits of the program's exit status.
    Code(u8),
    /// Number of the signal that killed it.
    Signal(u8),
}

impl ExitStatus {
    /// Returns the exit status of a shell: for a signal, 128 plus its number.
    pub fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128u8.wrapping_add(signal),
        }
    }
}
