//! The host's side of the protocol.
//!
//! The guest may be hostile, so data of its agent are untrusted. A missing handshake is an error after half a
//! minute. Frames and collected output are bounded. A file is written only to the caller's descriptor, and
//! only while its file system has room. Text for people has its control characters removed. A program may run
//! for any time without output; it ends with the connection at the latest, or a minute later if it is kept.

mod connect;
mod exec;
mod file;
mod terminal;

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

pub use connect::{connect_vsock, connect_vsock_while};
pub use exec::{Bounds, Collected, attach, collect, exec, exec_kept, output};
pub use file::{Copied, GuestFile, Place, Sent, get, put, put_all};
pub use terminal::{RawMode, window_size};

use crate::protocol::{Frame, Identity, Kind, Ready, Renewal, Request};
use crate::wire::{PEER_TIMEOUT, Wire};

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No agent answers on the port.
    #[error("no agent answers in the guest")]
    NoAgent,
    /// The agent refused, with this reason.
    #[error("{0}")]
    Refused(String),
    /// The agent violated the protocol.
    #[error("the guest's agent broke the protocol: {0}")]
    Protocol(String),
    /// The connection broke.
    #[error("the connection to the guest's agent broke")]
    Io(#[from] io::Error),
    /// A file or terminal of the host failed.
    #[error("{what}")]
    Local {
        /// The failed operation.
        what: &'static str,
        /// Reason of the failure.
        source: io::Error,
    },
}

/// A connected stream socket to an agent.
pub trait Stream: io::Read + io::Write + AsFd + Send {}
impl<T: io::Read + io::Write + AsFd + Send> Stream for T {}

/// Returns the agent's version, which shows that the guest is up.
pub fn ping(stream: impl Stream) -> Result<String, ClientError> {
    let mut wire = Wire::new(&stream)?;
    let ready = open(&mut wire, &Request::Ping)?;
    Ok(ready
        .version
        .chars()
        .filter(|c| !c.is_control())
        .take(64)
        .collect())
}

/// Gives the guest another identity.
pub fn identify(stream: impl Stream, identity: &Identity) -> Result<(), ClientError> {
    let mut wire = Wire::new(&stream)?;
    open(&mut wire, &Request::Identify(identity.clone())).map(|_| ())
}

/// Returns whether the guest has finished its start. An agent without warm starts refuses.
pub fn is_up(stream: impl Stream) -> Result<bool, ClientError> {
    let mut wire = Wire::new(&stream)?;
    let ready = open(&mut wire, &Request::IsUp)?;
    ready
        .is_up
        .ok_or_else(|| ClientError::Protocol("it does not report whether the guest is up".to_owned()))
}

/// Gives a guest that resumed from a template an identity of its own, which takes `limit` at most: it may
/// draw keys.
pub fn renew(stream: impl Stream, renewal: &Renewal, limit: Duration) -> Result<(), ClientError> {
    let mut wire = Wire::new(&stream)?;
    open_within(&mut wire, &Request::Renew(renewal.clone()), limit).map(|_| ())
}

/// Sends the request and waits for the agent to accept it.
fn open(wire: &mut Wire, request: &Request) -> Result<Ready, ClientError> {
    open_within(wire, request, PEER_TIMEOUT)
}

/// As [`open`], with a time limit of its own.
fn open_within(wire: &mut Wire, request: &Request, limit: Duration) -> Result<Ready, ClientError> {
    wire.send_json(Kind::Request, request)?;
    let frame = answer_within(wire, limit)?;
    match frame.kind {
        Kind::Ready => frame
            .json()
            .map_err(|error| ClientError::Protocol(error.to_string())),
        kind => Err(ClientError::Protocol(format!("unexpected {kind:?} frame"))),
    }
}

/// Waits for one frame, up to a time limit.
fn answer(wire: &mut Wire) -> Result<Frame, ClientError> {
    answer_within(wire, PEER_TIMEOUT)
}

fn answer_within(wire: &mut Wire, limit: Duration) -> Result<Frame, ClientError> {
    match wire.wait_frame(Some(Instant::now() + limit)) {
        Ok(Some(frame)) => checked(frame),
        Ok(None) => Err(gone()),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(ClientError::NoAgent),
        Err(error) => Err(broken(error)),
    }
}

/// Converts a refusal into its error.
fn checked(frame: Frame) -> Result<Frame, ClientError> {
    match frame.kind {
        Kind::Refused => Err(ClientError::Refused(frame.text())),
        _ => Ok(frame),
    }
}

fn broken(error: io::Error) -> ClientError {
    match error.kind() {
        io::ErrorKind::InvalidData => ClientError::Protocol(error.to_string()),
        _ => ClientError::Io(error),
    }
}

fn gone() -> ClientError {
    ClientError::Io(io::ErrorKind::UnexpectedEof.into())
}
