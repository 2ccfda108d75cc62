//! Requests to a cell, and its answers: a line of JSON each, over the cell's socket.
//!
//! Clients are `mirrorball cluster`, the API, and each VM's monitor, which asks for a place.
//! `cell::cluster::state` answers; the simulator sends the same types. [`LentMemory`] and [`VmShare`] are in the
//! records of VMs too ([`crate::vms::Record`]), from which a cell that starts again learns what it has given.

use config::cluster::CellPlan;
use serde::{Deserialize, Serialize};
use urpc::version::Versions;

use crate::json_line::Protocol;

/// The protocol as a client speaks it.
pub const OF_CLIENT: Protocol = Protocol {
    name: "the protocol of a cell's clients",
    peer: "the cell",
    versions: Versions::up_to(1),
};
/// The protocol as a cell speaks it.
pub const OF_CELL: Protocol = Protocol {
    peer: "the client",
    ..OF_CLIENT
};

/// The part of a cell that a VM takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmShare {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
}

/// The character between a spanning VM's name and a part's number. It is in no VM's name.
pub const PART_MARK: char = '/';

/// The name under which a part of a spanning VM holds its place: the VM's name for its home, `NAME/1` for the
/// next part.
pub fn part_name(vm: &str, part: usize) -> String {
    match part {
        0 => vm.to_owned(),
        _ => format!("{vm}{PART_MARK}{part}"),
    }
}

/// The character between the id of a VM's owner and the VM's name, if the owner is not the cluster's. It is in no VM's name.
pub const OWNER_MARK: char = ':';

/// The name in the cluster of a VM whose owner is not the cluster's: names are per owner.
pub fn owned_name(uid: u32, vm: &str) -> String {
    format!("{uid}{OWNER_MARK}{vm}")
}

/// The owner of a VM, by its name in the cluster, and the name that its owner gave it; none if it is the cluster owner's.
pub fn owner_of(name: &str) -> Option<(u32, &str)> {
    let (uid, vm) = name.split_once(OWNER_MARK)?;
    Some((uid.parse().ok()?, vm))
}

/// An amount of memory that one cell has lent another.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct LentMemory {
    /// The other cell.
    pub cell: u16,
    /// The amount, in bytes.
    pub bytes: u64,
}

/// A VM that runs on this host, by the host's registry.
#[derive(Clone, Debug)]
pub struct RunningVm {
    /// The VM's name.
    pub name: String,
    /// The VM's cell.
    pub cell: u16,
    /// The part of the cell that it takes.
    pub share: VmShare,
    /// The part of its memory that other cells lent, by lender.
    pub borrowed: Vec<LentMemory>,
}

/// The place that a VM was given.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmPlacement {
    /// The VM's cell. The nodes include those of the cells that lent it memory.
    #[serde(flatten)]
    pub plan: CellPlan,
    /// The part of its memory that other cells lent, by lender.
    pub borrowed: Vec<LentMemory>,
}

/// A request for a place for a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AdmitVm {
    /// The VM's name.
    pub name: String,
    /// The part of a cell that it takes.
    pub share: VmShare,
    /// The only cell that may take it.
    pub only: Option<u16>,
    /// Whether memory that the cell has borrowed is excluded; only together with `only`.
    #[serde(default)]
    pub own: bool,
    /// Whether another cell has sent the VM here.
    pub sent: bool,
    /// Whether the VM runs in this cell already, whose process has died since.
    pub runs: bool,
    /// The memory of other cells that it has if it runs, by lender.
    #[serde(default)]
    pub borrowed: Vec<LentMemory>,
}

