//! Handlers of the REST resources under `/v1`.

mod orders;
mod starts;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use config::settings::ShareBetween;
use locks::IgnorePoison;
use registry::cluster::client;
use registry::cluster::files::Files;
use registry::control::{self, Answer, ask};
use registry::vms::{self, Record, Registry, RegistryError};
use utoipa::OpenApi;

// All names, since the document needs what `utoipa::path` makes beside each handler.
use self::orders::*;
use self::starts::*;
use crate::caller::{Caller, MemberRights, recognize};
use crate::idempotency::once;
use crate::problem::Problem;
use crate::slots::{Slots, run_in_slot};
use crate::views::{Cell, Vm, VmDetails};
use crate::{copies, events, guest, host, idempotency, metrics};

/// Time limit for a VM to report its counters, or to carry out an immediate order.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for a vCPU to move.
pub(crate) const MOVE_LIMIT: Duration = ANSWER_LIMIT;
/// Shared state of the handlers.
#[derive(Clone, Debug)]
pub struct Context {
    /// Program that starts VMs: `mirrorball`.
    pub(crate) program: Arc<PathBuf>,
    /// Rule that decides which VMs share pages with those started here.
    share_between: ShareBetween,
    /// Rights of the group's members.
    pub(crate) rights: Arc<MemberRights>,
    /// A lock for each member, by user id. Held while a VM of that member starts, so that simultaneous starts
    /// stay within the limits together. A member may delay a start for long, and delays no other member's.
    members_start: Arc<Mutex<BTreeMap<u32, Arc<Mutex<()>>>>>,
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

    /// Returns the lock of a member's starts.
    fn starts_of(&self, member: u32) -> Arc<Mutex<()>> {
        let mut all = self.members_start.lock().ignore_poison();
        all.entry(member).or_default().clone()
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
