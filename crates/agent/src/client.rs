//! The host's side.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::protocol::{ExecRequest, ExitStatus};

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing answers on the agent's port.
    #[error("no agent answers in the guest")]
    NoAgent,
    /// The agent said no: its words.
    #[error("{0}")]
    Refused(String),
    /// The other side does not keep to the protocol.
    #[error("the guest's agent broke the protocol: {0}")]
    Protocol(String),
    /// The connection broke.
    #[error("the connection to the guest's agent broke")]
    Io(#[from] io::Error),
}

/// A connected byte stream to an agent: needs reads and writes from two threads and a readable file descriptor.
pub trait Stream: io::Read + io::Write + AsFd + Send {}
impl<T: io::Read + io::Write + AsFd + Send> Stream for T {}

/// Connects to `port` of the guest behind the vsock socket `path` (`CONNECT <port>\n`, `OK <port>\n`),
/// trying again until `limit` when nobody listens yet.
pub fn connect_vsock(_path: &Path, _port: u32, _limit: Duration) -> Result<UnixStream, ClientError> {
    unimplemented!()
}

/// Runs a program with this process's standard input, output and error (raw mode and window changes with a tty).
pub fn exec(_stream: impl Stream, _request: &ExecRequest) -> Result<ExitStatus, ClientError> {
    unimplemented!()
}

/// Runs a program and collects its output: status, standard output, standard error.
pub fn output(
    _stream: impl Stream,
    _request: &ExecRequest,
    _input: &[u8],
) -> Result<(ExitStatus, Vec<u8>, Vec<u8>), ClientError> {
    unimplemented!()
}

/// Copies `source` into the guest; `progress` is called with the bytes so far.
pub fn put(
    _stream: impl Stream,
    _source: &mut File,
    _name: &str,
    _path: &str,
    _progress: &mut dyn FnMut(u64),
) -> Result<u64, ClientError> {
    unimplemented!()
}

/// Copies a guest's file into `target`; `progress` is called with the bytes so far.
pub fn get(
    _stream: impl Stream,
    _path: &str,
    _target: &mut File,
    _progress: &mut dyn FnMut(u64),
) -> Result<u64, ClientError> {
    unimplemented!()
}
