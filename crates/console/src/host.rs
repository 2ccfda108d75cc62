//! Operations on this host's cells and memory.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use operations::{Failure, cells, memory};
use registry::cluster::interface::{Vcpu, VcpuStatistics};
use registry::control::{self, Answer};
use registry::vms::Registry;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::{Context, MOVE_LIMIT, Result, order};
use crate::caller::Caller;
use crate::copies::{Reported, run};
use crate::problem::Problem;
use crate::request_body::body;
use crate::slots::run_in_slot;

/// Time limit for dependent VMs to end after a cell's failure, and for surviving cells to recover.
const FAIL_LIMIT: Duration = Duration::from_secs(300);

/// A vCPU, and the cell or the CPU that it is to run on: one of both.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// The vCPU's number.
    pub vcpu: u8,
    /// Number of the cell to which it moves, of those that its VM spans.
    #[serde(default)]
    pub cell: Option<u16>,
    /// The host's number of the CPU to which it moves.
    #[serde(default)]
    pub cpu: Option<usize>,
}

/// A vCPU that has moved.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct Moved {
    /// Pause of the vCPU, in microseconds; absent for a move to a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub still_us: Option<u64>,
    /// Means that keep it on the CPU to which it moved: `pin`, `driver`, or a `loan` of another cell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<&'static str>,
    /// Cell on which the VM depends from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub began: Option<u16>,
    /// Cell on which the VM depends no longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<u16>,
    /// CPUs that it was pinned to, if the move has removed its pin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped_pin: Option<Vec<usize>>,
}

/// Moves a vCPU to a CPU of the host, or, if its VM spans cells, to another of them.
#[utoipa::path(post, path = "/v1/vms/{name}/move", params(("name" = String, Path)), request_body = Move,
    responses(
    (status = 200, body = Moved), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem), (status = 409, body = Problem)))]
pub(crate) async fn move_vcpu(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Result<Json<Moved>> {
    let Move { vcpu, cell, cpu } = body(request).await?;
    caller.must_own("the placement of vCPUs")?;
    let request = match (cell, cpu) {
        (Some(cell), None) => control::Request::Move { vcpu, cell },
        (None, Some(cpu)) => control::Request::Place { vcpu, cpu },
        _ => {
            return Err(Problem::bad_request(
                "name the `cell` or the `cpu` to which it moves, and not both",
            ));
        }
    };
    match order((context, caller), name.clone(), request, MOVE_LIMIT).await? {
        Answer::Moved {
            still_ns,
            dropped_pin,
        } => Ok(Json(Moved {
            still_us: Some(still_ns.div_ceil(1000)),
            dropped_pin,
            ..Moved::default()
        })),
        Answer::Placed(placement) => Ok(Json(Moved {
            by: Some(placement.by.word()),
            began: placement.began,
            ended: placement.ended,
            dropped_pin: placement.dropped_pin,
            ..Moved::default()
        })),
        _ => Err(Problem::new(
            StatusCode::CONFLICT,
            format!("{name}: the VM has ended"),
        )),
    }
}

/// Host memory that running VMs use, as `mirrorball mem --json`.
#[utoipa::path(get, path = "/v1/memory", responses(
    (status = 200, body = Object, description = "VMs, files and the host, in bytes."),
    (status = 429, body = Problem)))]
pub(crate) async fn memory(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<serde_json::Value>> {
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, |_| {
        let registry = Registry::open().map_err(Problem::internal)?;
        let table = memory::measure(&registry).map_err(Problem::internal)?;
        serde_json::to_value(&table).map(Json).map_err(Problem::internal)
    })
    .await
}

/// The vCPUs of the VMs in the cells of this host.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Vcpus {
    /// Each vCPU, by VM and number.
    pub vcpus: Vec<VcpuThread>,
    /// VMs whose vCPUs are unknown now.
    pub missing: Vec<Missing>,
}

/// A vCPU and the thread that runs it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct VcpuThread {
    /// Name of the VM.
    pub vm: String,
    /// Number of the vCPU in the VM.
    pub vcpu: u8,
    /// Cell in which it runs.
    pub cell: u16,
    /// The shard's process.
    pub shard_pid: i32,
    /// Id of the thread on the host.
    pub thread_id: i32,
    /// Host CPUs that the thread may use.
    pub cpus: Vec<usize>,
    /// CPU that it used last.
    pub last_cpu: usize,
    /// CPU time so far, in milliseconds.
    pub ran_ms: u64,
    /// Time that the thread was ready and waited for a CPU, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    /// KVM's statistics; absent where the host's KVM has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kvm: Option<KvmStatistics>,
}

/// KVM's statistics of a vCPU since the VM's last boot. Each is absent if the host's KVM does not count it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct KvmStatistics {
    /// Exits from the guest, those that KVM served by itself included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exits: Option<u64>,
    /// Exits because the guest halted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub halts: Option<u64>,
    /// Time that it was halted, in milliseconds. A halt that goes on is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub halted_ms: Option<u64>,
    /// Whether it is halted now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_halted: Option<bool>,
}