/// A client's request to a cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum CellRequest {
    /// Give a VM a place. The place is the VM's until the connection ends.
    #[serde(rename = "host")]
    AdmitVm(AdmitVm),
    /// A VM of this cell has ended. Answered when all cells have received that, so that the name is free.
    Leave {
        /// The VM's name.
        name: String,
    },
    /// Serve a VM of this cell, from the end of the process on that serves it now. Answered when the VM's keeper
    /// has the cell's process waiting.
    Adopt {
        /// The VM's name.
        name: String,
        /// Whether the cell tries although it has set the VM aside.
        again: bool,
    },
    /// Lend another cell memory of this one. Answered when the other has it.
    Lend {
        /// The borrower.
        to: u16,
        /// The amount, in bytes.
        bytes: u64,
    },
    /// Take back memory that this cell has lent. Answered when it is back.
    Reclaim {
        /// The borrower.
        from: u16,
        /// The amount, in bytes.
        bytes: u64,
    },
    /// Take no new VM from now on, or take VMs again. Answered when all cells have received that.
    Cordon {
        /// Whether the cell takes no new VM.
        cordoned: bool,
    },
    /// A cell of this host has failed: end the VMs that depend on it. Answered when none is left.
    Recover {
        /// The failed cell.
        cell: u16,
    },
    /// Cells of another host are lost, and nothing of them runs: all cells drop their entries, so that the names of their
    /// VMs are free. Answered when all have. Refused while one of the cells lives.
    Forget {
        /// The lost cells.
        cells: Vec<u16>,
    },
    /// The hosts of the cluster have changed: go on with those in the cell's files.
    TakeHosts,
    /// Answer at once: the cell's guard wants to know whether the process hangs.
    Ping,
    /// Report the state of the cluster.
    Status,
    /// Report the vCPUs of the VMs that this cell serves.
    Vcpus,
    /// Report the versions of the protocols that the cell speaks.
    Protocols,
    /// The cell's guard has started this process by a new program. Answered by [`CellResponse::Done`] when the process has met the other
    /// cells and adopted the VMs that the last process left, and refused if it can't.
    Trial,
    /// End the cell's process. VMs run on.
    End,
}

/// The response to a [`CellRequest`].
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum CellResponse {
    /// The VM runs in this cell, with these CPUs and nodes.
    Hosted(VmPlacement),
    /// The client must ask another cell.
    Elsewhere {
        /// That cell.
        cell: u16,
    },
    /// The request can't be carried out.
    Refused {
        /// The reason and the help.
        why: String,
    },
    /// The request was carried out.
    Done,
    /// The state of the cluster.
    Status(Status),
    /// The vCPUs of the cell's VMs, in no order.
    Vcpus {
        /// Those of VMs that run.
        vcpus: Vec<Vcpu>,
        /// VMs whose vCPUs are not known now, each with the reason.
        missing: Vec<(String, String)>,
    },
    /// The protocols that the cell speaks.
    Protocols(Protocols),
}

/// The release of a program, and its versions of each protocol that it speaks with programs which it does not replace.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Protocols {
    /// The release, as `0.1.0`.
    pub release: String,
    /// Of messages between cells.
    pub cells: Versions,
    /// Of the records by which VMs are adopted.
    pub records: Versions,
    /// Of launches and orders to shards.
    pub shards: Versions,
}

/// A vCPU of a running VM, and the thread that runs it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Vcpu {
    /// The VM's name.
    pub vm: String,
    /// The vCPU's number in the VM.
    pub vcpu: u8,
    /// The cell in which it runs. That of a spanning VM may be another one than the VM's.
    pub cell: u16,
    /// The id of the shard's process.
    pub shard_pid: i32,
    /// The id of the thread.
    pub thread_id: i32,
    /// The CPUs of the host that the thread may use.
    pub cpus: Vec<usize>,
    /// The CPU of the host that it used last.
    pub last_cpu: usize,
    /// The time that the thread has run so far, in milliseconds. It begins anew with each boot, and in each cell to which the vCPU
    /// moves for the first time.
    pub ran_ms: u64,
}

/// The cluster as one cell knows it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The cells, by number.
    pub cells: Vec<CellStatus>,
    /// Whether the cell that answers has received the state of all cells that it has links to.
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
    /// The number of its process, counted from the cell's first; none when it does not answer.
    pub life: Option<u32>,
    /// Whether it has failed: it does not start again, and nothing runs in it.
    #[serde(default)]
    pub failed: bool,
    /// Whether it takes no new VM.
    #[serde(default)]
    pub cordoned: bool,
    /// The memory of its VMs, in bytes.
    pub given_bytes: u64,
    /// The memory that it has lent, by borrower.
    pub lent: Vec<LentMemory>,
    /// The memory that it has borrowed, by lender.
    pub borrowed: Vec<LentMemory>,
    /// The number of its VMs' vCPUs.
    pub vcpus: u32,
    /// The names of its VMs.
    pub vms: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_in_the_cluster_has_the_owner_if_that_is_another() {
        assert_eq!(owner_of(&owned_name(1001, "web")), Some((1001, "web")));
        assert_eq!(owner_of("web"), None);
        assert_eq!(owner_of(&part_name("web", 1)), None);
        assert_ne!(owned_name(1, "1-web"), owned_name(11, "-web"));
    }

    /// A map with numbers as keys would not: JSON's keys are strings.
    #[test]
    fn what_is_borrowed_goes_through_json() {
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
            vcpus: 0,
            vms: Vec::new(),
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
}
