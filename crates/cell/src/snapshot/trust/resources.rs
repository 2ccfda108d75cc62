//! The host's resources that a snapshot's VM gets.
//!
//! A limit takes from the VM alone, so a manifest may have one. A share of resources that other VMs use, a
//! place, and a share group are given by the caller only. Core scheduling is isolation: the stronger setting
//! wins, as for the sandbox.

use config::vm::{NodeSpec, RestartSpec, RootSpec};
use config::{IoLimitSpec, Size, VmSpec};

use super::TrustError;

/// The host's resources that the caller gives a snapshot's VM, and their limits.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    /// Its weight among VMs that share CPUs. The manifest's is ignored.
    pub cpu_weight: Option<u16>,
    /// The limit of CPUs; the manifest's when absent.
    pub cpu_limit: Option<f64>,
    /// The limit of the host's memory; the manifest's when absent.
    pub memory_limit: Option<Size>,
    /// The limits of I/O; the manifest's when absent.
    pub io_limit: Option<IoLimitSpec>,
    /// The limit of each temporary overlay; the manifest's when absent.
    pub scratch_limit: Option<Size>,
    /// Cores of its own, even if the manifest does not ask for them.
    pub core_scheduling: bool,
    /// The share group that it may join: the manifest's, named again.
    pub share_group: Option<String>,
    /// The cell to run in. The manifest's is ignored.
    pub cell: Option<u16>,
}

/// The outcome of [`Resources::apply`], one line each.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Applied {
    /// Resources of the host that the VM takes.
    pub takes: Vec<String>,
    /// Requests of the manifest that are refused.
    pub withheld: Vec<String>,
}

impl Resources {
    /// Applies the caller's settings to `spec`, and removes those that only the manifest has. `as_is` keeps
    /// the nodes of the host.
    ///
    /// The patterns name every key of a spec, so that a new key does not compile until it has a rule.
    ///
    /// # Errors
    /// If the caller names another share group than the manifest.
    pub(super) fn apply(&self, spec: &mut VmSpec, as_is: bool) -> Result<Applied, TrustError> {
        let VmSpec {
            // The command chooses it.
            name: _,
            // It resumes from the snapshot, whatever it started from.
            warm: _,
            // It counts for defined VMs only.
            after: _,
            // They select VMs in commands, and take nothing of the host.
            labels: _,
            // Files, disks and cards: `files`, `check_disks_cloneable` and `drop_card_settings` decide.
            image: _,
            kernel: _,
            disks: _,
            nets: _,
            root:
                RootSpec {
                    // Refused by `check_disks_cloneable`.
                    persistent: _,
                    // How pages are shared; with whom is the share group's.
                    share: _,
                    // They can only delay the VM itself.
                    on_full: _,
                    bandwidth: _,
                    operations: _,
                },
            // It says which of the VM's own vCPUs run together.
            gang: _,
            // The guest runs on them: no restore can change them.
            cpus: _,
            memory: _,
            memory_nodes,
            // No VM with paged memory is frozen, so only a forged snapshot has them: left out below.
            resident,
            paging_file,
            paging_disk,
            memory_min,
            memory_weight,
            cpu_weight,
            cpu_limit,
            cpu_reservation,
            memory_limit,
            io_limit,
            scratch_limit,
            core_scheduling,
            restart,
            nodes,
            // The host's pools can't be in a snapshot. The rest is within the memory.
            pages: _,
            prefault: _,
            balloon: _,
            // A restore runs none.
            command: _,
            // The stronger wins: `stronger`.
            sandbox: _,
            share: _,
            share_group,
            cell,
            cells,
            // No VM with shared regions is frozen, so only a forged snapshot has them: left out below.
            shared,
            // The same for shared folders.
            folders,
            // Refused by `grant`.
            span: _,
        } = spec;
        let mut applied = Applied::default();
        self.weigh(cpu_weight, &mut applied);
        (*resident, *paging_file, *paging_disk) = (None, None, None);
        shared.clear();
        folders.clear();
        // A promise takes memory from others, and a weight is for paged VMs.
        drop_promise(memory_min, &mut applied);
        *memory_weight = None;
        if cpu_reservation.take().is_some() {
            let why = "no CPU time is reserved for it, as was for the snapshot's; `mirrorball update \
                       --cpu-reservation` reserves some";
            applied.withheld.push(why.to_owned());
        }
        *cpu_limit = self.cpu_limit.or(*cpu_limit);
        *memory_limit = self.memory_limit.or(*memory_limit);
        *io_limit = self.io_limit.or(*io_limit);
        *scratch_limit = self.scratch_limit.or(*scratch_limit);
        if *restart != RestartSpec::No {
            applied
                .takes
                .push("starts after its end, until it is killed".to_owned());
        }
        self.isolate(core_scheduling, &mut applied);
        bind_memory(memory_nodes, as_is, &mut applied);
        for NodeSpec {
            // The setting is the guest's own.
            cpus: _,
            memory: _,
            distances: _,
            host_node,
        } in nodes
        {
            bind_node(host_node, as_is, &mut applied);
        }
        self.join(share_group.as_deref(), &mut applied)?;
        self.choose_cell(cell, &mut applied);
        self.choose_cells(cells, as_is, &mut applied);
        Ok(applied)
    }

