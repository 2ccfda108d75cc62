//! The compared VMs: each has four vCPUs, with the same CPUs and memory of the host.

/// Placement of the VM on the host.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A plain VM: one shard, with the kernel's interrupt chip.
    Plain,
    /// One shard, with our interrupt controllers.
    Own,
    /// Two shards, with our interrupt controllers.
    Two,
}

impl Kind {
    /// All kinds, in the order in which they run.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Own, Self::Two];

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "one shard, the kernel's chip",
            Self::Own => "one shard, ours",
            Self::Two => "two shards, ours",
        }
    }

    /// Number of cells of the host, chosen so that each VM has all of the host, with one shard or with two.
    pub fn cells(self) -> u16 {
        match self {
            Self::Plain | Self::Own => 1,
            Self::Two => 2,
        }
    }

    /// Flags of `mirrorball run`.
    pub fn flags(self) -> [&'static str; 2] {
        match self {
            Self::Plain => ["--cell", "0"],
            Self::Own => ["--span", "0"],
            Self::Two => ["--span", "0,1"],
        }
    }
}
