//! Waits for a VM.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::{Extension, Json};
use operations::guest::await_agent;
use registry::control::{self, Answer, ask};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Target, deadline};
use crate::api::{Context, Result};
use crate::caller::Caller;
use crate::problem::Problem;
use crate::request_body::body;
use crate::slots::{ClientPresence, run_in_slot};

/// Longest single request to a VM. Between two requests, the client's presence is checked.
const SLICE: Duration = Duration::from_secs(1);

/// A state to wait for, with a time limit.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Wait {
    /// State to wait for.
    #[serde(rename = "for")]
    pub awaited: Awaited,
    /// Seconds to wait, 3600 at most.
    pub limit_s: u64,
}

impl Default for Wait {
    fn default() -> Self {
        Self {
            awaited: Awaited::End,
            limit_s: 30,
        }
    }
}

/// A state of a VM.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Awaited {
    /// The VM has ended.
    End,
    /// The VM's vCPUs run.
    Running,
    /// The agent in its guest answers.
    Agent,
}

/// Outcome of a wait.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Waited {
    /// Whether the state was reached within the limit.
    pub reached: bool,
}

/// Waits until a VM has ended, its vCPUs run, or the agent in its guest answers.
#[utoipa::path(post, path = "/v1/vms/{name}/wait", params(("name" = String, Path)), request_body = Wait,
    responses(
    (status = 200, body = Waited), (status = 404, body = Problem),
    (status = 409, body = Problem, description = "It ended before it ran or its agent answered."),
    (status = 429, body = Problem)))]
pub(crate) async fn wait(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<Json<Waited>> {
    let Wait { awaited, limit_s } = body(request).await?;
    let deadline = deadline(limit_s)?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |presence| {
        let target = Target::find(&name)?;
        loop {
            if let Some(reached) = poll(&target, awaited, deadline, presence)? {
                return Ok(Json(Waited { reached }));
            }
            if Instant::now() >= deadline || !presence.is_connected() {
                return Ok(Json(Waited { reached: false }));
            }
        }
    })
    .await
}

/// Waits for one slice; returns none if the wait is to continue.
fn poll(
    target: &Target,
    awaited: Awaited,
    deadline: Instant,
    presence: &ClientPresence,
) -> Result<Option<bool>> {
    if !target.is_there() {
        return match awaited {
            Awaited::End => Ok(Some(true)),
            Awaited::Running | Awaited::Agent => Err(target.gone()),
        };
    }
    let left = deadline.saturating_duration_since(Instant::now());
    // The VM gets whole seconds; the rest of the last one is added.
    let limit_s = u64::from(left >= SLICE);
    let request = match awaited {
        Awaited::Agent => {
            let goes_on = || presence.is_connected() && target.is_there();
            return match await_agent(&target.folder, left, &goes_on) {
                _ if !target.is_there() => Err(target.gone()),
                Some(true) => Ok(Some(true)),
                Some(false) => Err(target.gone()),
                None => Ok(None),
            };
        }
        Awaited::End => control::Request::AwaitEnd { limit_s },
        Awaited::Running => control::Request::AwaitRunning { limit_s },
    };
    let Ok(answer) = ask(&target.folder, &request, Some(SLICE * 10)) else {
        // Its monitor has died, and the next one does not reply yet.
        std::thread::sleep(left.min(SLICE / 10));
        return Ok(None);
    };
    match (awaited, answer) {
        (_, Answer::TimedOut) if limit_s > 0 => Ok(None),
        (_, Answer::TimedOut) => {
            std::thread::sleep(left.min(SLICE / 10));
            Ok(None)
        }
        (Awaited::End, Answer::Ended { .. }) => Ok(Some(true)),
        (_, Answer::Ended { .. }) => Err(target.gone()),
        (_, Answer::Refused { why }) => Err(Problem::new(
            axum::http::StatusCode::CONFLICT,
            format!("{}: {why}", target.name),
        )),
        _ => Ok(Some(true)),
    }
}
