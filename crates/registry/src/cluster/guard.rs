//! A request to a cell's guard, and its response: one line of JSON each, over the guard's socket. The request
//! carries the new program's descriptor, so the program that the client has checked is the one that runs.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shard_api::launch::Fd;
use shard_api::message::{receive, send};

use super::files::CellFiles;
use super::interface::OF_CLIENT;

/// Time limit for a guard's response: longer than a trial.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A client's request to a guard.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum GuardRequest {
    /// End the cell's process, and start the next ones from this program. The response comes when its first
    /// process has adopted the cell's VMs, or has failed and the former program runs again.
    Upgrade {
        /// Descriptor of the program.
        program: Fd,
    },
}

/// Response to a [`GuardRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum GuardResponse {
    /// The new program runs.
    Done,
    /// The former program still runs, or runs again.
    Refused {
        /// Reason and help.
        why: String,
    },
}

/// Has the guard of a cell start all further processes of the cell from `program`.
///
/// # Errors
/// If the guard is unreachable, does not reply within a minute, or keeps the former program; the error has
/// the reason.
pub fn upgrade(cell: &CellFiles, program: &File) -> io::Result<()> {
    let mut guard = UnixStream::connect(cell.guard_socket())?;
    guard.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    let ask = GuardRequest::Upgrade { program: Fd(0) };
    send(&mut guard, &OF_CLIENT.sent(&ask), &[program.as_fd()]).map_err(io::Error::other)?;
    match receive(&mut guard).map_err(io::Error::other)? {
        (GuardResponse::Done, _) => Ok(()),
        (GuardResponse::Refused { why }, _) => Err(io::Error::other(why)),
    }
}
