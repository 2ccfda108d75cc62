//! Cells and NUMA nodes of the CPUs, the distances between them, and the kinds of moves.

use super::{CpuId, Nanos};
use crate::cpu::tunables::Tunables;

/// Cell and NUMA node of a CPU.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct CpuPlace {
    /// Number of the cell.
    pub cell: u16,
    /// Number of the NUMA node in the host.
    pub node: u16,
}

/// Kind of a vCPU's move (Cellular Disco, section 4.1, which measured 37, 520 and 1,520 us).
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum MoveKind {
    /// Between CPUs of one node.
    IntraNode,
    /// Between nodes of one cell: the vCPU's memory becomes remote until it follows.
    InterNode,
    /// Between cells: the VM depends on the new cell too, from then on.
    InterCell,
}

/// The CPUs that drivers may use.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Topology {
    places: Vec<CpuPlace>,
    /// For each CPU the other CPUs of its cell, nearest first.
    neighbours: Vec<Vec<CpuId>>,
}

impl Topology {
    /// The topology of CPUs 0 to n - 1 at these places.
    pub fn new(places: Vec<CpuPlace>) -> Self {
        let neighbours = (0..places.len()).map(|cpu| neighbours(&places, cpu)).collect();
        Self { places, neighbours }
    }

    /// A machine of equal cells of equal nodes.
    pub fn regular(cells: u16, nodes_per_cell: u16, cpus_per_node: u16) -> Self {
        let nodes = (0..cells).flat_map(|cell| (0..nodes_per_cell).map(move |node| (cell, node)));
        let places = nodes.flat_map(|(cell, node)| {
            let node = cell * nodes_per_cell + node;
            (0..cpus_per_node).map(move |_| CpuPlace { cell, node })
        });
        Self::new(places.collect())
    }

    /// Number of CPUs.
    pub fn cpus(&self) -> u16 {
        u16::try_from(self.places.len()).unwrap_or(u16::MAX)
    }

    /// The place of a CPU; that of cell 0, node 0 for a CPU that does not exist.
    pub fn place(&self, cpu: CpuId) -> CpuPlace {
        self.places.get(cpu.index()).copied().unwrap_or_default()
    }

    /// The other CPUs of the same cell: those of its node, then those of other nodes, each by distance of
    /// their numbers.
    pub fn neighbours(&self, cpu: CpuId) -> &[CpuId] {
        self.neighbours.get(cpu.index()).map_or(&[], Vec::as_slice)
    }

    /// Kind of a move, by the cells and nodes of both CPUs.
    pub fn kind(&self, from: CpuId, to: CpuId) -> MoveKind {
        let (from, to) = (self.place(from), self.place(to));
        if from.cell != to.cell {
            MoveKind::InterCell
        } else if from.node != to.node {
            MoveKind::InterNode
        } else {
            MoveKind::IntraNode
        }
    }

    /// Time for which a vCPU must have waited before an idle CPU takes it; `None` between cells.
    pub fn idle_delay(&self, from: CpuId, to: CpuId, tunables: &Tunables) -> Option<Nanos> {
        match self.kind(from, to) {
            MoveKind::IntraNode => Some(tunables.idle_delay_intra_node_ns),
            MoveKind::InterNode => Some(tunables.idle_delay_inter_node_ns),
            MoveKind::InterCell => None,
        }
    }
}

fn neighbours(places: &[CpuPlace], cpu: usize) -> Vec<CpuId> {
    let own = places[cpu];
    let mut others: Vec<usize> = (0..places.len())
        .filter(|other| *other != cpu && places[*other].cell == own.cell)
        .collect();
    others.sort_by_key(|other| {
        let place = places[*other];
        (
            place.node != own.node,
            place.node.abs_diff(own.node),
            other.abs_diff(cpu),
            *other,
        )
    });
    others.into_iter().map(|other| CpuId(other as u16)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_of_the_cell_alone_and_nearest_first() {
        let machine = Topology::regular(2, 2, 2);
        let numbers = |cpu| {
            machine
                .neighbours(CpuId(cpu))
                .iter()
                .map(|cpu| cpu.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(numbers(0), [1, 2, 3]);
        assert_eq!(numbers(3), [2, 1, 0]);
        assert_eq!(numbers(4), [5, 6, 7]);
        assert_eq!(numbers(8), [0; 0]);
        assert_eq!(machine.cpus(), 8);
    }

    #[test]
    fn moves_within_a_cell_have_a_delay_by_distance_and_moves_between_cells_none() {
        let machine = Topology::regular(2, 2, 2);
        let tunables = Tunables::default();
        let to = |cpu| {
            (
                machine.kind(CpuId(0), CpuId(cpu)),
                machine.idle_delay(CpuId(0), CpuId(cpu), &tunables),
            )
        };
        assert_eq!(to(1), (MoveKind::IntraNode, Some(4_000_000)));
        assert_eq!(to(2), (MoveKind::InterNode, Some(6_000_000)));
        assert_eq!(to(4), (MoveKind::InterCell, None));
    }
}
