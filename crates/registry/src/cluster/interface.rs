//! Requests to a cell, and its responses: one line of JSON each, over the cell's socket.
//!
//! Clients are `mirrorball cluster`, the API, and each VM's monitor, which requests a place.
//! `cell::cluster::state` replies; the simulator sends the same types. [`LentMemory`] and [`VmShare`] are
//! also in the records of VMs ([`crate::vms::Record`]), from which a restarted cell recovers its grants.

use std::ops::Not;

use config::cluster::CellPlan;
use serde::{Deserialize, Serialize};
use urpc::version::Versions;

pub use super::cpus::{BorrowedCpu, CpuLending, CpuLoad, CpuQueue, LentCpu};
pub use super::regions::{RegionGrant, RegionMember, RegionMoved, RegionStatus};
use super::windows::{CellReport, WindowSchedule};
use crate::json_line::Protocol;

/// The client's side of the protocol.
pub const OF_CLIENT: Protocol = Protocol {
    name: "the protocol of a cell's clients",
    peer: "the cell",
    versions: Versions::up_to(1),
};
/// The cell's side of the protocol.
pub const OF_CELL: Protocol = Protocol {
    peer: "the client",
    ..OF_CLIENT
};

/// Resources that a VM takes of a cell.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmShare {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
    /// CPU time that the cell reserves for the VM, thousandths of a CPU. A release before the key has none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cpu_reservation_permille: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Separator between a spanning VM's name and a shard's number. No VM's name contains it.
pub const SHARD_SEPARATOR: char = '/';

/// Returns the name under which a shard of a spanning VM holds its place: the VM's name for its home shard,
/// `NAME/1` for the next one.
pub fn shard_name(vm: &str, part: usize) -> String {
    match part {
        0 => vm.to_owned(),
        _ => format!("{vm}{SHARD_SEPARATOR}{part}"),
    }
}

/// Separator between the id of a VM's owner and the VM's name, if the owner does not own the cluster. No VM's
/// name contains it.
pub const OWNER_SEPARATOR: char = ':';

/// Returns the cluster-wide name of a VM whose owner does not own the cluster: names are per owner.
pub fn owned_name(uid: u32, vm: &str) -> String {
    format!("{uid}{OWNER_SEPARATOR}{vm}")
}

/// Splits a cluster-wide name into the owner's id and the owner's name for the VM; none if the cluster's
/// owner owns the VM.
pub fn owner_of(name: &str) -> Option<(u32, &str)> {
    let (uid, vm) = name.split_once(OWNER_SEPARATOR)?;
    Some((uid.parse().ok()?, vm))
}

/// Memory that one cell has lent another.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LentMemory {
    /// The other cell.
    pub cell: u16,
    /// The amount, in bytes.
    pub bytes: u64,
}

/// A VM that runs on this host, as the host's registry records it.
#[derive(Clone, Debug)]
pub struct RunningVm {
    /// The VM's name.
    pub name: String,
    /// The VM's cell.
    pub cell: u16,
    /// Resources that it takes of the cell.
    pub share: VmShare,
    /// Memory that other cells lent for it, by lender.
    pub borrowed: Vec<LentMemory>,
    /// The only cells that it may depend on, the preferred lender first; any cell when empty.
    pub cells: Vec<u16>,
    /// Its vCPUs on CPUs of other cells.
    pub borrowed_cpus: Vec<BorrowedCpu>,
    /// Its shared regions.
    pub regions: Vec<RegionGrant>,
}

/// CPUs and memory nodes that a cell gave a VM.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmPlacement {
    /// The VM's cell. Its nodes include those of the cells that lent memory.
    #[serde(flatten)]
    pub plan: CellPlan,
    /// Memory that other cells lent for it, by lender.
    pub borrowed: Vec<LentMemory>,
}

/// Request to admit a VM to a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AdmitVm {
    /// The VM's name.
    pub name: String,
    /// Resources that it takes of a cell.
    pub share: VmShare,
    /// The only cell that may take it.
    pub only: Option<u16>,
    /// Whether to exclude memory that the cell has borrowed; only together with `only`.
    #[serde(default)]
    pub own: bool,
    /// Whether another cell has forwarded the request.
    pub sent: bool,
    /// Whether the VM already runs in this cell, whose process has died since.
    pub runs: bool,
    /// Memory of other cells that a running VM has, by lender.
    #[serde(default)]
    pub borrowed: Vec<LentMemory>,
    /// The only cells that the VM may depend on, the preferred lender first; any cell when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cells: Vec<u16>,
    /// vCPUs of a running VM on CPUs of other cells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub borrowed_cpus: Vec<BorrowedCpu>,
    /// The shared regions that it uses. Each is of a cell of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<RegionGrant>,
}

