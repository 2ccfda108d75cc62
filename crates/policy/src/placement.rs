//! Placement: the cell in which a VM starts, and the reasons against the others.
//!
//! [`rank`] makes the decision. A cell calls it for each placement request, `mirrorball knowledge place`
//! prints it, and the relations `has_room`, `no_room` and `place` of `mirrorball knowledge query` are its
//! result.

use std::collections::BTreeMap;
use std::fmt;

/// Free capacity of a cell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CellCapacity {
    /// Number of the cell.
    pub cell: u16,
    /// Number of its CPUs.
    pub cpus: u32,
    /// Number of vCPUs that run there.
    pub vcpus: u32,
    /// Free memory, bytes.
    pub free_bytes: u64,
    /// Whether it is cordoned: it takes no new VM.
    pub is_cordoned: bool,
    /// Whether it is on the host where the VM was requested, which has the VM's files.
    pub is_here: bool,
}

/// Resources that a VM needs in one cell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Want {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Memory of the guest, bytes.
    pub memory_bytes: u64,
}

/// Whether a cell can take a VM. Displayed as the predicate of a sentence about the cell.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// The VM fits.
    Fits {
        /// vCPUs per 1000 CPUs, including those of the VM.
        load_milli: u64,
    },
    /// The cell takes no new VM.
    Cordoned,
    /// The cell has no CPU.
    NoCpu,
    /// The cell has less memory than the VM needs.
    TooSmall {
        /// Free memory, bytes.
        free_bytes: u64,
    },
}

/// A cell and its verdict.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Candidate {
    /// Cell with its free CPUs and memory.
    pub room: CellCapacity,
    /// Whether it can take the VM.
    pub verdict: Verdict,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fits { load_milli } => {
                let (whole, rest) = (load_milli / 1000, load_milli % 1000);
                write!(f, "would have {whole}.{rest:03} vCPUs on each CPU")
            }
            Self::Cordoned => f.write_str("is cordoned"),
            Self::NoCpu => f.write_str("has no CPU"),
            Self::TooSmall { free_bytes } => write!(f, "has {} MiB", free_bytes >> 20),
        }
    }
}

/// Decides where a VM can start: the cells that can take it, the best first, then the others by number.
///
/// The best is one of this host, if any of this host can take the VM; of these the one with the fewest vCPUs
/// on each CPU afterwards, then the one with the most memory left, then the lowest number. A cell can take
/// the VM if it is not cordoned, has a CPU, and has the memory.
pub fn rank(capacities: &[CellCapacity], want: Want) -> Vec<Candidate> {
    let judge = |room: &CellCapacity| Candidate {
        room: *room,
        verdict: judge(room, want),
    };
    let mut candidates: Vec<Candidate> = capacities.iter().map(judge).collect();
    candidates.sort_by_key(|candidate| {
        let room = &candidate.room;
        match candidate.verdict {
            Verdict::Fits { load_milli } => (
                false,
                !room.is_here,
                load_milli,
                u64::MAX - room.free_bytes,
                room.cell,
            ),
            _ => (true, false, 0, 0, room.cell),
        }
    });
    candidates
}

/// The cell for a VM: the first of [`rank`]; `None` if no cell can take it.
pub fn place(capacities: &[CellCapacity], want: Want) -> Option<u16> {
    let best = rank(capacities, want).first().copied()?;
    matches!(best.verdict, Verdict::Fits { .. }).then_some(best.room.cell)
}

/// Returns the reason of each cell against a VM: "cell 0 is cordoned, cell 1 has 64 MiB".
pub fn refusals(capacities: &[CellCapacity], want: Want) -> String {
    let refused = rank(capacities, want).into_iter();
    let refused = refused.map(|one| format!("cell {} {}", one.room.cell, one.verdict));
    refused.collect::<Vec<_>>().join(", ")
}

fn judge(room: &CellCapacity, want: Want) -> Verdict {
    if room.is_cordoned {
        return Verdict::Cordoned;
    }
    if room.cpus == 0 {
        return Verdict::NoCpu;
    }
    if room.free_bytes < want.memory_bytes {
        let free_bytes = room.free_bytes;
        return Verdict::TooSmall { free_bytes };
    }
    let vcpus = u64::from(room.vcpus) + u64::from(want.vcpus);
    Verdict::Fits {
        load_milli: vcpus * 1000 / u64::from(room.cpus),
    }
}

/// A user's assertions on a cell.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Asserted {
    /// Number of CPUs, replacing the discovered one.
    pub cpus: Option<u32>,
    /// Number of vCPUs that run there, replacing the counted one.
    pub vcpus: Option<u32>,
    /// Free memory, bytes. It applies only if it is less than the cell's free memory: an assertion adds no
    /// memory.
    pub free_bytes: Option<u64>,
    /// Whether it is cordoned.
    pub is_cordoned: bool,
}

/// A user's assertions on cells, by cell number.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Assertions(pub BTreeMap<u16, Asserted>);

impl Assertions {
    /// Applies the assertions to the capacities. An assertion on an absent cell adds none.
    pub fn apply(&self, capacities: &mut [CellCapacity]) {
        for room in capacities {
            let Some(asserted) = self.0.get(&room.cell) else {
                continue;
            };
            room.cpus = asserted.cpus.unwrap_or(room.cpus);
            room.vcpus = asserted.vcpus.unwrap_or(room.vcpus);
            room.free_bytes = asserted.free_bytes.unwrap_or(u64::MAX).min(room.free_bytes);
            room.is_cordoned |= asserted.is_cordoned;
        }
    }

