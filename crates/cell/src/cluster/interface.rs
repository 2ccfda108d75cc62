//! What a cell can be asked, and what it answers: a line of JSON each way.

use config::cluster::CellPlan;
use serde::{Deserialize, Serialize};

/// What a VM takes of its cell.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct VmShare {
    /// vCPUs.
    pub vcpus: u32,
    /// Guest memory.
    pub memory_bytes: u64,
}

/// Between a spanning VM's name and a part's number. No VM's own name has it.
pub const PART_MARK: char = '/';

/// The name under which a spanning VM's part holds its place: the VM's for its home, `NAME/1` for the next.
pub fn part_name(vm: &str, part: usize) -> String {
    match part {
        0 => vm.to_owned(),
        _ => format!("{vm}{PART_MARK}{part}"),
    }
}

/// Memory that is another cell's.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// The other cell.
    pub cell: u16,
    /// How much.
    pub bytes: u64,
}

/// A VM that runs on this host, as its registry says.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its name.
    pub name: String,
    /// Its cell.
    pub cell: u16,
    /// What it takes.
    pub share: VmShare,
    /// Of its memory, what is not its cell's.
    pub borrowed: Vec<Part>,
}

/// What a VM was given.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Its cell; the nodes are also those of the cells whose memory it has.
    #[serde(flatten)]
    pub plan: CellPlan,
    /// Of its memory, what is not the cell's own.
    pub borrowed: Vec<Part>,
}

/// A VM that is to run in the cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// What it takes.
    pub share: VmShare,
    /// Only this cell will do.
    pub only: Option<u16>,
    /// No memory that the cell has borrowed will do; only asked for together with `only`.
    #[serde(default)]
    pub own: bool,
    /// Another cell has said that there is room here.
    pub sent: bool,
    /// It runs in this cell already, whose process has died since.
    pub runs: bool,
    /// What it has of other cells then.
    #[serde(default)]
    pub borrowed: Vec<Part>,
}

/// What a client asks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "ask")]
pub enum Ask {
    /// A place for a VM. It is the VM's until the connection ends.
    Host(Host),
    /// A VM of this cell has ended. Answered when all cells have heard of it, so that the name is free.
    Leave {
        /// Its name.
        name: String,
    },
    /// This cell is to lend another one memory. Answered when the other has it.
    Lend {
        /// To whom.
        to: u16,
        /// How much.
        bytes: u64,
    },
    /// This cell is to have back what it has lent. Answered when it has.
    Reclaim {
        /// From whom.
        from: u16,
        /// How much.
        bytes: u64,
    },
    /// What there is in the cluster.
    Status,
    /// The cell's process is to end. VMs run on.
    End,
}

/// The answer.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "answer")]
pub enum Answer {
    /// The VM runs in this cell, with these CPUs and nodes.
    Hosted(Place),
    /// Ask this cell.
    Elsewhere {
        /// Which.
        cell: u16,
    },
    /// It can't be.
    Refused {
        /// Why, and what to do about it.
        why: String,
    },
    /// Done.
    Done,
    /// What there is.
    Status(Status),
}

/// The cluster as one cell knows it.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The cells, by number.
    pub cells: Vec<CellStatus>,
    /// Who says so has heard from all cells that it has links to.
    pub ready: bool,
}

/// One cell.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub struct CellStatus {
    /// What it has.
    #[serde(flatten)]
    pub plan: CellPlan,
    /// Its process.
    pub pid: u32,
    /// Counts its processes; none when it does not answer.
    pub life: Option<u32>,
    /// What its VMs have been given.
    pub given_bytes: u64,
    /// What it has lent, to whom.
    pub lent: Vec<Part>,
    /// What it has borrowed, from whom.
    pub borrowed: Vec<Part>,
    /// vCPUs of its VMs.
    pub vcpus: u32,
    /// The VMs that run there.
    pub vms: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map by numbers, say, would not: JSON's keys are strings.
    #[test]
    fn what_is_borrowed_goes_through_json() {
        let plan = CellPlan {
            number: 1,
            host: None,
            cpus: vec![2],
            nodes: vec![0, 1],
            memory_bytes: 1 << 30,
        };
        let borrowed = vec![Part {
            cell: 0,
            bytes: 1 << 20,
        }];
        let cell = CellStatus {
            plan: plan.clone(),
            pid: 1,
            life: Some(1),
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
        for answer in [Answer::Hosted(Place { plan, borrowed }), Answer::Status(status)] {
            let line = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<Answer>(&line).unwrap(), answer);
        }
    }
}
