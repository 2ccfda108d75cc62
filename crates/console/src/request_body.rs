//! Reads request bodies of bounded length within a time limit.

use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::api::Result;
use crate::problem::Problem;

/// Maximum bytes of a request's body.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Time limit for a client to send a JSON body.
const BODY_LIMIT: Duration = Duration::from_secs(30);

/// Reads a JSON body. An empty one stands for `{}`.
pub(crate) async fn body<T: DeserializeOwned>(request: Request<Body>) -> Result<T> {
    let kind = request.headers().get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| {
        !kind
            .to_str()
            .is_ok_and(|kind| kind.starts_with("application/json"))
    }) {
        return Err(Problem::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "send the body as application/json",
        ));
    }
    let bytes = json_bytes(request.into_body()).await?;
    let bytes = if bytes.is_empty() { &b"{}"[..] } else { &bytes[..] };
    serde_json::from_slice(bytes).map_err(|error| Problem::bad_request(format!("the body: {error}")))
}

/// Reads a body of bounded length within the time limit.
pub(crate) async fn json_bytes(body: Body) -> Result<Bytes> {
    let bytes = timeout(BODY_LIMIT, to_bytes(body, BODY_BYTES_MAX));
    let bytes = bytes.await.map_err(|_| {
        let detail = format!("the body did not come within {} s", BODY_LIMIT.as_secs());
        Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
    })?;
    bytes.map_err(|_| {
        let detail = format!("the body is incomplete or longer than {BODY_BYTES_MAX} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    })
}