impl AdmitVm {
    /// The first request for a VM that any cell may take, with memory of any other one.
    pub fn new(name: String, share: VmShare) -> Self {
        Self {
            name,
            share,
            only: None,
            own: false,
            sent: false,
            runs: false,
            borrowed: Vec::new(),
            cells: Vec::new(),
            borrowed_cpus: Vec::new(),
            regions: Vec::new(),
        }
    }
}

/// A client's request to a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum CellRequest {
    /// Admit a VM. It keeps its place until the connection ends.
    #[serde(rename = "host")]
    AdmitVm(AdmitVm),
    /// Release the place of a VM that has ended. The response comes when all cells have applied it and the
    /// name is free.
    Leave {
        /// The VM's name.
        name: String,
    },
    /// Send the descriptor of a shared region of this cell to a VM that was admitted with it.
    TakeRegion {
        /// The VM's name.
        vm: String,
        /// The region's name.
        region: String,
    },
    /// Move the memory of a shared region of this cell to the memory of a cell. The response is
    /// [`CellResponse::RegionMoved`], or [`CellResponse::Later`].
    MoveRegion {
        /// The region's name.
        region: String,
        /// The cell whose memory it takes.
        to: u16,
    },
    /// Serve a VM of this cell after the process that serves it now ends. The response comes when the VM's
    /// keeper has the cell's process waiting.
    Adopt {
        /// The VM's name.
        name: String,
        /// Whether to retry although the cell has given up on the VM.
        again: bool,
    },
    /// Lend memory of this cell to another one. The response comes when the other cell has it.
    Lend {
        /// The borrower.
        to: u16,
        /// The amount, in bytes.
        bytes: u64,
    },
    /// Reclaim memory that this cell has lent. The response comes when it is back.
    Reclaim {
        /// The borrower.
        from: u16,
        /// The amount, in bytes.
        bytes: u64,
    },
    /// Let a vCPU of another cell's VM run on a CPU of this one. The VM's cell records the use.
    LendCpu {
        /// The host's number of the CPU.
        cpu: usize,
        /// The cell that serves the VM.
        borrower: u16,
        /// Whether that cell has decided on the move. Refused then without an idle CPU.
        #[serde(default, skip_serializing_if = "Not::not")]
        is_automatic: bool,
    },
    /// Report the load of this cell's CPUs. A cell that lends none by itself refuses.
    CpuLoad,
    /// Report the moves of vCPUs between cells by this cell's decision. A cell that decides on none refuses.
    CpuLending,
    /// Take the report of a cell as the arbiter of windows. A cell without drivers refuses.
    Windows(CellReport),
    /// Have a vCPU of a VM of this cell, which its decision has moved to the lender, run on a CPU of this
    /// cell again.
    ReturnCpu {
        /// The VM's name.
        vm: String,
        /// The vCPU's number.
        vcpu: u8,
        /// The lender, which needs its CPU.
        lender: u16,
    },
    /// Record which vCPUs of a VM of this cell run on CPUs of other cells: the VM depends on these. The
    /// response comes when all cells have recorded it.
    BorrowCpus {
        /// The VM's name.
        vm: String,
        /// All such vCPUs.
        cpus: Vec<BorrowedCpu>,
    },
    /// Reserve CPU time of this cell for a VM of it; none if it is 0. The response comes when all cells have
    /// recorded it.
    ReserveCpu {
        /// The VM's name.
        vm: String,
        /// Thousandths of a CPU.
        permille: u32,
    },
    /// Cordon this cell or end its cordon. The response comes when all cells have applied it.
    Cordon {
        /// Whether the cell takes no new VM.
        cordoned: bool,
    },
    /// End the VMs that depend on a failed cell of this host. The response comes when none is left.
    Recover {
        /// The failed cell.
        cell: u16,
    },
    /// Drop the entries of lost cells of another host in all cells, so that the names of their VMs are free.
    /// Nothing of them may run. The response comes when all have dropped them. Refused while one of the cells
    /// is alive.
    Forget {
        /// The lost cells.
        cells: Vec<u16>,
    },
    /// Use the hosts in the cell's files, because the hosts of the cluster have changed.
    TakeHosts,
    /// Reply at once: the cell's guard checks whether the process hangs.
    Ping,
    /// Report the state of the cluster.
    Status,
    /// Report the vCPUs of the VMs that this cell serves.
    Vcpus,
    /// Report the versions of the protocols that the cell speaks.
    Protocols,
    /// Sent by the cell's guard to a process that it started from a new program. The response is
    /// [`CellResponse::Done`] when the process has linked to the other cells and adopted the VMs that the
    /// last process left; it is refused if it can't.
    Trial,
    /// End the cell's process. VMs run on.
    End,
}

