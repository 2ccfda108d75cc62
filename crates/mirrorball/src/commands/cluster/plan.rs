//! The plan of a cluster for this host: its cells, hosts and users.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use config::cluster::{
    BorrowingSpec, CellPlan, ClusterSpec, HostNodes, NetworkSpec, PressureSpec, RegionSpec, SchedulingSpec,
    Site, UserPlan,
};
use hostfiles::passwd;
use hostinfo::facts;
use miette::{IntoDiagnostic, Result, miette};

/// Plan of a cluster for this host.
pub(super) struct Planned {
    pub(super) cells: Vec<CellPlan>,
    /// Numbers of the cells whose memory is a share of that of their nodes.
    pub(super) shares: BTreeSet<u16>,
    /// None if the file names no hosts.
    pub(super) site: Option<Site>,
    /// Users that it admits.
    pub(super) users: Vec<UserPlan>,
    /// Borrowing of memory between the cells.
    pub(super) borrowing: BorrowingSpec,
    /// Reaction to a shortage of the host's memory.
    pub(super) pressure: PressureSpec,
    /// Scheduler of the CPUs of the cells.
    pub(super) scheduling: SchedulingSpec,
    /// Regions of memory that its VMs share.
    pub(super) regions: Vec<RegionSpec>,
    /// Networks of its VMs' cards of a subnet.
    pub(super) networks: Vec<NetworkSpec>,
}

/// Returns the file's plan for this host, or the default plan without a file.
pub(super) fn planned(file: Option<&PathBuf>, count: Option<u16>, here: Option<&str>) -> Result<Planned> {
    let host = host_nodes()?;
    let Some(file) = file else {
        let spec = match count {
            Some(count) => ClusterSpec::of_count(&host, count)?,
            None => ClusterSpec::of_nodes(&host),
        };
        return Ok(Planned {
            cells: spec.cells(&host, None, "this host", "")?,
            shares: spec.cells_with_shares(),
            site: None,
            users: Vec::new(),
            borrowing: BorrowingSpec::default(),
            pressure: PressureSpec::default(),
            scheduling: SchedulingSpec::default(),
            regions: Vec::new(),
            networks: Vec::new(),
        });
    };
    let (spec, name, text) = read(file)?;
    let own = nix::unistd::gethostname().into_diagnostic()?;
    let own = own.to_string_lossy();
    let mut site = spec.site(here.unwrap_or(&own), &folder(file)?)?;
    if let Some(site) = &mut site {
        site.file = Some(std::path::absolute(file).into_diagnostic()?);
    }
    let here = site.as_ref().map(|site| &site.here[..]);
    Ok(Planned {
        cells: spec.cells(&host, here, &name, &text)?,
        shares: spec.cells_with_shares(),
        users: spec.users(passwd::uid_of, &name, &text)?,
        borrowing: spec.borrowing.clone().unwrap_or_default(),
        pressure: spec.pressure.clone().unwrap_or_default(),
        scheduling: spec.scheduling.clone().unwrap_or_default(),
        regions: spec.shared.clone(),
        networks: spec.networks.clone(),
        site,
    })
}

/// Reads a cluster file; returns the spec, the file's name, and its text.
pub(super) fn read(file: &Path) -> Result<(ClusterSpec, String, String)> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        miette!(
            help = "check the path",
            "cluster file {}: {error}",
            file.display()
        )
    })?;
    let name = file.display().to_string();
    Ok((ClusterSpec::parse(&name, &text)?, name, text))
}

/// Returns the folder of a file.
pub(super) fn folder(file: &Path) -> Result<PathBuf> {
    let file = std::path::absolute(file).into_diagnostic()?;
    Ok(file.parent().map(Path::to_owned).unwrap_or_default())
}

/// Returns this host's nodes, with the CPUs that this process may use.
pub(super) fn host_nodes() -> Result<HostNodes> {
    let facts: knowledge::Base = hostinfo::topology::discover().into_iter().collect();
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).into_diagnostic()?;
    let is_allowed = |cpu| allowed.is_set(cpu).unwrap_or(false);
    Ok(facts::nodes(&knowledge::Machine::of(&facts), is_allowed))
}
