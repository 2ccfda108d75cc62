//! Sources of a reading, and the conversion of their reports.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use hostinfo::memory_use::{self, MemoryUse};
use registry::cluster::admission::{self, UserStatus};
use registry::cluster::client::Connection;
use registry::cluster::files::CellFiles;
use registry::cluster::interface::{self, CellRequest, CellResponse, CellStatus, Status, Vcpu};
use registry::control::{Answer, Request, ask};
use registry::vms::{Record, State};
use serde_json::Value;

use super::reading::{
    CellReading, CellState, Counters, CpuQueue, MovedBy, QueueMoves, VcpuReading, VmReading, VmState,
};
use crate::cells::{Vcpus, ask_vcpus};

/// Time after which a query of a cell or a VM ends without an answer. Until then it is not repeated.
const QUERY_LIMIT: Duration = Duration::from_secs(10);

/// A source, which gets at most one query at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// A cell's state of the cluster.
    Cell(u16),
    /// The vCPUs of a cell's VMs.
    CellVcpus(u16),
    /// The host's cluster, which admits the caller.
    HostCluster,
    /// The process that serves a VM.
    Vm(String),
    /// The host's memory.
    Memory,
}

/// Report of a source.
#[derive(Clone, Debug)]
pub(super) enum Report {
    Cell(Status),
    CellVcpus(Vcpus),
    /// None if no cluster admits the caller.
    HostCluster(Option<UserStatus>),
    Vm(Value),
    Memory(MemoryUse),
}

/// Report, or the reason why there is none.
pub(super) type Reported = Result<Report, String>;

pub(super) fn ask_cell(cell: &CellFiles) -> Reported {
    let answer = Connection::open(cell).and_then(|mut connection| {
        connection.limit_wait(QUERY_LIMIT)?;
        connection.ask(&CellRequest::Status)
    });
    match answer {
        Ok(CellResponse::Status(status)) => Ok(Report::Cell(status)),
        Ok(CellResponse::Refused { why }) => Err(why),
        Ok(other) => Err(other.unexpected()),
        Err(error) => Err(reason(&error)),
    }
}

/// The reason of a failed query, in the words of a user.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            format!("no answer within {} s", QUERY_LIMIT.as_secs())
        }
        ErrorKind::ConnectionRefused | ErrorKind::NotFound => "its process does not run".to_owned(),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            "its process ended before it answered".to_owned()
        }
        _ => error.to_string(),
    }
}

pub(super) fn ask_cell_vcpus(cell: &CellFiles) -> Reported {
    let vcpus = ask_vcpus(cell, QUERY_LIMIT);
    vcpus.map(Report::CellVcpus).map_err(|error| reason(&error))
}

pub(super) fn ask_host_cluster() -> Reported {
    match admission::request(&admission::Request::Status {}) {
        Ok(Some(admission::Reply::Status(status))) => Ok(Report::HostCluster(Some(status))),
        Ok(_) => Ok(Report::HostCluster(None)),
        Err(error) => Err(reason(&error)),
    }
}

pub(super) fn ask_vm(folder: &Path) -> Reported {
    match ask(folder, &Request::Status, Some(QUERY_LIMIT)) {
        Ok(Answer::Status { status }) => Ok(Report::Vm(status)),
        Ok(Answer::Refused { why }) => Err(why),
        Ok(_) => Err("the VM is ending".to_owned()),
        Err(error) => Err(reason(&error)),
    }
}

pub(super) fn measure_memory(records: &[Record]) -> Reported {
    let table = memory_use::read(records);
    table.map(Report::Memory).map_err(|error| error.to_string())
}

/// Returns the run queue of a CPU as its cell reports it.
pub(super) fn queue(queue: &interface::CpuQueue) -> CpuQueue {
    CpuQueue {
        gang: queue.gang.clone(),
        waiting: Some(queue.waiting),
        ungated: Some(queue.ungated),
        load_milli: Some(u64::from(queue.load) * 1000),
        moves: Some(QueueMoves {
            idle: Some(queue.moved_idle),
            periodic: Some(queue.moved_periodic),
            ordered: Some(queue.moved_ordered),
        }),
        refused: Some(queue.refused),
    }
}

/// Returns a cell as one that answers reports it.
pub(super) fn cell(status: &CellStatus, is_here: bool) -> CellReading {
    let state = match (status.failed, status.life) {
        (true, _) => CellState::Failed,
        (false, Some(_)) if status.cordoned => CellState::Cordoned,
        (false, Some(_)) => CellState::Runs,
        (false, None) => CellState::Dead,
    };
    CellReading {
        cell: status.plan.number,
        host: status.plan.host.clone(),
        is_here,
        state: Some(state),
        pid: Some(status.pid),
        cpus: status.plan.cpus.clone(),
        nodes: status.plan.nodes.clone(),
        memory_bytes: Some(status.plan.memory_bytes),
        given_bytes: Some(status.given_bytes),
        free_bytes: None,
        lent: Some(status.lent.clone()),
        borrowed: Some(status.borrowed.clone()),
        vcpus: Some(status.vcpus),
        vms: Some(status.vms.clone()),
        cpu_lending: None,
    }
}

