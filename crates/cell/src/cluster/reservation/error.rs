//! Reasons why a VM has no place.

use std::io;

/// The reason why a VM has no place.
#[derive(Debug, thiserror::Error)]
pub enum ReservationError {
    /// The VM names a cell, and there is no cluster.
    #[error(
        "the VM names cell {0}, and no cluster is up here; start one with `mirrorball cluster up`, or leave \
         `cell` and `cells` out"
    )]
    NoCluster(u16),
    /// The VM names a cell, and the host's cluster is another user's.
    #[error(
        "the VM names cell {0}, and the cluster of this host does not admit you; ask its administrator for a \
         `[[users]]` entry, or leave `cell` and `cells` out"
    )]
    NotAdmitted(u16),
    /// The VM is to span cells, and there are none.
    #[error(
        "the VM has a span, and no cluster is up here; start one with `mirrorball cluster up`, or leave \
         `span` out"
    )]
    NothingToSpan,
    /// The VM has a shared region, and there is no cluster.
    #[error(
        "the VM has the shared region {0}, and no cluster is up here; start one whose file has it with \
         `mirrorball cluster up FILE`, or leave `shared` out"
    )]
    NoClusterForRegion(String),
    /// The VM reserves CPU time, and there is no cluster of its user's.
    #[error(
        "the VM reserves CPU time (`cpu_reservation`), and no cluster of yours is up here; start one whose \
         file has `cpus = \"gangs\"` with `mirrorball cluster up FILE`, or leave it out"
    )]
    NoClusterForCpu,
    /// The VM has a shared region, and the host's cluster is another user's.
    #[error(
        "the VM has the shared region {0}, and the cluster of this host is another user's, whose VMs alone \
         share its regions; leave `shared` out"
    )]
    RegionOfOthers(String),
    /// The cluster has no such region.
    #[error(
        "the cluster has no shared region {region}; it has {known}: add a `[[shared]]` table to its file, or \
         name one of these"
    )]
    NoRegion {
        /// Name of the region.
        region: String,
        /// The regions of the cluster.
        known: String,
    },
    /// A region's home does not send its file.
    #[error("cell {cell} does not send the shared region {region}: {why}; see `mirrorball cluster status`")]
    RegionLost {
        /// Name of the region.
        region: String,
        /// Number of the region's home cell.
        cell: u16,
        /// Reason, as the home or the link reports it.
        why: String,
    },
    /// There is a cluster, and none of its cells runs.
    #[error(
        "none of the cluster's cells runs; start them again with `mirrorball cluster up`, or end it with \
         `mirrorball cluster down`"
    )]
    Dead,
    /// The VM spans hosts without coherent memory; hosts have no memory in common.
    #[error(
        "it spans cell {cell} on host {host}, and hosts have no memory in common: write \
         `memory = \"coherent\"` in `span` (`--span-memory coherent`), so that each cell keeps a copy of all \
         of it, or name cells of this host"
    )]
    NotCoherent {
        /// The first cell on another host.
        cell: u16,
        /// Name of that cell's host.
        host: String,
    },
    /// Only another host has room, and the VM's files are on this one.
    #[error("only cell {cell}, on host {host}, has room for it; run it there with `--cell {cell}`")]
    OtherHost {
        /// Number of the cell with room.
        cell: u16,
        /// Name of that cell's host.
        host: String,
    },
    /// The cells refuse.
    #[error("{0}")]
    Refused(String),
    /// A cell does not answer.
    #[error("cell {cell} does not answer: {source}; see `mirrorball cluster status`")]
    Silent {
        /// Number of the silent cell.
        cell: u16,
        /// Failure of the connection or of the exchange.
        source: io::Error,
    },
    /// The cluster does not answer.
    #[error("the cluster does not answer: {0}; see `mirrorball cluster status`")]
    Broken(#[from] io::Error),
    /// The host does not allow the binding.
    #[error(
        "cannot keep the VM to the {what} of cell {cell}: {source}; a container needs the capability \
         SYS_NICE for it"
    )]
    Settle {
        /// CPUs, or memory.
        what: &'static str,
        /// Number of the cell that has the place.
        cell: u16,
        /// Error of the connection to it.
        source: io::Error,
    },
}
