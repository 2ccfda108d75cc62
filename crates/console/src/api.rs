//! REST resources.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use config::settings::{MemberPolicy, ShareBetween, Usage};
use config::{ConfigError, HostFacts, VmSpec};
use locks::IgnorePoison;
use nix::unistd::geteuid;
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::control::{self, Answer, VCPU_STOP_MS_MAX, ask};
use registry::lease::Lease;
use registry::monitor::{Batch, Event};
use registry::update::Update;
use registry::vms::{self, BOOT_LIMIT_S, Record, Registry, RegistryError};
use serde::Deserialize;
use utoipa::{IntoParams, OpenApi};

use crate::caller::{Caller, MemberRights, recognize};
use crate::idempotency::once;
use crate::problem::Problem;
use crate::request_body::body;
use crate::slots::{Slots, run_in_slot};
use crate::trusted_path;
use crate::views::{Balloon, Cell, Limits, Stop, Stopped, Vm, VmDetails};
use crate::{copies, events, guest, host, idempotency, metrics};

/// Time limit for a VM to report its counters, or to carry out an immediate order.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for a VM's memory to move to other host nodes.
const MEMORY_LIMIT: Duration = Duration::from_secs(630);
/// Time limit until a VM's vCPUs run: its memory may have to be allocated first.
const START_LIMIT: Duration = Duration::from_secs(300);
/// Time limit for a forced end: disks finish pending I/O, and resources are returned.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a reset VM to start again.
const RESET_LIMIT: Duration = Duration::from_secs(65);
/// Time limit for a vCPU to move.
pub(crate) const MOVE_LIMIT: Duration = ANSWER_LIMIT;
/// Maximum time limit for a guest to power off.
const STOP_LIMIT_MAX_S: u64 = 3600;

/// Shared state of the handlers.
#[derive(Clone, Debug)]
pub struct Context {
    /// Program that starts VMs: `mirrorball`.
    pub(crate) program: Arc<PathBuf>,
    /// Rule that decides which VMs share pages with those started here.
    share_between: ShareBetween,
    /// Rights of the group's members.
    pub(crate) rights: Arc<MemberRights>,
    /// Held while a member's VM starts, so that simultaneous starts stay within the limits together.
    members_start: Arc<Mutex<()>>,
    /// Slots of long requests.
    pub(crate) slots: Slots,
    /// Slots of open event streams.
    pub(crate) streams: Slots,
}

impl Context {
    /// Creates the state of an API that starts VMs with `program`.
    pub fn new(program: PathBuf, share_between: ShareBetween, rights: MemberRights) -> Self {
        Self {
            program: Arc::new(program),
            share_between,
            rights: Arc::new(rights),
            members_start: Arc::default(),
            slots: Slots::of_long_requests(),
            streams: Slots::of_event_streams(),
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Problem>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Mirrorball",
        description = "VMs and cells of one host. Errors are problem documents (RFC 9457)."
    ),
    paths(
        list_vms,
        start_vm,
        show_vm,
        stop_vm,
        kill_vm,
        pause_vm,
        resume_vm,
        reset_vm,
        send_nmi,
        update_vm,
        set_balloon,
        guest::logs,
        guest::wait,
        guest::exec,
        guest::get_file,
        guest::put_file,
        copies::clone,
        copies::snapshot,
        copies::restore,
        host::move_vcpu,
        host::memory,
        host::vcpus,
        host::lend,
        host::reclaim,
        host::fail,
        list_cells,
        events::events,
        metrics::metrics
    ),
    components(schemas(Problem, events::Change))
)]
struct Document;

/// Generates the OpenAPI document from this code.
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    idempotency::describe(&mut document);
    document
}

/// Returns the router of all resources.
pub fn router(context: Context) -> Router {
    Router::new()
        .route("/v1/vms", get(list_vms).post(start_vm))
        .route("/v1/vms/{name}", get(show_vm).patch(update_vm))
        .route("/v1/vms/{name}/stop", post(stop_vm))
        .route("/v1/vms/{name}/kill", post(kill_vm))
        .route("/v1/vms/{name}/pause", post(pause_vm))
        .route("/v1/vms/{name}/resume", post(resume_vm))
        .route("/v1/vms/{name}/reset", post(reset_vm))
        .route("/v1/vms/{name}/nmi", post(send_nmi))
        .route("/v1/vms/{name}/balloon", put(set_balloon))
        .route("/v1/vms/{name}/logs", get(guest::logs))
        .route("/v1/vms/{name}/wait", post(guest::wait))
        .route("/v1/vms/{name}/exec", post(guest::exec))
        .route("/v1/vms/{name}/files", get(guest::get_file).put(guest::put_file))
        .route("/v1/vms/{name}/clone", post(copies::clone))
        .route("/v1/vms/{name}/snapshot", post(copies::snapshot))
        .route("/v1/snapshots/restore", post(copies::restore))
        .route("/v1/vms/{name}/move", post(host::move_vcpu))
        .route("/v1/memory", get(host::memory))
        .route("/v1/cells/vcpus", get(host::vcpus))
        .route("/v1/cells/{number}/lend", post(host::lend))
        .route("/v1/cells/{number}/reclaim", post(host::reclaim))
        .route("/v1/cells/{number}/fail", post(host::fail))
        .route("/v1/cells", get(list_cells))
        .route("/v1/events", get(events::events))
        .route("/metrics", get(metrics::metrics))
        .route("/openapi.json", get(async || Json(document())))
        .fallback(async || {
            Problem::new(
                StatusCode::NOT_FOUND,
                "no such resource; /openapi.json lists them",
            )
        })
        .method_not_allowed_fallback(async || {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "not for this resource; /openapi.json says which methods it has",
            )
        })
        .layer(from_fn(once))
        .layer(from_fn_with_state(context.clone(), recognize))
        .with_state(context)
}