impl CellRequest {
    /// Whether the response is a report, and nothing changes.
    pub fn is_report(&self) -> bool {
        matches!(
            self,
            Self::Status | Self::Ping | Self::Vcpus | Self::CpuLoad | Self::CpuLending | Self::Windows(_)
        )
    }
}

/// Response to a [`CellRequest`].
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum CellResponse {
    /// The VM is admitted to this cell, with these CPUs and nodes.
    Hosted(VmPlacement),
    /// The client must send the request to another cell.
    Elsewhere {
        /// Number of the cell that takes the request.
        cell: u16,
    },
    /// The request can't be carried out.
    Refused {
        /// Reason and help.
        why: String,
    },
    /// The request can't be carried out now. The client may repeat it.
    Later {
        /// The reason.
        why: String,
    },
    /// A shared region, whose descriptor comes with this.
    Region {
        /// Memory that other cells lent for it, by lender.
        borrowed: Vec<LentMemory>,
    },
    /// The memory of a shared region has moved.
    RegionMoved(RegionMoved),
    /// The request was carried out.
    Done,
    /// The state of the cluster.
    Status(Status),
    /// vCPUs of the cell's VMs, in no order.
    Vcpus {
        /// vCPUs of running VMs.
        vcpus: Vec<Vcpu>,
        /// VMs whose vCPUs are unknown now, each with the reason.
        missing: Vec<(String, String)>,
        /// Run queues of the cell's CPUs; empty if Linux schedules them, or from a cell of an older release.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        queues: Vec<CpuQueue>,
        /// Moves of vCPUs between cells by decision; none from a cell that decides on none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lending: Option<CpuLending>,
    },
    /// The load of the cell's CPUs.
    CpuLoad(CpuLoad),
    /// Moves of vCPUs between cells by decision of the cell.
    CpuLending(CpuLending),
    /// The windows that are, or will be, in force in all cells of the host.
    Windows(WindowSchedule),
    /// The protocols that the cell speaks.
    Protocols(Protocols),
}

impl CellResponse {
    /// Describes a response of a kind that does not belong to the request.
    pub fn unexpected(&self) -> String {
        format!(
            "the cell's response is of another kind than the request ({self:?}); help: bring the cells and \
             this program to one release with `mirrorball cluster upgrade`"
        )
    }
}

/// Release of a program, and the versions that it speaks of each protocol with programs that it does not
/// replace.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Protocols {
    /// The release, as `0.1.0`.
    pub release: String,
    /// Messages between cells.
    pub cells: Versions,
    /// Records by which VMs are adopted.
    pub records: Versions,
    /// Launches of shards and orders to them.
    pub shards: Versions,
}

/// A vCPU of a running VM, and the thread that runs it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Vcpu {
    /// The VM's name.
    pub vm: String,
    /// The vCPU's number in the VM.
    pub vcpu: u8,
    /// Cell in which it runs. For a spanning VM this may differ from the VM's cell.
    pub cell: u16,
    /// The id of the shard's process.
    pub shard_pid: i32,
    /// Id of the thread on the host.
    pub thread_id: i32,
    /// Host CPUs that the thread may use.
    pub cpus: Vec<usize>,
    /// Host CPU that it used last.
    pub last_cpu: usize,
    /// CPU time of the thread so far, in milliseconds. It restarts at 0 with each boot, and in each cell to
    /// which the vCPU moves for the first time.
    pub ran_ms: u64,
    /// Time that the thread was ready to run and waited for a host CPU, in milliseconds. None from a cell of
    /// the release before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    /// KVM's statistics of it, in the shard that it is in; none where the host's KVM has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvm: Option<VcpuStatistics>,
}

