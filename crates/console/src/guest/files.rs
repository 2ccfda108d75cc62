//! Copies files from and to a guest as streams, with only a part in memory.

use std::io::{self, Read};
use std::path::Path as FilePath;
use std::time::{Duration, Instant};

use agent::client::{GuestFile, Place, put_all};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use operations::guest::explain;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::{IntoParams, ToSchema};

use super::{Target, query};
use crate::api::{Context, Result};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::slots::run_in_slot;

/// Time limit for an agent to reply, the boot of its guest included.
const AGENT_LIMIT: Duration = Duration::from_secs(600);
/// Maximum time in which a client transfers no byte.
const STALL_MAX: Duration = Duration::from_secs(120);
/// Queue length in parts for the slower side.
const WAITING_MAX: usize = 4;
/// Permission bits of a new file.
const MODE: u32 = 0o644;
/// Permission bits of the file in the guest.
const MODE_HEADER: HeaderName = HeaderName::from_static("mirrorball-mode");

/// Parameters of the query.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Words {
    /// The file's absolute path in the guest.
    path: String,
    /// PUT: the permission bits, in octal digits; 644 when absent.
    mode: Option<String>,
}

/// A file that a guest has received.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Received {
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal digits, which the guest has computed too.
    pub sha256: String,
}

fn words(uri: &Uri) -> Result<Words> {
    let words: Words = query(uri)?;
    if !FilePath::new(&words.path).is_absolute() || words.path.ends_with('/') {
        return Err(Problem::bad_request(
            "path is the absolute path of a file in the guest",
        ));
    }
    Ok(words)
}

/// A file out of a VM. The stream breaks off if the file's SHA-256 differs from the guest's.
#[utoipa::path(get, path = "/v1/vms/{name}/files", params(("name" = String, Path), Words), responses(
    (status = 200, content_type = "application/octet-stream", body = Vec<u8>,
     headers(("mirrorball-mode" = String,
        description = "The permission bits in the guest, in octal digits."))),
    (status = 400, body = Problem), (status = 403, body = Problem), (status = 404, body = Problem),
    (status = 409, body = Problem, description = "The VM is paused or has ended, or there is no such file."),
    (status = 429, body = Problem),
    (status = 504, body = Problem, description = "No agent answers in the guest.")))]
pub(crate) async fn get_file(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response> {
    let words = words(&uri)?;
    if words.mode.is_some() {
        return Err(Problem::bad_request("mode is for PUT; leave it out"));
    }
    let slot = context.slots.take(caller)?;
    let (opened, mode) = oneshot::channel::<Result<u32>>();
    let (parts, receiver) = mpsc::channel::<io::Result<Bytes>>(WAITING_MAX);
    tokio::task::spawn_blocking(move || {
        let _slot = slot;
        let begun = Instant::now();
        let goes_on = || !opened.is_closed() && begun.elapsed() < AGENT_LIMIT;
        let source = Target::of_caller(&name, caller, &context)
            .and_then(|target| target.agent(&goes_on))
            .and_then(
                |agent| Ok(GuestFile::open(agent, &words.path).map_err(|error| explain(&name, error))?),
            );
        let source = match source {
            Ok(source) => source,
            Err(problem) => return drop(opened.send(Err(problem))),
        };
        if opened.send(Ok(source.mode())).is_err() {
            return;
        }
        let send = |part: io::Result<Bytes>| {
            let sent = Handle::current().block_on(timeout(STALL_MAX, parts.send(part)));
            match sent {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => Err(io::ErrorKind::BrokenPipe.into()),
                Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut)),
            }
        };
        let received = source.receive(u64::MAX, &mut |data| send(Ok(Bytes::copy_from_slice(data))));
        if let Err(error) = received {
            // The body is left unterminated, which the client detects.
            let _ = send(Err(io::Error::other(error)));
        }
    });
    let mode = mode.await.map_err(Problem::internal)??;
    let head = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (MODE_HEADER, format!("{mode:o}")),
    ];
    Ok((head, Body::from_stream(ReceiverStream::new(receiver))).into_response())
}