    /// Turns core scheduling on, if the snapshot or the caller does.
    fn isolate(&self, core_scheduling: &mut bool, applied: &mut Applied) {
        if self.core_scheduling && !*core_scheduling {
            applied
                .withheld
                .push("core scheduling is on, stronger than the snapshot's".to_owned());
        }
        *core_scheduling |= self.core_scheduling;
        if *core_scheduling {
            applied
                .takes
                .push("cores of the host, on which nothing else runs while it does".to_owned());
        }
    }

    fn weigh(&self, cpu_weight: &mut Option<u16>, applied: &mut Applied) {
        if cpu_weight.is_some() && self.cpu_weight != *cpu_weight {
            applied.withheld.push(match self.cpu_weight {
                Some(weight) => format!("its weight of CPUs is {weight}, not the snapshot's"),
                None => "it has no weight of CPUs of its own; --cpu-weight gives it one".to_owned(),
            });
        }
        *cpu_weight = self.cpu_weight;
    }

    /// Checks that the caller named the manifest's share group, `there`, if any. `grant` refuses a group that
    /// is not named again.
    fn join(&self, there: Option<&str>, applied: &mut Applied) -> Result<(), TrustError> {
        match (there, self.share_group.as_deref()) {
            (there, Some(named)) if there != Some(named) => {
                return Err(TrustError::NoShareGroup {
                    named: named.to_owned(),
                    there: there.map(str::to_owned),
                });
            }
            (Some(group), Some(_)) => applied.takes.push(format!("memory of the share group {group}")),
            _ => {}
        }
        Ok(())
    }

    /// Keeps the list of cells that the VM may use if `as_is`, else removes it.
    fn choose_cells(&self, cells: &mut Vec<u16>, as_is: bool, applied: &mut Applied) {
        if !cells.is_empty() && !as_is {
            let named = cells.iter().map(u16::to_string).collect::<Vec<_>>().join(", ");
            cells.clear();
            applied.withheld.push(format!(
                "its memory may come from any cell, not only from cells {named}; --as-is keeps it to them"
            ));
        }
        // The list may be that of another cluster, without the cell that the caller chooses.
        if let Some(chosen) = self
            .cell
            .filter(|chosen| !cells.is_empty() && !cells.contains(chosen))
        {
            cells.push(chosen);
        }
    }

    fn choose_cell(&self, cell: &mut Option<u16>, applied: &mut Applied) {
        if cell.is_some() && self.cell != *cell {
            applied.withheld.push(match self.cell {
                Some(number) => format!("it runs in cell {number}, not in the snapshot's"),
                None => "no cell is chosen for it; --cell chooses one".to_owned(),
            });
        }
        *cell = self.cell;
    }
}

/// Removes the promise of memory that the snapshot's VM had.
fn drop_promise(memory_min: &mut Option<Size>, applied: &mut Applied) {
    if memory_min.take().is_some() {
        let why = "nothing of its memory is kept from other programs, as the snapshot's was";
        applied.withheld.push(why.to_owned());
    }
}

/// Keeps the binding of all memory to nodes of the host if `as_is`, else removes it.
fn bind_memory(memory_nodes: &mut Vec<u32>, as_is: bool, applied: &mut Applied) {
    if memory_nodes.is_empty() {
        return;
    }
    let nodes: Vec<String> = memory_nodes.iter().map(u32::to_string).collect();
    let nodes = nodes.join(", ");
    if as_is {
        applied.takes.push(format!("memory of the host's nodes {nodes}"));
    } else {
        memory_nodes.clear();
        applied.withheld.push(format!(
            "its memory is not bound to the host's nodes {nodes}; --as-is binds it"
        ));
    }
}

/// Keeps the binding of a guest's node to one of the host if `as_is`, else removes it.
fn bind_node(host_node: &mut Option<u32>, as_is: bool, applied: &mut Applied) {
    let Some(node) = *host_node else { return };
    if as_is {
        applied.takes.push(format!("memory of the host's node {node}"));
    } else {
        *host_node = None;
        applied.withheld.push(format!(
            "its memory is not bound to the host's node {node}; --as-is binds it"
        ));
    }
}