impl From<VcpuStatistics> for KvmStatistics {
    fn from(statistics: VcpuStatistics) -> Self {
        Self {
            exits: statistics.exits,
            halts: statistics.halts,
            halted_ms: statistics.halted_ms,
            is_halted: statistics.is_halted,
        }
    }
}

impl From<Vcpu> for VcpuThread {
    fn from(vcpu: Vcpu) -> Self {
        Self {
            vm: vcpu.vm,
            vcpu: vcpu.vcpu,
            cell: vcpu.cell,
            shard_pid: vcpu.shard_pid,
            thread_id: vcpu.thread_id,
            cpus: vcpu.cpus,
            last_cpu: vcpu.last_cpu,
            ran_ms: vcpu.ran_ms,
            waited_ms: vcpu.waited_ms,
            kvm: vcpu.kvm.map(KvmStatistics::from),
        }
    }
}

/// A VM whose vCPUs are unknown.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Missing {
    /// Name of the VM.
    pub vm: String,
    /// The reason.
    pub why: String,
}

/// Lists the vCPUs of the VMs in this host's cells.
#[utoipa::path(get, path = "/v1/cells/vcpus", responses(
    (status = 200, body = Vcpus), (status = 404, body = Problem, description = "No cluster is up."),
    (status = 429, body = Problem), (status = 504, body = Problem)))]
pub(crate) async fn vcpus(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<Vcpus>> {
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, |_| {
        let known = cells::vcpus()?;
        let missing = known.missing.into_iter();
        Ok(Json(Vcpus {
            vcpus: known.vcpus.into_iter().map(VcpuThread::from).collect(),
            missing: missing.map(|(vm, why)| Missing { vm, why }).collect(),
        }))
    })
    .await
}

/// Memory that a cell lends.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Loan {
    /// Cell that borrows.
    pub borrower: u16,
    /// The amount.
    pub bytes: u64,
}

/// Lends memory of a cell to another cell of this host.
#[utoipa::path(post, path = "/v1/cells/{number}/lend", params(("number" = u16, Path)), request_body = Loan,
    responses(
    (status = 204), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem),
    (status = 409, body = Problem), (status = 429, body = Problem), (status = 504, body = Problem)))]
pub(crate) async fn lend(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(number): Path<String>,
    request: Request<Body>,
) -> Result<StatusCode> {
    change_loan((context, caller), &number, request, cells::lend).await
}

/// Reclaims lent memory of a cell, as far as no VM uses it.
#[utoipa::path(post, path = "/v1/cells/{number}/reclaim", params(("number" = u16, Path)), request_body = Loan,
    responses(
    (status = 204), (status = 400, body = Problem), (status = 403, body = Problem),
    (status = 404, body = Problem),
    (status = 409, body = Problem), (status = 429, body = Problem), (status = 504, body = Problem)))]
pub(crate) async fn reclaim(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(number): Path<String>,
    request: Request<Body>,
) -> Result<StatusCode> {
    change_loan((context, caller), &number, request, cells::reclaim).await
}

/// Changes the loans of the cell with this number, by `change` (lender, borrower, bytes).
async fn change_loan(
    (context, caller): (Context, Caller),
    lender: &str,
    request: Request<Body>,
    change: fn(u16, u16, u64) -> std::result::Result<(), Failure>,
) -> Result<StatusCode> {
    let Loan { borrower, bytes } = body(request).await?;
    caller.must_own("the memory of cells")?;
    let lender = cell_number(lender)?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| Ok(change(lender, borrower, bytes)?)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a cell fail as if its CPUs and memory were lost. Responds when the VMs that depend on it have ended.
#[utoipa::path(post, path = "/v1/cells/{number}/fail", params(("number" = u16, Path)), responses(
    (status = 200, body = Reported), (status = 403, body = Problem), (status = 404, body = Problem),
    (status = 422, body = Problem, description = "It has failed already, or does not end."),
    (status = 429, body = Problem)))]
pub(crate) async fn fail(
    State(context): State<Context>,
    Extension(caller): Extension<Caller>,
    Path(number): Path<String>,
) -> Result<Json<Reported>> {
    caller.must_own("the failure of a cell")?;
    let number = cell_number(&number)?;
    let slot = context.slots.take(caller)?;
    run_in_slot(slot, move |_| {
        cells::check(number)?;
        let words = ["cluster".into(), "fail".into(), number.to_string().into()];
        let notes = run(&context, &words, FAIL_LIMIT)?.lines();
        Ok(Json(Reported { notes }))
    })
    .await
}

fn cell_number(text: &str) -> Result<u16> {
    let unknown = |_| Problem::new(StatusCode::NOT_FOUND, format!("{text:?} is no cell's number"));
    text.parse().map_err(unknown)
}