/// A part of a body.
enum Part {
    Data(Bytes),
    End,
}

/// Body of a request, read in a thread. Without an [`Part::End`] the client has disconnected, and the file is
/// incomplete.
struct Upload {
    parts: mpsc::Receiver<Part>,
    rest: Bytes,
    is_over: bool,
}

impl Read for Upload {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() && !self.is_over {
            match self.parts.blocking_recv() {
                Some(Part::Data(bytes)) => self.rest = bytes,
                Some(Part::End) => self.is_over = true,
                None => return Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
        let count = buffer.len().min(self.rest.len());
        buffer[..count].copy_from_slice(&self.rest.split_to(count));
        Ok(count)
    }
}

/// Copies the body into a file of a VM, which appears whole or not at all.
#[utoipa::path(put, path = "/v1/vms/{name}/files", params(("name" = String, Path), Words),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, body = Received), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem),
    (status = 409, body = Problem,
        description = "The VM is paused or has ended, or the file can't be written."),
    (status = 429, body = Problem),
    (status = 504, body = Problem, description = "No agent answers in the guest.")))]
pub(crate) async fn put_file(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    uri: Uri,
    request: Request<Body>,
) -> Result<Json<Received>> {
    let words = words(&uri)?;
    let mode = match &words.mode {
        None => MODE,
        Some(digits) => u32::from_str_radix(digits, 8)
            .ok()
            .filter(|mode| *mode <= 0o7777)
            .ok_or_else(|| Problem::bad_request("mode is up to four octal digits, as 644"))?,
    };
    let slot = context.slots.take(caller)?;
    let (sender, parts) = mpsc::channel(WAITING_MAX);
    let copied = run_in_slot(slot, move |presence| {
        let begun = Instant::now();
        let target = Target::of_caller(&name, caller, &context)?;
        let agent = target.agent(&|| presence.is_connected() && begun.elapsed() < AGENT_LIMIT)?;
        let mut upload = Upload {
            parts,
            rest: Bytes::new(),
            is_over: false,
        };
        let place = Place {
            path: &words.path,
            name: "",
            mode,
        };
        let sent = put_all(agent, &mut upload, place, &mut |_| {}).map_err(|error| explain(&name, error))?;
        Ok(Json(Received {
            bytes: sent.bytes,
            sha256: sent.sha256,
        }))
    });
    let mut body = request.into_body().into_data_stream();
    let feed = async move {
        loop {
            let part = match timeout(STALL_MAX, body.next()).await {
                Ok(Some(Ok(bytes))) => Part::Data(bytes),
                Ok(None) => Part::End,
                // The client has disconnected or stalled: the thread receives no end.
                Ok(Some(Err(_))) | Err(_) => return,
            };
            let is_end = matches!(part, Part::End);
            if sender.send(part).await.is_err() || is_end {
                return;
            }
        }
    };
    let mut copied = std::pin::pin!(copied);
    // A copy that fails early does not wait for the rest of the body.
    tokio::select! {
        result = &mut copied => return result,
        () = feed => {}
    }
    copied.await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload(parts: Vec<Part>) -> Upload {
        let (sender, receiver) = mpsc::channel(parts.len().max(1));
        for part in parts {
            assert!(sender.try_send(part).is_ok());
        }
        Upload {
            parts: receiver,
            rest: Bytes::new(),
            is_over: false,
        }
    }

    #[test]
    fn body_without_its_end_is_an_error_and_no_shorter_file() {
        let data = || Part::Data(Bytes::from_static(b"part "));
        let mut text = String::new();
        let mut whole = upload(vec![data(), Part::Data(Bytes::new()), data(), Part::End]);
        whole.read_to_string(&mut text).unwrap();
        assert_eq!(text, "part part ");
        let broken = upload(vec![data()]).read_to_end(&mut Vec::new()).unwrap_err();
        assert_eq!(broken.kind(), io::ErrorKind::ConnectionReset);
    }
}
