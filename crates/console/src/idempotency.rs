//! Requests with an `Idempotency-Key`: a repeated request gets the first response, from any process of the
//! API.

use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Extension, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use registry::idempotency::{ID_BYTES_MAX, InProgress, KeyedRequest, Lookup, RequestRecords};
use registry::vms::{self, State as VmState};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use utoipa::openapi::path::{ParameterBuilder, ParameterIn};
use utoipa::openapi::{self, ObjectBuilder, OpenApi, Required, Type};

use crate::api::{Result, blocking, folder};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::request_body::json_bytes;
use crate::views::Vm;

/// The client's id of a request.
const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Header that marks a replayed response.
const REPEATED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Maximum bytes of a response held in memory.
const ANSWER_BYTES_MAX: usize = 8 << 20;
/// Time limit for a VM to end after its starter ended without detaching it.
const END_LIMIT: Duration = Duration::from_secs(2);
/// Statuses of requests that had no effect and may succeed later.
const NOT_CARRIED_OUT: [StatusCode; 2] = [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT];

/// A stored response.
#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    status: u16,
    kind: Option<String>,
    body: String,
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut head = HeaderMap::new();
        head.insert(REPEATED, HeaderValue::from_static("true"));
        if let Some(kind) = self.kind.and_then(|kind| kind.parse().ok()) {
            head.insert(header::CONTENT_TYPE, kind);
        }
        (status, head, self.body).into_response()
    }
}

/// Carries a request with a key out once, and replays the first response to a repeated one.
pub(crate) async fn once(Extension(caller): Extension<Caller>, request: Request, next: Next) -> Response {
    let key = match key(&request) {
        Ok(Some(key)) => key,
        Ok(None) => return next.run(request).await,
        Err(problem) => return problem.into_response(),
    };
    let (parts, body) = request.into_parts();
    let body = match json_bytes(body).await {
        Ok(body) => body,
        Err(problem) => return problem.into_response(),
    };
    // Continues if the client disconnects, so that a request that is carried out has a result.
    let carried_out = tokio::spawn(carry_out(
        caller,
        key,
        Request::from_parts(parts, Body::empty()),
        body,
        next,
    ));
    match carried_out.await {
        Ok(Ok(response)) => response,
        Ok(Err(problem)) => problem.into_response(),
        Err(error) => Problem::internal(error).into_response(),
    }
}

/// Adds the key and its responses to each mutating request of the document.
pub(crate) fn describe(document: &mut OpenApi) {
    for (path, item) in &mut document.paths.paths {
        let operations = [&mut item.post, &mut item.put, &mut item.patch];
        for operation in operations.into_iter().flatten() {
            let text = "More requests of this user are under way, or have a key, than one user may have.";
            let responses = &mut operation.responses.responses;
            responses
                .entry("429".to_owned())
                .or_insert_with(|| openapi::Response::new(text).into());
            if is_of_files(path) {
                continue;
            }
            let parameter = ParameterBuilder::new()
                .name("Idempotency-Key")
                .parameter_in(ParameterIn::Header)
                .required(Required::False)
                .description(Some(
                    "The client's id of this request: made again within 10 minutes, it gets the first answer \
                     and has no second effect.",
                ))
                .schema(Some(ObjectBuilder::new().schema_type(Type::String)))
                .build();
            operation.parameters.get_or_insert_default().push(parameter);
        }
    }
}

/// Returns the key of a mutating request.
fn key(request: &Request) -> Result<Option<String>> {
    let Some(key) = request.headers().get(&KEY) else {
        return Ok(None);
    };
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(None);
    }
    if is_of_files(request.uri().path()) {
        return Err(Problem::bad_request(
            "a file is the same when it is copied again; leave out Idempotency-Key",
        ));
    }
    let key = key.to_str().unwrap_or_default();
    if key.is_empty() || key.len() > ID_BYTES_MAX {
        return Err(Problem::bad_request(format!(
            "Idempotency-Key has 1 to {ID_BYTES_MAX} printable characters"
        )));
    }
    Ok(Some(key.to_owned()))
}