/// Runs blocking work on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(Problem::internal)?
}

/// Returns the records of running VMs.
pub(crate) fn records() -> Result<Vec<Record>> {
    let records = Registry::open().and_then(|registry| registry.list());
    records.map_err(Problem::internal)
}

/// Returns the directory of a running VM.
pub(crate) fn folder(name: &str) -> Result<PathBuf> {
    let registry = Registry::open().map_err(Problem::internal)?;
    registry.find(name).map_err(|error| match error {
        RegistryError::Unknown { .. } => Problem::new(StatusCode::NOT_FOUND, error.to_string()),
        other => Problem::internal(other),
    })
}

/// Sends a VM an order of a caller who may give it, and returns the response.
pub(crate) async fn order(
    (context, caller): (Context, Caller),
    name: String,
    request: control::Request,
    limit: Duration,
) -> Result<Answer> {
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| {
        let folder = folder(&name)?;
        let record = vms::read(&folder).map_err(Problem::internal)?;
        caller.may_change(&context.rights, &record)?;
        let answer = ask(&folder, &request, Some(limit)).map_err(|error| match error.kind() {
            // Without the limit, VMs that do not reply would take up all threads.
            ErrorKind::WouldBlock => Problem::new(
                StatusCode::GATEWAY_TIMEOUT,
                format!("{name}: no answer for {} s; try to kill it", limit.as_secs()),
            ),
            _ => Problem::internal(error),
        });
        match answer? {
            Answer::Refused { why } => Err(Problem::new(StatusCode::CONFLICT, format!("{name}: {why}"))),
            answer => Ok(answer),
        }
    })
    .await
}

/// Lists running VMs.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<Vm>)))]
async fn list_vms() -> Result<Json<Vec<Vm>>> {
    blocking(|| Ok(Json(records()?.iter().map(Vm::from).collect()))).await
}

/// Starts a VM. The body is a VM file's keys as JSON, with a name and with absolute paths. Answers when its
/// vCPUs run.
#[utoipa::path(post, path = "/v1/vms", request_body = VmSpec, responses(
    (status = 201, body = Vm, description = "It runs."),
    (status = 400, body = Problem, description = "The spec is wrong."),
    (status = 403, body = Problem, description = "A member of the group may not start it."),
    (status = 409, body = Problem, description = "A VM of that name runs."),
    (status = 422, body = Problem, description = "It can't start on this host.")))]
async fn start_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response> {
    let spec: VmSpec = body(request).await?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| {
        let policy = caller.policy(&context.rights)?;
        let _starts = policy.map(|_| {
            let lock = context.members_start.lock();
            lock.ignore_poison()
        });
        if let Some((uid, policy)) = policy {
            admit(&spec, uid, policy)?;
        }
        let name = check(&spec)?;
        let batch = Batch {
            vms: vec![(name.clone(), spec)],
            source: None,
            share_between: context.share_between,
            member: policy.map(|(uid, _)| uid),
            boot_limit_s: BOOT_LIMIT_S,
        };
        let never_ran = || {
            Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                format!(
                    "{name} ended before it ran, or did not run within {} s",
                    START_LIMIT.as_secs()
                ),
            )
        };
        let lease = Lease::by_program(&context.program, &batch).map_err(|error| match error.kind() {
            // The program ended before it had read the VM.
            ErrorKind::BrokenPipe => never_ran(),
            _ => Problem::internal(error),
        })?;
        lease.limit_wait(START_LIMIT).map_err(Problem::internal)?;
        for event in lease.events().map_err(Problem::internal)? {
            match event {
                Event::Running { .. } => {
                    lease.detach().map_err(Problem::internal)?;
                    let record = vms::read(&folder(&name)?).map_err(Problem::internal)?;
                    return Ok((StatusCode::CREATED, Json(Vm::from(&record))).into_response());
                }
                Event::Failed { why, .. } => {
                    let status = if folder(&name).is_ok() {
                        StatusCode::CONFLICT
                    } else {
                        StatusCode::UNPROCESSABLE_ENTITY
                    };
                    return Err(Problem::new(status, why));
                }
                Event::Started { .. }
                | Event::FullDisks { .. }
                | Event::Paused { .. }
                | Event::StartsAgain { .. }
                | Event::Ended { .. } => {}
            }
        }
        Err(never_ran())
    })
    .await
}