    /// Whether the assertions cordon a cell.
    pub fn cordon(&self, cell: u16) -> bool {
        self.0.get(&cell).is_some_and(|asserted| asserted.is_cordoned)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn room(cell: u16, cpus: u32, vcpus: u32, free_mib: u64) -> CellCapacity {
        CellCapacity {
            cell,
            cpus,
            vcpus,
            free_bytes: free_mib << 20,
            is_cordoned: false,
            is_here: true,
        }
    }

    fn place(capacities: &[CellCapacity], vcpus: u32, memory_bytes: u64) -> Option<u16> {
        super::place(capacities, Want { vcpus, memory_bytes })
    }

    #[test]
    fn cell_of_another_host_is_chosen_only_when_none_of_this_host_can_take_the_vm() {
        let mut capacities = [room(0, 1, 9, 128), room(1, 8, 0, 1 << 20)];
        capacities[1].is_here = false;
        assert_eq!(place(&capacities, 1, 64 << 20), Some(0));
        assert_eq!(place(&capacities, 1, 256 << 20), Some(1));
        capacities[0].is_cordoned = true;
        assert_eq!(place(&capacities, 1, 64 << 20), Some(1));
    }

    #[test]
    fn every_cell_is_ranked_with_the_reason_of_its_rank() {
        let mut capacities = [
            room(3, 0, 0, 64),
            room(2, 4, 4, 64),
            room(1, 4, 0, 63),
            room(0, 4, 2, 64),
            room(4, 9, 0, 99),
        ];
        capacities[4].is_cordoned = true;
        let want = Want {
            vcpus: 1,
            memory_bytes: 64 << 20,
        };
        let said = rank(&capacities, want);
        let said: Vec<String> = said
            .iter()
            .map(|one| format!("{} {}", one.room.cell, one.verdict))
            .collect();
        let expected = [
            "0 would have 0.750 vCPUs on each CPU",
            "2 would have 1.250 vCPUs on each CPU",
            "1 has 63 MiB",
            "3 has no CPU",
            "4 is cordoned",
        ];
        assert_eq!(said, expected);
        assert!(refusals(&capacities[2..3], want).ends_with("cell 1 has 63 MiB"));
    }

    #[test]
    fn assertion_changes_only_its_cell_and_adds_no_memory_or_cell() {
        let mut capacities = [room(0, 4, 2, 64), room(1, 4, 2, 64)];
        let asserted = Asserted {
            cpus: Some(8),
            vcpus: Some(0),
            free_bytes: Some(u64::MAX),
            is_cordoned: false,
        };
        let mut assertions = Assertions([(1, asserted), (7, asserted)].into());
        assertions.apply(&mut capacities);
        assert_eq!(capacities, [room(0, 4, 2, 64), room(1, 8, 0, 64)]);
        assertions.0.insert(
            1,
            Asserted {
                free_bytes: Some(1 << 20),
                is_cordoned: true,
                ..Asserted::default()
            },
        );
        assertions.apply(&mut capacities);
        assert_eq!(
            (capacities[1].free_bytes, capacities[1].is_cordoned),
            (1 << 20, true)
        );
        assert!(assertions.cordon(1) && !assertions.cordon(7) && !assertions.cordon(0));
    }

    #[test]
    fn cordoned_cell_is_never_chosen() {
        let mut capacities = [room(0, 1, 9, 128), room(1, 8, 0, 1 << 20)];
        assert_eq!(place(&capacities, 1, 64 << 20), Some(1));
        capacities[1].is_cordoned = true;
        assert_eq!(place(&capacities, 1, 64 << 20), Some(0));
        capacities[0].is_cordoned = true;
        assert_eq!(place(&capacities, 1, 64 << 20), None);
    }

    #[test]
    fn least_loaded_cell_that_fits_is_chosen() {
        let capacities = [room(0, 4, 4, 1024), room(1, 4, 2, 1024), room(2, 8, 0, 100)];
        assert_eq!(place(&capacities, 2, 512 << 20), Some(1));
        assert_eq!(place(&capacities, 2, 64 << 20), Some(2));
        assert_eq!(place(&capacities, 1, 2048 << 20), None);
    }

    #[test]
    fn load_is_vcpus_per_cpu_including_the_vms() {
        assert_eq!(place(&[room(0, 1, 0, 64), room(1, 4, 1, 64)], 1, 0), Some(1));
        assert_eq!(place(&[room(0, 4, 3, 64), room(1, 5, 5, 64)], 1, 0), Some(0));
    }

    #[test]
    fn free_memory_breaks_ties_of_load() {
        let mut capacities = [0, 1].map(|cell| room(cell, 2, 0, 1 << 20));
        capacities[1].free_bytes += 1;
        assert_eq!(place(&capacities, 1, 0), Some(1));
    }

    proptest! {
        /// With VMs of one size, equal cells differ by at most one VM.
        #[test]
        fn equal_cells_are_filled_evenly(
            cells in 1..9_u16,
            cpus in 1..9_u32,
            vcpus in 1..5_u32,
            count in 0..40_u32
        ) {
            let mut capacities: Vec<CellCapacity> =
                (0..cells).map(|cell| room(cell, cpus, 0, 1 << 20)).collect();
            for _ in 0..count {
                let cell = place(&capacities, vcpus, 64 << 20).expect("memory for all");
                capacities[usize::from(cell)].vcpus += vcpus;
                capacities[usize::from(cell)].free_bytes -= 64 << 20;
            }
            let placed = capacities.iter().map(|room| room.vcpus / vcpus);
            let (least, most) = (placed.clone().min().expect("one"), placed.max().expect("one"));
            prop_assert!(most - least <= 1);
        }
    }
}