/// KVM's statistics of a vCPU since the VM's last boot. Each is none if the host's KVM does not count it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct VcpuStatistics {
    /// Exits from the guest, those that KVM served by itself included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exits: Option<u64>,
    /// Exits because the guest halted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halts: Option<u64>,
    /// Time that it was halted, in milliseconds. A halt that goes on is missing. None for a VM that spans
    /// cells, whose shards wait for the ends of halts themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halted_ms: Option<u64>,
    /// Whether it is halted now. None for a VM that spans cells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_halted: Option<bool>,
}

/// State of the cluster as one cell sees it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The cells, by number.
    pub cells: Vec<CellStatus>,
    /// Whether the replying cell has received the state of all cells that it has links to.
    pub ready: bool,
}

/// The state of one cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CellStatus {
    /// The cell's CPUs and memory.
    #[serde(flatten)]
    pub plan: CellPlan,
    /// The id of its process.
    pub pid: u32,
    /// Incarnation number of its process; none when it does not reply.
    pub life: Option<u32>,
    /// Whether it has failed: it does not start again, and nothing runs in it.
    #[serde(default)]
    pub failed: bool,
    /// Whether it is cordoned: it takes no new VM.
    #[serde(default)]
    pub cordoned: bool,
    /// Memory of its VMs and of its shared regions, in bytes.
    pub given_bytes: u64,
    /// Memory that it has lent, by borrower.
    pub lent: Vec<LentMemory>,
    /// The part of `lent` that the borrowers requested by themselves, by borrower. Commands lent the rest.
    #[serde(default)]
    pub lent_on_request: Vec<LentMemory>,
    /// Memory that it has borrowed, by lender.
    pub borrowed: Vec<LentMemory>,
    /// Its CPUs on which vCPUs of other cells' VMs run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lent_cpus: Vec<LentCpu>,
    /// The number of its VMs' vCPUs.
    pub vcpus: u32,
    /// The names of its VMs.
    pub vms: Vec<String>,
    /// Shared regions of its memory that have members. Empty from a cell of the release before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<RegionStatus>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_in_the_cluster_has_the_owner_if_that_is_another() {
        assert_eq!(owner_of(&owned_name(1001, "web")), Some((1001, "web")));
        assert_eq!(owner_of("web"), None);
        assert_eq!(owner_of(&shard_name("web", 1)), None);
        assert_ne!(owned_name(1, "1-web"), owned_name(11, "-web"));
    }

    /// A map with numeric keys would not: JSON's keys are strings.
    #[test]
    fn loans_survive_a_round_trip_through_json() {
        let plan = CellPlan {
            number: 1,
            host: None,
            cpus: vec![2],
            nodes: vec![0, 1],
            memory_bytes: 1 << 30,
        };
        let borrowed = vec![LentMemory {
            cell: 0,
            bytes: 1 << 20,
        }];
        let cell = CellStatus {
            plan: plan.clone(),
            pid: 1,
            life: Some(1),
            failed: false,
            cordoned: true,
            given_bytes: 0,
            lent: Vec::new(),
            borrowed: borrowed.clone(),
            lent_cpus: vec![LentCpu {
                cpu: 2,
                cell: 0,
                vm: "web".to_owned(),
                vcpu: 1,
                is_automatic: false,
            }],
            vcpus: 0,
            vms: Vec::new(),
            regions: Vec::new(),
            lent_on_request: Vec::new(),
        };
        let status = Status {
            cells: vec![cell],
            ready: true,
        };
        for answer in [
            CellResponse::Hosted(VmPlacement { plan, borrowed }),
            CellResponse::Status(status),
        ] {
            let line = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<CellResponse>(&line).unwrap(), answer);
        }
    }
    #[test]
    fn run_queues_are_left_out_where_linux_schedules_and_may_lack_figures() {
        let answer = |queues| CellResponse::Vcpus {
            vcpus: Vec::new(),
            missing: Vec::new(),
            queues,
            lending: None,
        };
        let line = serde_json::to_string(&answer(Vec::new())).unwrap();
        assert!(!line.contains("queues"), "{line}");
        // As a cell of the release before sends it.
        assert_eq!(
            serde_json::from_str::<CellResponse>(&line).unwrap(),
            answer(Vec::new())
        );
        let queue: CpuQueue = serde_json::from_str("{\"cpu\":3}").unwrap();
        let line = serde_json::to_string(&answer(vec![queue.clone()])).unwrap();
        assert_eq!(
            serde_json::from_str::<CellResponse>(&line).unwrap(),
            answer(vec![queue])
        );
    }
}
