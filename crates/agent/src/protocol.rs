//! What goes over the wire.
//!
//! A connection is a sequence of frames in both directions, each a kind, a length and that many bytes
//! (`frame`). The client opens with a [`Request`]; the server answers it with [`Kind::Ready`] or
//! [`Kind::Refused`]; then:
//!
//! | request | client sends | server sends |
//! | --- | --- | --- |
//! | ping | | |
//! | exec | stdin, stdin-end, window-size, signal | stdout, stderr, and at last exit |
//! | put | data, and at last end | done |
//! | get | | data, and at last end |
//! | identify | | |
//!
//! `Refused` may come instead of anything the server sends, and is its last frame.

pub mod frame;

use serde::{Deserialize, Serialize};

pub use frame::{Decoder, FRAME_BYTES_MAX, Frame, FrameError, HEADER_BYTES, Kind};

/// What the client asks; the first frame of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "op")]
pub enum Request {
    /// Answers with the agent's version: the guest is up.
    Ping,
    /// Runs a program.
    Exec(ExecRequest),
    /// Receives a file from the client (`cp host → guest`).
    Put {
        /// Absolute path in the guest; a directory gets `name` in it.
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
    /// Makes the guest somebody else than the one it was copied from; answered when it is.
    Identify(Identity),
}

/// What makes a clone different.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The host's name.
    pub hostname: String,
    /// Hardware addresses: for each network card, what it was and what it becomes.
    pub cards: Vec<CardAddress>,
    /// Bytes that only this guest gets, for the kernel's generator of random numbers; from then on it gives
    /// others than its parent's.
    pub seed: Vec<u8>,
    /// What time it is, nanoseconds since 1970.
    pub unix_ns: u64,
}

/// A network card's new hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardAddress {
    /// What it was.
    pub from: [u8; 6],
    /// What it becomes.
    pub to: [u8; 6],
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
    /// Give the program a terminal of this size.
    pub tty: Option<WindowSize>,
}

/// The server agrees to do what was asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// The agent's version.
    pub version: String,
    /// Get: the file's size in bytes, when it has one (files of `/proc` have none).
    #[serde(default)]
    pub size: Option<u64>,
    /// Get: the file's permission bits.
    #[serde(default)]
    pub mode: Option<u32>,
}

/// The end of a file's data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Bytes sent.
    pub bytes: u64,
    /// Their SHA-256, in hexadecimal.
    pub sha256: String,
}

/// Size of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitStatus {
    /// Its exit status.
    Code(u8),
    /// The signal that killed it.
    Signal(u8),
}

impl ExitStatus {
    /// As a shell gives it: 128 plus the signal.
    pub fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128u8.wrapping_add(signal),
        }
    }
}
