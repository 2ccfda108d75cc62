//! Orders to a running VM: its end, pauses, resets, and its share of the host.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, Uri};
use axum::{Extension, Json};
use registry::control::{self, Answer, VCPU_STOP_MS_MAX};
use registry::update::Update;
use serde::Deserialize;
use utoipa::IntoParams;

use super::{ANSWER_LIMIT, Context, Result, order};
use crate::caller::Caller;
use crate::guest;
use crate::problem::Problem;
use crate::request_body::body;
use crate::views::{Balloon, Limits, Stop, Stopped};

/// Time limit for a VM's memory to move to other host nodes.
const MEMORY_LIMIT: Duration = Duration::from_secs(630);
/// Time limit for a forced end: disks finish pending I/O, and resources are returned.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a reset VM to start again.
const RESET_LIMIT: Duration = Duration::from_secs(65);
/// Maximum time limit for a guest to power off.
const STOP_LIMIT_MAX_S: u64 = 3600;

/// Presses the power button, and kills the VM when it does not end in time. Answers when it has ended.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", params(("name" = String, Path)),
    request_body = Stop, responses(
    (status = 200, body = Stopped), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub(super) async fn stop_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<Json<Stopped>> {
    let stop: Stop = body(request).await?;
    if stop.limit_s > STOP_LIMIT_MAX_S {
        return Err(Problem::bad_request(format!(
            "limit_s is {}: {STOP_LIMIT_MAX_S} at most",
            stop.limit_s
        )));
    }
    let request = control::Request::Stop {
        limit_s: stop.limit_s,
    };
    let limit = END_LIMIT.saturating_add(Duration::from_secs(stop.limit_s));
    let killed = matches!(
        order((context, caller), name, request, limit).await?,
        Answer::Ended { killed: true }
    );
    Ok(Json(Stopped { killed }))
}

/// Ends a VM at once.
#[utoipa::path(post, path = "/v1/vms/{name}/kill", params(("name" = String, Path)), responses(
    (status = 200, body = Stopped), (status = 403, body = Problem), (status = 404, body = Problem)))]
pub(super) async fn kill_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<Json<Stopped>> {
    order((context, caller), name, control::Request::Kill, END_LIMIT).await?;
    Ok(Json(Stopped { killed: true }))
}

/// Query of a pause.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PauseWords {
    /// Only this vCPU. It goes on by itself.
    #[param(value_type = Option<u8>)]
    vcpu: Option<String>,
    /// Length of the vCPU's stop from now, in milliseconds: 1 to 100, and 100 when absent. A further request
    /// renews the stop.
    #[param(value_type = Option<u16>)]
    for_ms: Option<String>,
}

/// Query of a resume.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ResumeWords {
    /// Only this vCPU.
    #[param(value_type = Option<u8>)]
    vcpu: Option<String>,
}

fn vcpu_number(text: &str) -> Result<u8> {
    text.parse()
        .map_err(|_| Problem::bad_request("vcpu is a number from 0 to 255"))
}

fn pause_request(words: &PauseWords) -> Result<control::Request> {
    let vcpu = words.vcpu.as_deref().map(vcpu_number).transpose()?;
    let length = words.for_ms.as_deref().map(|text| {
        let length = text.parse().ok();
        let length = length.filter(|length| (1..=VCPU_STOP_MS_MAX).contains(length));
        let why = || Problem::bad_request(format!("for_ms is a number from 1 to {VCPU_STOP_MS_MAX}"));
        length.ok_or_else(why)
    });
    match (vcpu, length.transpose()?) {
        (Some(vcpu), length) => Ok(control::Request::PauseVcpu {
            vcpu,
            for_ms: length.unwrap_or(VCPU_STOP_MS_MAX),
        }),
        (None, None) => Ok(control::Request::Pause),
        (None, Some(_)) => Err(Problem::bad_request(
            "for_ms needs vcpu; a VM is paused until it is resumed",
        )),
    }
}

fn resume_request(words: &ResumeWords) -> Result<control::Request> {
    let vcpu = words.vcpu.as_deref().map(vcpu_number).transpose()?;
    Ok(
        vcpu.map_or(control::Request::Resume, |vcpu| control::Request::ResumeVcpu {
            vcpu,
        }),
    )
}

