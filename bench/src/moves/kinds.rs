//! Kinds of moves, by the cells that they need.

/// A kind of move between two CPUs.
pub struct Kind {
    /// The part of the name after the distance.
    by: &'static str,
    is_between_cells: bool,
    has_drivers: bool,
}

/// All kinds, in the order of the table.
pub const KINDS: [Kind; 3] = [
    Kind {
        by: "by a pin",
        is_between_cells: false,
        has_drivers: false,
    },
    Kind {
        by: "by the CPU's driver",
        is_between_cells: false,
        has_drivers: true,
    },
    Kind {
        by: "by a loan, and back",
        is_between_cells: true,
        has_drivers: false,
    },
];

impl Kind {
    /// The cluster file of a host with those two CPUs.
    pub fn cluster_file(&self, cpus: [usize; 2]) -> String {
        let cell = |cpus: String| format!("[[cells]]\ncpus = \"{cpus}\"\nmemory = \"256M\"\n");
        let mut text = match self.is_between_cells {
            true => cpus.map(|cpu| cell(cpu.to_string())).concat(),
            false => cell(format!("{},{}", cpus[0], cpus[1])),
        };
        if self.has_drivers {
            text += "[scheduling]\ncpus = \"gangs\"\n";
        }
        text
    }

    /// The name of a move between CPUs of one node, or of two.
    pub fn name(&self, is_in_a_node: bool) -> String {
        let distance = match (self.is_between_cells, is_in_a_node) {
            (true, true) => "between cells of a node",
            (true, false) => "between cells of two nodes",
            (false, true) => "in a node",
            (false, false) => "between nodes of a cell",
        };
        format!("{distance}, {}", self.by)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names_and_cells_of_their_own() {
        let names: std::collections::BTreeSet<_> = KINDS
            .iter()
            .flat_map(|kind| [true, false].map(|is_in_a_node| kind.name(is_in_a_node)))
            .collect();
        assert_eq!(names.len(), 2 * KINDS.len(), "{names:?}");
        let files = KINDS.map(|kind| kind.cluster_file([3, 5]));
        assert_eq!(files[0], "[[cells]]\ncpus = \"3,5\"\nmemory = \"256M\"\n");
        assert!(
            files[1].ends_with("[scheduling]\ncpus = \"gangs\"\n"),
            "{}",
            files[1]
        );
        assert_eq!(files[2].matches("[[cells]]").count(), 2, "{}", files[2]);
    }
}
