//! The guest's side of the protocol: serves one connection.
//!
//! A connection holds at most one frame of the client's bytes and one of the program's output, whatever
//! either does. If the client disconnects, its program is ended, unless it is [kept](kept).

pub mod affinity;
mod disks;
mod exec;
mod file;
mod identity;
mod kept;
mod renewal;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};
use std::{fmt, io};

use crate::client::Stream;
use crate::protocol::{ExecRequest, Kind, Ready, Request};
use crate::wire::{PEER_TIMEOUT, Received, Wire};

/// Serves the one request of `stream`. Returns when it is complete or the client is gone.
pub fn serve(stream: impl Stream) -> io::Result<()> {
    let mut wire = Wire::new(&stream)?;
    // The connection of a kept program ends before the program does.
    drop(stream);
    match first(&mut wire)? {
        Some(Request::ExecKept { id, program }) => exec::serve_kept(wire, &id, &program),
        Some(Request::Attach { id }) => kept::attach(wire, &id),
        Some(request) => handle(&mut wire, request),
        None => Ok(()),
    }
}

/// Works as [`serve`], but runs only programs that `check` accepts; `check` may change the request.
pub fn serve_programs<E: fmt::Display>(
    stream: impl Stream,
    check: impl FnOnce(&mut ExecRequest) -> Result<(), E>,
) -> io::Result<()> {
    let mut wire = Wire::new(&stream)?;
    match first(&mut wire)? {
        Some(Request::Exec(mut request)) => match check(&mut request) {
            Ok(()) => handle(&mut wire, Request::Exec(request)),
            Err(why) => refuse(&mut wire, &why.to_string()),
        },
        Some(_) => refuse(&mut wire, "only programs are run here"),
        None => Ok(()),
    }
}

/// Receives the request; returns none if it is invalid, or the client sends none.
fn first(wire: &mut Wire) -> io::Result<Option<Request>> {
    let Some(first) = wire.wait_frame(Some(Instant::now() + PEER_TIMEOUT))? else {
        return Ok(None);
    };
    match (first.kind, first.json::<Request>()) {
        (Kind::Request, Ok(request)) => Ok(Some(request)),
        _ => refuse(wire, "this agent does not know that request").map(|()| None),
    }
}

fn handle(wire: &mut Wire, request: Request) -> io::Result<()> {
    match request {
        Request::Ping => ready(wire)?,
        Request::Exec(request) => exec::serve(wire, &request)?,
        // The caller has served them.
        Request::ExecKept { .. } | Request::Attach { .. } => return Err(io::ErrorKind::InvalidInput.into()),
        Request::Put { path, name, mode } => file::receive(wire, &path, &name, mode)?,
        Request::Get { path } => file::send(wire, &path)?,
        Request::Identify(identity) => match identity::assume(&identity) {
            Ok(()) => ready(wire)?,
            Err(error) => return refuse(wire, &error.to_string()),
        },
        Request::IsUp => match renewal::is_up() {
            Ok(is_up) => wire.send_json(
                Kind::Ready,
                &Ready {
                    is_up: Some(is_up),
                    ..accepted()
                },
            )?,
            Err(error) => return refuse(wire, &format!("systemctl: {error}")),
        },
        Request::Renew(renewal) => match renewal::renew(&renewal) {
            Ok(()) => ready(wire)?,
            Err(error) => return refuse(wire, &error.to_string()),
        },
    }
    linger(wire);
    Ok(())
}

fn ready(wire: &Wire) -> io::Result<()> {
    ready_to_send(wire, None, None)
}

/// Accepts to send a file of this size and with these permission bits.
fn ready_to_send(wire: &Wire, size: Option<u64>, mode: Option<u32>) -> io::Result<()> {
    wire.send_json(
        Kind::Ready,
        &Ready {
            size,
            mode,
            ..accepted()
        },
    )
}

/// The reply to a request that has no data of its own.
fn accepted() -> Ready {
    Ready {
        version: crate::VERSION.into(),
        size: None,
        mode: None,
        attached: None,
        is_up: None,
    }
}

/// Sends the reason of a refusal to the client, which ends the request.
fn refuse(wire: &mut Wire, reason: &str) -> io::Result<()> {
    let reason: String = reason.chars().take(1000).collect();
    wire.send_frame(Kind::Refused, reason.as_bytes(), Some(PEER_TIMEOUT))?;
    linger(wire);
    Ok(())
}

/// Lets the client read the sent bytes: closing a TCP socket with unread input would discard them.
fn linger(wire: &mut Wire) {
    wire.finish();
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        match wire.discard(deadline) {
            Ok(Received::Closed) | Err(_) => return,
            Ok(_) => {}
        }
    }
}
