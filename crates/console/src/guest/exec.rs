//! Runs a program in a guest.

use std::collections::BTreeMap;
use std::time::Instant;

use agent::client::{Bounds, collect};
use agent::protocol::{ExecRequest, ExitStatus};
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::{Extension, Json};
use data_encoding::BASE64;
use operations::guest::explain;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Target, deadline};
use crate::api::{Context, Result};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::request_body::body;
use crate::slots::run_in_slot;

/// Maximum bytes kept of standard output and of standard error, each.
const OUTPUT_BYTES_MAX: usize = 1 << 20;

/// A program to run in a guest.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    /// The program (looked for on PATH if it has no slash) and its arguments.
    pub argv: Vec<String>,
    /// Variables to add to the agent's environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The working directory; the root directory when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// The standard input, as base64.
    #[serde(default)]
    pub stdin: String,
    /// Seconds until the program is ended, the wait for a guest that still boots included; 3600 at most.
    #[serde(default = "limit_s")]
    pub limit_s: u64,
}

fn limit_s() -> u64 {
    60
}

/// Outcome of a program.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Executed {
    /// The exit status, 128 plus the signal of a program that was killed by one; none if it was ended at the
    /// limit.
    pub status: Option<u8>,
    /// The signal that killed it.
    pub signal: Option<u8>,
    /// Whether it was ended at the limit.
    pub timed_out: bool,
    /// The first MiB of its standard output, as base64.
    pub stdout: String,
    /// The first MiB of its standard errors, as base64.
    pub stderr: String,
    /// Whether it wrote more than that to one of the two.
    pub truncated: bool,
}

/// Runs a program in a VM by its agent. Waits for a guest that still boots.
#[utoipa::path(post, path = "/v1/vms/{name}/exec", params(("name" = String, Path)), request_body = Exec,
    responses(
    (status = 200, body = Executed), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem),
    (status = 409, body = Problem,
        description = "The VM is paused or has ended, or there is no such program."),
    (status = 429, body = Problem),
    (status = 504, body = Problem, description = "No agent answers in the guest.")))]
pub(crate) async fn exec(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<Json<Executed>> {
    let Exec {
        argv,
        env,
        cwd,
        stdin,
        limit_s,
    } = body(request).await?;
    if argv.is_empty() {
        return Err(Problem::bad_request("argv is empty; name a program"));
    }
    let deadline = deadline(limit_s)?;
    let input = BASE64
        .decode(stdin.as_bytes())
        .map_err(|error| Problem::bad_request(format!("stdin: {error}; write it as base64")))?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |presence| {
        let target = Target::of_caller(&name, caller, &context)?;
        let agent = target.agent(&|| presence.is_connected() && Instant::now() < deadline)?;
        let request = ExecRequest {
            argv,
            env: env.into_iter().collect(),
            cwd,
            tty: None,
        };
        let bounds = Bounds {
            output_bytes: OUTPUT_BYTES_MAX,
            deadline,
            goes_on: &|| presence.is_connected(),
        };
        let output = collect(agent, &request, &input, &bounds).map_err(|error| explain(&name, error))?;
        Ok(Json(Executed {
            status: output.status.map(ExitStatus::code),
            signal: match output.status {
                Some(ExitStatus::Signal(signal)) => Some(signal),
                Some(ExitStatus::Code(_)) | None => None,
            },
            timed_out: output.status.is_none(),
            stdout: BASE64.encode(&output.stdout),
            stderr: BASE64.encode(&output.stderr),
            truncated: output.is_truncated,
        }))
    })
    .await
}