/// Returns the cells of the host's cluster, as a user sees them whom it admits.
pub(super) fn host_cells(status: &UserStatus) -> Vec<CellReading> {
    let cell = |room: &admission::CellRoom| CellReading {
        cell: room.number,
        is_here: true,
        cpus: room.cpus.clone(),
        nodes: room.nodes.clone(),
        free_bytes: Some(room.free_bytes),
        ..CellReading::default()
    };
    status.cells.iter().map(cell).collect()
}

/// Returns a VM as the registry has it.
pub(super) fn vm(record: &Record) -> VmReading {
    let state = match record.state {
        State::Starting => VmState::Starting,
        State::Running if record.paused => VmState::Paused,
        State::Running if !record.full_disks.is_empty() => VmState::DiskFull,
        State::Running => VmState::Running,
    };
    VmReading {
        vm: record.name.clone(),
        state,
        cell: record.cell,
        host_cell: record.host_place.map(|place| place.cell),
        span: record.span.iter().map(|part| part.cell).collect(),
        vcpus: record.spec.cpus,
        cpu_weight: record.spec.cpu_weight,
        cpu_limit: record.spec.cpu_limit,
        cpu_reservation: record.spec.cpu_reservation,
        memory_bytes: record.spec.memory.0,
        host_bytes: None,
        swapped_bytes: None,
        borrowed: record.borrowed.clone(),
    }
}

/// Returns a vCPU as its cell reports it.
pub(super) fn vcpu(vcpu: Vcpu, at_ms: u64) -> VcpuReading {
    let kvm = vcpu.kvm.unwrap_or_default();
    VcpuReading {
        vm: vcpu.vm,
        vcpu: vcpu.vcpu,
        at_ms,
        cell: Some(vcpu.cell),
        shard_pid: Some(vcpu.shard_pid),
        thread_id: Some(vcpu.thread_id),
        cpus: Some(vcpu.cpus),
        last_cpu: Some(vcpu.last_cpu),
        is_pinned: false,
        moved_by: None,
        is_halted: kvm.is_halted,
        counters: Counters {
            ran_ms: Some(vcpu.ran_ms),
            waited_ms: vcpu.waited_ms,
            halted_ms: kvm.halted_ms,
            halts: kvm.halts,
            exits: kvm.exits,
            ..Counters::default()
        },
    }
}

/// Returns the origin of a vCPU's move to another cell, as the VM's record has it.
pub(super) fn moved_by(record: &Record, vcpu: u8) -> Option<MovedBy> {
    let mut borrowed = record.borrowed_cpus.iter();
    let borrowed = borrowed.find(|borrowed| borrowed.vcpu == vcpu)?;
    Some(match borrowed.is_automatic {
        true => MovedBy::Decision,
        false => MovedBy::Command,
    })
}

/// Returns the vCPUs of a VM from its own status. One that spans cells reports the cell of each vCPU only.
pub(super) fn vcpus_of_vm(record: &Record, status: &Value, at_ms: u64) -> Vec<VcpuReading> {
    let own = |vcpu| VcpuReading {
        vm: record.name.clone(),
        vcpu,
        at_ms,
        cell: record.cell,
        ..VcpuReading::default()
    };
    if let Some(cells) = status["span"]["vcpus"].as_array() {
        let vcpu = |(vcpu, cell): (u8, &Value)| VcpuReading {
            cell: number(cell),
            ..own(vcpu)
        };
        return (0..).zip(cells).map(vcpu).collect();
    }
    let vcpus = status["vcpus"].as_array().into_iter().flatten();
    let vcpu = |vcpu: &Value| {
        let cpus = vcpu["cpus"].as_array();
        let count = |key: &str| vcpu[key].as_u64();
        let kvm = &vcpu["kvm"];
        Some(VcpuReading {
            shard_pid: number(&vcpu["shard_pid"]).or(record.shard_pid),
            thread_id: number(&vcpu["thread_id"]),
            cpus: cpus.map(|cpus| cpus.iter().filter_map(number).collect()),
            last_cpu: number(&vcpu["last_cpu"]),
            is_halted: kvm["is_halted"].as_bool(),
            counters: Counters {
                ran_ms: count("ran_ms"),
                waited_ms: count("waited_ms"),
                halted_ms: kvm["halted_ms"].as_u64(),
                halts: kvm["halts"].as_u64(),
                exits: kvm["exits"].as_u64(),
                ..Counters::default()
            },
            ..own(number(&vcpu["vcpu"])?)
        })
    };
    vcpus.filter_map(vcpu).collect()
}

fn number<T: TryFrom<u64>>(value: &Value) -> Option<T> {
    value.as_u64().and_then(|number| number.try_into().ok())
}
