//! A request to a cell's guard, and its answer: a line of JSON each, over the guard's socket. The request brings the new program's
//! descriptor, so that what the client has checked is what runs.

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

/// How long a guard may take: longer than a trial.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// A client's request to a guard.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum GuardRequest {
    /// End the cell's process, and start the next ones by this program. Answered when its first process has adopted the cell's VMs, or
    /// has failed and the former program runs again.
    Upgrade {
        /// The open program.
        program: Fd,
    },
}

/// The answer to a [`GuardRequest`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum GuardResponse {
    /// The new program runs.
    Done,
    /// The former program runs on, or again.
    Refused {
        /// The reason and the help.
        why: String,
    },
}

/// Has the guard of a cell start the cell's processes by `program` from now on.
///
/// # Errors
/// If the guard can't be reached, does not answer within a minute, or goes on with the former program; with the reason.
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