/// Whether a path, or its template, is that of a VM's files: `/v1/vms/NAME/files`.
fn is_of_files(path: &str) -> bool {
    let name = path
        .strip_prefix("/v1/vms/")
        .and_then(|rest| rest.strip_suffix("/files"));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

async fn carry_out(
    caller: Caller,
    key: String,
    mut request: Request,
    body: Bytes,
    next: Next,
) -> Result<Response> {
    let what = format!("{} {}", request.method(), request.uri());
    let is_start = *request.method() == Method::POST && request.uri().path() == "/v1/vms";
    let content = [what.as_bytes(), b"\n", &body].concat();
    let id = key.clone();
    let known = blocking(move || {
        let request = KeyedRequest {
            uid: caller.uid(),
            id: &id,
            content: &content,
        };
        let known = RequestRecords::open().and_then(|requests| requests.begin(request));
        known.map_err(Problem::internal)
    });
    match known.await? {
        Lookup::New(in_progress) => {
            *request.body_mut() = Body::from(body);
            keep(in_progress, next.run(request).await).await
        }
        Lookup::Done(Some(answer)) => {
            let answer: Answer = serde_json::from_value(answer).map_err(Problem::internal)?;
            Ok(answer.into_response())
        }
        Lookup::Done(None) => Err(conflict(
            "the request with this key was carried out, and its answer was too long to be kept; use another \
             key",
        )),
        Lookup::InProgress => Err(conflict(
            "the request with this key is under way; ask again in a second for its answer",
        )),
        Lookup::Lost(came_unix_s) => match started(caller, is_start, &body, came_unix_s).await {
            Some(vm) => Ok((StatusCode::CREATED, [(REPEATED, "true")], axum::Json(vm)).into_response()),
            None => Err(conflict(
                "the process that carried out the request with this key ended before its answer; see whether \
                 it took effect, and use another key to make it again",
            )),
        },
        Lookup::Different => Err(Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "this key is that of another request; use another key",
        )),
        Lookup::Full => Err(Problem::new(
            StatusCode::TOO_MANY_REQUESTS,
            "this user has made too many requests with keys in ten minutes; wait, or leave out \
             Idempotency-Key",
        )),
    }
}

fn conflict(detail: &str) -> Problem {
    Problem::new(StatusCode::CONFLICT, detail)
}

/// Stores a response, and returns it.
async fn keep(in_progress: InProgress, response: Response) -> Result<Response> {
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, ANSWER_BYTES_MAX)
        .await
        .map_err(Problem::internal)?;
    let kind = parts.headers.get(header::CONTENT_TYPE);
    let answer = Answer {
        status: parts.status.as_u16(),
        kind: kind.and_then(|kind| kind.to_str().ok()).map(str::to_owned),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    let is_carried_out = !NOT_CARRIED_OUT.contains(&parts.status);
    blocking(move || {
        let kept = if is_carried_out {
            serde_json::to_value(answer)
                .map_err(std::io::Error::from)
                .and_then(|answer| in_progress.end(answer))
        } else {
            in_progress.abandon()
        };
        // Without its record, a repeated request reports the first as lost, although it was carried out.
        if let Err(error) = kept {
            tracing::warn!("an answer can't be kept: {error}");
        }
        Ok(())
    })
    .await?;
    Ok(Response::from_parts(parts, Body::from(body)))
}

/// Returns the VM that a lost request of the caller's has started, if `is_start` and the VM still runs.
async fn started(caller: Caller, is_start: bool, body: &[u8], came_unix_s: u64) -> Option<Vm> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    if !is_start {
        return None;
    }
    let Named { name } = serde_json::from_slice(body).ok()?;
    // A VM that its starter did not detach ends with it.
    sleep(END_LIMIT).await;
    let vm = blocking(move || {
        let record = vms::read(&folder(&name)?).map_err(Problem::internal)?;
        let is_callers = match caller {
            Caller::Owner(_) => record.member.is_none(),
            Caller::Member(uid) => record.member == uid,
        };
        let is_new = record.started_unix_s >= came_unix_s;
        let is_it = matches!(record.state, VmState::Running) && is_callers && is_new;
        Ok(is_it.then(|| Vm::from(&record)))
    });
    vm.await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_refused_for_the_files_of_a_vm_only() {
        let key = |method: Method, path: &str| {
            let request = Request::builder().method(method).uri(path).header(KEY, "k");
            super::key(&request.body(Body::empty()).unwrap())
        };
        assert!(key(Method::PUT, "/v1/vms/web/files?path=/etc/hosts").is_err());
        assert!(is_of_files("/v1/vms/{name}/files"));
        // A VM may have this name.
        for path in ["/v1/vms/files", "/v1/cells/files", "/v1/vms/a/b/files"] {
            assert_eq!(key(Method::PATCH, path).unwrap().as_deref(), Some("k"), "{path}");
        }
        assert_eq!(key(Method::GET, "/v1/vms/web/files").unwrap(), None);
    }
}