/// Has a VM stand still until it is resumed, or one of its vCPUs for a moment. Answers when it does.
#[utoipa::path(post, path = "/v1/vms/{name}/pause", params(("name" = String, Path), PauseWords), responses(
    (status = 204), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(super) async fn pause_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<StatusCode> {
    let request = pause_request(&guest::query(&uri)?)?;
    order((context, caller), name, request, ANSWER_LIMIT).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets a VM, or one of its vCPUs, go on that stands still.
#[utoipa::path(post, path = "/v1/vms/{name}/resume", params(("name" = String, Path), ResumeWords), responses(
    (status = 204), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(super) async fn resume_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<StatusCode> {
    let request = resume_request(&guest::query(&uri)?)?;
    order((context, caller), name, request, ANSWER_LIMIT).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a VM again, as by a machine's reset button: its guest is not asked. Answers when it starts.
#[utoipa::path(post, path = "/v1/vms/{name}/reset", params(("name" = String, Path)), responses(
    (status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
    (status = 409, body = Problem)))]
pub(super) async fn reset_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    order((context, caller), name, control::Request::Reset, RESET_LIMIT).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sends each vCPU of a VM a non-maskable interrupt.
#[utoipa::path(post, path = "/v1/vms/{name}/nmi", params(("name" = String, Path)), responses(
    (status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
    (status = 409, body = Problem)))]
pub(super) async fn send_nmi(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    order((context, caller), name, control::Request::Nmi, ANSWER_LIMIT).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Changes what a VM uses of its host: a limit that is absent stays, one that is null is taken away.
#[utoipa::path(patch, path = "/v1/vms/{name}", params(("name" = String, Path)),
    request_body = Limits, responses(
    (status = 204), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem),
    (status = 409, body = Problem)))]
pub(super) async fn update_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<StatusCode> {
    let update: Update = body(request).await?;
    if update.is_empty() {
        return Err(Problem::bad_request(
            "nothing is to change; name one of cpu_weight, cpu_limit, cpu_reservation, memory_limit, \
             resident, pins, memory_nodes and disks",
        ));
    }
    if caller.policy(&context.rights)?.is_some() {
        return Err(Problem::new(
            StatusCode::FORBIDDEN,
            "what VMs use of the host is the owner's to change",
        ));
    }
    // Moving memory takes longer.
    let limit = if update.memory_nodes.is_some() {
        MEMORY_LIMIT
    } else {
        ANSWER_LIMIT
    };
    let request = control::Request::Update(update);
    order((context, caller), name, request, limit).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sets what a VM's balloon takes.
#[utoipa::path(put, path = "/v1/vms/{name}/balloon", params(("name" = String, Path)),
    request_body = Balloon, responses(
    (status = 204), (status = 403, body = Problem), (status = 404, body = Problem),
    (status = 409, body = Problem)))]
pub(super) async fn set_balloon(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<StatusCode> {
    let Balloon { bytes } = body(request).await?;
    let request = control::Request::Balloon { bytes };
    order((context, caller), name, request, ANSWER_LIMIT).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_of_a_pause_names_a_vcpu_and_1_to_100_ms() {
        let request = |vcpu: Option<&str>, for_ms: Option<&str>| {
            let (vcpu, for_ms) = (vcpu.map(str::to_owned), for_ms.map(str::to_owned));
            pause_request(&PauseWords { vcpu, for_ms }).ok()
        };
        assert!(matches!(request(None, None), Some(control::Request::Pause)));
        for (for_ms, length) in [(None, 100), (Some("1"), 1), (Some("100"), 100)] {
            assert!(matches!(
                request(Some("3"), for_ms),
                Some(control::Request::PauseVcpu { vcpu: 3, for_ms }) if for_ms == length
            ));
        }
        for wrong in ["0", "101", "100ms", "-1", ""] {
            assert!(request(Some("3"), Some(wrong)).is_none(), "{wrong}");
        }
        assert!(request(None, Some("5")).is_none());
        assert!(request(Some("256"), None).is_none());
    }
}
