//! The bytes of a VM's console.

use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use registry::console::{FOLLOW, JOIN, LOG};
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::IntoParams;

use super::{Target, query};
use crate::api::{Context, Result, blocking};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::slots::Slot;

/// Time limit for all buffered bytes.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Maximum bytes read; a console buffers at most 1 MiB.
const KEPT_BYTES_MAX: u64 = 2 << 20;
/// Bytes per chunk to a client.
const CHUNK_BYTES: usize = 16 << 10;
/// Queue length in chunks for a slow client.
const WAITING_MAX: usize = 4;
/// Maximum time in which a following client reads no byte.
const STALL_MAX: Duration = Duration::from_secs(30);
/// Pause before rejoining a console whose monitor has died.
const REJOIN_PAUSE: Duration = Duration::from_millis(50);

/// Parameters of the query.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Words {
    /// Number of bytes from the end; all that are buffered, 1 MiB at most, when absent.
    #[param(value_type = Option<u64>)]
    bytes: Option<String>,
    /// `true`: all that are buffered, and then further output until the VM has ended.
    #[param(value_type = Option<bool>)]
    follow: Option<String>,
}

/// The last bytes of a VM's console, and further output.
#[utoipa::path(get, path = "/v1/vms/{name}/logs", params(("name" = String, Path), Words), responses(
    (status = 200, content_type = "application/octet-stream", body = Vec<u8>), (status = 400, body = Problem),
    (status = 403, body = Problem), (status = 404, body = Problem), (status = 429, body = Problem)))]
pub(crate) async fn logs(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response> {
    let (bytes, follow) = wanted(&query(&uri)?)?;
    let slot = context.slots.take(caller)?;
    let target = blocking(move || Target::of_caller(&name, caller, &context)).await?;
    let mode = if follow { FOLLOW } else { LOG };
    let mut console = match timeout(ANSWER_LIMIT, join(&target, mode)).await {
        Ok(joined) => joined?,
        Err(_) => return Err(late(&target)),
    };
    let body = if follow {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        tokio::spawn(pump(target, console, sender, slot));
        Body::from_stream(ReceiverStream::new(receiver))
    } else {
        let mut kept = Vec::new();
        let mut console = AsyncReadExt::take(&mut console, KEPT_BYTES_MAX);
        match timeout(ANSWER_LIMIT, console.read_to_end(&mut kept)).await {
            Ok(read) => read.map_err(Problem::internal)?,
            Err(_) => return Err(late(&target)),
        };
        let first = kept.len().saturating_sub(bytes.unwrap_or(usize::MAX));
        Body::from(Bytes::from(kept).slice(first..))
    };
    let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((kind, body).into_response())
}

/// Returns the number of bytes, and whether to follow.
fn wanted(words: &Words) -> Result<(Option<usize>, bool)> {
    let follow = match words.follow.as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(Problem::bad_request("follow is `true` or `false`")),
    };
    let bytes = words.bytes.as_deref().map(str::parse).transpose();
    let bytes = bytes.map_err(|_| Problem::bad_request("bytes is a number"))?;
    if follow && bytes.is_some() {
        return Err(Problem::bad_request(
            "bytes and follow exclude one another; leave one out",
        ));
    }
    Ok((bytes, follow))
}

/// Joins the console of the VM, and of no later VM of its name.
async fn join(target: &Target, mode: u8) -> Result<UnixStream> {
    let mut console = UnixStream::connect(target.folder.join("console.sock"))
        .await
        .map_err(|error| {
            let why = format!("{}: its console is not there: {error}; try again", target.name);
            Problem::new(StatusCode::CONFLICT, why)
        })?;
    let asked = target.clone();
    if !blocking(move || Ok(asked.is_there())).await? {
        return Err(target.gone());
    }
    console.write_all(&[mode]).await.map_err(Problem::internal)?;
    Ok(console)
}

fn late(target: &Target) -> Problem {
    let why = format!(
        "{}: its console does not answer for {} s; try again",
        target.name,
        ANSWER_LIMIT.as_secs()
    );
    Problem::new(StatusCode::GATEWAY_TIMEOUT, why)
}

/// Copies a console to a client until the VM has ended or the client stops reading.
async fn pump(
    target: Target,
    mut console: UnixStream,
    client: mpsc::Sender<std::result::Result<Bytes, Infallible>>,
    _slot: Slot,
) {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let count = tokio::select! {
            read = console.read(&mut buffer) => read.unwrap_or(0),
            () = client.closed() => return,
        };
        if count > 0 {
            let chunk = Bytes::copy_from_slice(&buffer[..count]);
            match timeout(STALL_MAX, client.send(Ok(chunk))).await {
                Ok(Ok(())) => continue,
                Ok(Err(_)) | Err(_) => return,
            }
        }
        // The monitor is gone. A running VM gets another one soon.
        tokio::time::sleep(REJOIN_PAUSE).await;
        match timeout(ANSWER_LIMIT, join(&target, JOIN)).await {
            Ok(Ok(next)) => console = next,
            Ok(Err(_)) | Err(_) => return,
        }
    }
}