/// Checks that a member may start a VM of this spec beside the running VMs.
fn admit(spec: &VmSpec, uid: u32, policy: &MemberPolicy) -> Result<()> {
    let refused = |why| Problem::new(StatusCode::FORBIDDEN, why);
    let running = records()?;
    let own = running.iter().filter(|record| record.member == Some(uid));
    let used = Usage::of(own.map(|record| &record.spec));
    policy
        .admit(spec, used)
        .map_err(|fault| refused(format!("{}; {}", fault.message, fault.help)))?;
    for path in paths(spec) {
        trusted_path::check(path, geteuid().as_raw()).map_err(|why| refused(why.to_string()))?;
    }
    Ok(())
}

/// Yields the files that a spec names.
fn paths(spec: &VmSpec) -> impl Iterator<Item = &PathBuf> {
    let kernel = spec
        .kernel
        .iter()
        .flat_map(|kernel| [&kernel.path, &kernel.initrd]);
    kernel.flatten().chain(spec.disks.iter().map(|disk| &disk.path))
}

/// Checks a spec before anything is started; returns the VM's name.
fn check(spec: &VmSpec) -> Result<String> {
    let name = spec.name.clone();
    let name = name.ok_or_else(|| Problem::bad_request("a VM needs a `name` here"))?;
    if spec.command.is_some() {
        return Err(Problem::bad_request(
            "`command` is for `mirrorball run`; leave it out",
        ));
    }
    if let Some(relative) = paths(spec).find(|path| !path.is_absolute()) {
        return Err(Problem::bad_request(format!(
            "{}: write an absolute path",
            relative.display()
        )));
    }
    config::check(spec)
        .map_err(|fault| Problem::bad_request(format!("{}; {}", fault.message, fault.help)))?;
    config::check_host(spec, None, &HostFacts::of_this_host()).map_err(|error: ConfigError| {
        let help = error.help.as_deref().unwrap_or_default();
        Problem::bad_request(format!("{error}; {help}"))
    })?;
    Ok(name)
}

/// Shows all that is known of a VM.
#[utoipa::path(get, path = "/v1/vms/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = VmDetails), (status = 404, body = Problem)))]
async fn show_vm(Path(name): Path<String>) -> Result<Json<VmDetails>> {
    blocking(move || {
        let folder = folder(&name)?;
        let record = vms::read(&folder).map_err(Problem::internal)?;
        let status = match ask(&folder, &control::Request::Status, Some(ANSWER_LIMIT)) {
            Ok(Answer::Status { status }) => Some(status),
            _ => None,
        };
        Ok(Json(VmDetails {
            vm: Vm::from(&record),
            spec: record.spec,
            sandbox_missing: record.sandbox_missing,
            status,
        }))
    })
    .await
}

/// Presses the power button, and kills the VM when it does not end in time. Answers when it has ended.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", params(("name" = String, Path)),
    request_body = Stop, responses(
    (status = 200, body = Stopped), (status = 403, body = Problem), (status = 404, body = Problem)))]
async fn stop_vm(
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
async fn kill_vm(
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
async fn pause_vm(
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
async fn resume_vm(
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
async fn reset_vm(
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
async fn send_nmi(
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
async fn update_vm(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<StatusCode> {
    let update: Update = body(request).await?;
    if update.is_empty() {
        return Err(Problem::bad_request(
            "nothing is to change; name one of cpu_weight, cpu_limit, memory_limit, pins and memory_nodes",
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
async fn set_balloon(
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

/// Lists the cells of the cluster; none without one.
#[utoipa::path(get, path = "/v1/cells", responses((status = 200, body = Vec<Cell>)))]
async fn list_cells() -> Result<Json<Vec<Cell>>> {
    blocking(|| Ok(Json(cells()?))).await
}

/// Returns the cluster's cells on this host.
pub(crate) fn cells() -> Result<Vec<Cell>> {
    let files = Files::open().map_err(Problem::internal)?;
    let status = client::status(&files).map_err(Problem::internal)?;
    Ok(status.map_or_else(Vec::new, |status| {
        status.cells.into_iter().map(Cell::from).collect()
    }))
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
