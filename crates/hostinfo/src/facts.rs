//! All facts of this host and its cluster.
//!
//! Facts of the host have three sources (Multikernel, SOSP '09, section 4.9): they are found
//! ([`crate::topology`]), measured ([`crate::measure`]), or asserted by a user in a file. A later source
//! corrects an earlier one, so assertions count most. Facts of the cells come from the cluster's files
//! ([`registry::cluster::files`]) and a cell's answer.
//!
//! Cells plan multicast trees by [`all`], monitors make a spanning VM's nodes from it, and `mirrorball
//! topology`, `knowledge` and `cluster` print it.

use std::path::{Path, PathBuf};
use std::{fs, io};

use config::ConfigError;
use config::cluster::{CellPlan, ClusterSpec, HostNode, HostNodes, Site};
use knowledge::fact::{self, FactError};
use knowledge::{Base, Fact, Machine};
use registry::cluster::files::Files;
use registry::runtime;

use crate::measure::{self, MeasurementCache, Measurements};
use crate::topology;

/// The file in the data directory with the facts that a user asserts of this machine.
const ASSERTED: &str = "asserted.facts";

/// A failure to read facts from a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file can't be read.
    #[error("could not read {}: {source}", path.display())]
    Unreadable {
        /// Path of the file of facts.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file can't be written.
    #[error("could not write {}: {source}", path.display())]
    Unwritable {
        /// Path of the file of facts.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A line of the file is no fact.
    #[error("{}: {source}", path.display())]
    Wrong {
        /// Path of the file of facts.
        path: PathBuf,
        /// The line and the help.
        source: FactError,
    },
}

/// The facts of this host: found, measured since it started, and asserted.
///
/// # Errors
/// If the file of asserted facts is wrong.
pub fn host() -> Result<Base, FileError> {
    let mut base = without_asserted();
    base.learn(asserted()?);
    Ok(base)
}

/// The facts of this host that were found, or measured since it started.
fn without_asserted() -> Base {
    let mut base: Base = topology::discover().into_iter().collect();
    if let Ok(runtime) = runtime::directory() {
        let measured = MeasurementCache::at(&runtime).read(&topology::host_name(), &measure::allowed());
        base.learn(measured.into_iter().flat_map(|measured| measured.facts));
    }
    base
}

/// The asserted facts that count in this host's cluster.
#[derive(Debug)]
pub struct InForce {
    /// The facts: those of the user's file or, while it is wrong, those that it had before.
    pub facts: Vec<Fact>,
    /// The fault of the user's file, if the former facts count.
    pub fault: Option<FileError>,
}

impl InForce {
    /// Reads the user's file.
    ///
    /// # Errors
    /// If the file is wrong, and no cell of the cluster has read a right one before.
    pub fn read(files: &Files) -> Result<Self, FileError> {
        Self::of(asserted_file().as_deref(), &files.asserted_facts())
    }

    /// As [`Self::read`], and keeps a right file for the time when it is wrong.
    ///
    /// # Errors
    /// As [`Self::read`], or if the copy can't be written.
    pub fn read_and_keep(files: &Files) -> Result<Self, FileError> {
        let in_force = Self::read(files)?;
        if in_force.fault.is_none() {
            keep(&in_force.facts, &files.asserted_facts())?;
        }
        Ok(in_force)
    }

    /// The facts of `file`, of which `kept` is a former copy.
    fn of(file: Option<&Path>, kept: &Path) -> Result<Self, FileError> {
        let file = file.filter(|file| file.exists());
        match file.map_or_else(|| Ok(Vec::new()), read) {
            Ok(facts) => Ok(Self { facts, fault: None }),
            Err(fault) => match read(kept) {
                Ok(facts) => Ok(Self {
                    facts,
                    fault: Some(fault),
                }),
                Err(_) => Err(fault),
            },
        }
    }
}

/// Writes facts to a file whole.
fn keep(facts: &[Fact], file: &Path) -> Result<(), FileError> {
    let lines: String = facts.iter().map(|fact| format!("{fact}\n")).collect();
    hostfiles::replace_file(file, hostfiles::private::FILE_MODE, lines.as_bytes()).map_err(|source| {
        FileError::Unwritable {
            path: file.to_owned(),
            source,
        }
    })
}

/// The file with the facts that a user asserts of this machine; there may be none.
pub fn asserted_file() -> Option<PathBuf> {
    diskstore::image::data_directory().map(|data| data.join(ASSERTED))
}

/// The facts that a user asserts of this machine.
///
/// # Errors
/// If a line of the file is no fact.
pub fn asserted() -> Result<Vec<Fact>, FileError> {
    let file = asserted_file().filter(|file| file.exists());
    file.map_or_else(|| Ok(Vec::new()), |file| read(&file))
}

/// The facts in a file.
///
/// # Errors
/// If it can't be read or a line is no fact; the error names the file and the line.
pub fn read(file: &Path) -> Result<Vec<Fact>, FileError> {
    let path = || file.to_owned();
    let text = fs::read_to_string(file).map_err(|source| FileError::Unreadable { path: path(), source })?;
    fact::parse(&text).map_err(|source| FileError::Wrong { path: path(), source })
}

/// Measures this host and its latency to the others of its cluster, and keeps the results in the runtime
/// directory. With `at_once` it does nothing if another process is measuring.
///
/// # Errors
/// If the results can't be kept.
pub fn measure(at_once: bool) -> io::Result<()> {
    let runtime = runtime::directory()?;
    let kept = MeasurementCache::at(&runtime);
    let Some(_turn) = kept.turn(at_once)? else {
        return Ok(());
    };
    let (name, allowed) = (topology::host_name(), measure::allowed());
    let found: Base = topology::discover().into_iter().collect();
    let mut facts = measure::measure(&found, &allowed, measure::LIMIT);
    if let Some(site) = Files::at(&runtime).site()? {
        facts.extend(measure::reach(&site, &name));
    }
    kept.write(&name, &Measurements { cpus: allowed, facts })
}

/// Whether measurements of this host since its start are kept.
pub fn is_measured() -> bool {
    let kept = runtime::directory().map(|runtime| MeasurementCache::at(&runtime));
    kept.is_ok_and(|kept| kept.read(&topology::host_name(), &measure::allowed()).is_some())
}

/// The nodes of a machine's first host, with their memory and those of their CPUs that are `allowed`.
pub fn nodes(machine: &Machine, allowed: impl Fn(usize) -> bool) -> HostNodes {
    let nodes = machine.hosts.first().into_iter().flat_map(|host| &host.nodes);
    let known = nodes.filter_map(|node| {
        let cpus = node
            .cpus
            .iter()
            .filter_map(|cpu| usize::try_from(cpu.number).ok());
        let has = HostNode {
            cpus: cpus.filter(|cpu| allowed(*cpu)).collect(),
            memory_bytes: u64::try_from(node.memory_bytes).unwrap_or(0),
        };
        Some((u32::try_from(node.number).ok()?, has))
    });
    HostNodes(known.collect())
}

/// The cells into which a machine's first host is divided: `count`, or one for each node.
///
/// # Errors
/// If the host has too few CPUs for them.
pub fn division(machine: &Machine, count: Option<u16>) -> Result<Vec<CellPlan>, ConfigError> {
    let nodes = nodes(machine, |_| true);
    let spec = match count {
        Some(count) => ClusterSpec::of_count(&nodes, count)?,
        None => ClusterSpec::of_nodes(&nodes),
    };
    spec.cells(&nodes, None, "the machine", "")
}

/// The facts of cells: host, CPUs and nodes of each. `here` is this host's name in facts.
pub fn cells(plan: &[CellPlan], here: &str, site: Option<&Site>) -> Vec<Fact> {
    let facts = plan.iter().flat_map(|cell| {
        let number = i64::from(cell.number);
        // The cluster file may have another name for this host.
        let other = cell
            .host
            .as_deref()
            .filter(|host| site.is_some_and(|site| site.here != *host));
        let host = Fact::new("cell", [number.into(), other.unwrap_or(here).into()]);
        let cpus = cell.cpus.iter().filter_map(|cpu| i64::try_from(*cpu).ok());
        let cpus = cpus.map(move |cpu| Fact::new("cell_cpu", [number.into(), cpu.into()]));
        let nodes = cell.nodes.iter();
        let nodes = nodes.map(move |node| Fact::new("cell_node", [number.into(), i64::from(*node).into()]));
        [host].into_iter().chain(cpus).chain(nodes)
    });
    facts.collect()
}

/// The facts of the cluster that is up here, if any: this host's cells, and the numbers of other hosts'
/// cells.
pub fn cluster(files: &Files) -> io::Result<Vec<Fact>> {
    let site = files.site()?;
    let mut facts = cells(&files.plan()?, &topology::host_name(), site.as_ref());
    let hosts = site
        .iter()
        .flat_map(|site| site.hosts.iter().filter(|host| host.name != site.here));
    facts.extend(hosts.flat_map(|host| {
        let cells = host.cells.iter().map(|cell| i64::from(*cell));
        cells.map(|cell| Fact::new("cell", [cell.into(), host.name.as_str().into()]))
    }));
    let here = topology::host_name();
    facts.extend(site.iter().flat_map(|site| sharing(site, &here)));
    Ok(facts)
}

/// Which hosts of a cluster share memory. `here` is this host's name in facts.
fn sharing(site: &Site, here: &str) -> Vec<Fact> {
    let sharing: Vec<&str> = site
        .hosts
        .iter()
        .filter(|host| host.shared_memory.is_some())
        .map(|host| if host.name == site.here { here } else { &host.name })
        .collect();
    let pairs = sharing.iter().enumerate().flat_map(|(at, one)| {
        let others = sharing[at + 1..].iter();
        others.map(|other| Fact::new("shares_memory", [(*one).into(), (*other).into()]))
    });
    pairs.collect()
}

/// Returns the facts of this host and of the cluster's cells. While the file of asserted facts is invalid,
/// its former facts count.
///
/// # Errors
/// Fails if that file is invalid and there are no former facts, or the cells can't be read.
pub fn all(files: &Files) -> io::Result<Base> {
    all_with(files, InForce::read(files).map_err(io::Error::other)?.facts)
}

/// Returns the facts of this host and of the cluster's cells, with these asserted facts.
///
/// # Errors
/// Fails if the cells can't be read.
pub fn all_with(files: &Files, asserted: Vec<Fact>) -> io::Result<Base> {
    let mut base = without_asserted();
    base.learn(asserted);
    base.learn(cluster(files)?);
    Ok(base)
}

#[cfg(test)]
mod tests {
    use knowledge::route::Costs;

    use super::*;

    fn plan(number: u16, host: Option<&str>, cpus: &[usize]) -> CellPlan {
        CellPlan {
            number,
            host: host.map(str::to_owned),
            cpus: cpus.to_vec(),
            nodes: vec![0],
            memory_bytes: 1 << 30,
        }
    }

    #[test]
    fn wrong_file_leaves_its_former_facts_in_force_and_is_refused_without_any() {
        let folder = tempfile::tempdir().unwrap();
        let (file, kept) = (folder.path().join("asserted.facts"), folder.path().join("kept"));
        let in_force = || InForce::of(Some(&file), &kept);
        let keep_now = || keep(&in_force().unwrap().facts, &kept).unwrap();
        std::fs::write(&file, "cell_cordoned(0)\ncell_cpus(1)\n").unwrap();
        let refused = in_force().unwrap_err().to_string();
        let begin = format!("{}: line 2: cell_cpus has 1 terms", file.display());
        assert!(
            refused.starts_with(&begin) && !refused.contains('\n'),
            "{refused}"
        );
        // Without a file nothing is asserted, which is right.
        assert!(InForce::of(None, &kept).unwrap().facts.is_empty());

        std::fs::write(&file, "# mine\ncell_cordoned(0)\nnic(\"a \\\"b\", \"eth0\", 1)\n").unwrap();
        let right = in_force().unwrap();
        assert!(right.fault.is_none() && right.facts.len() == 2);
        keep_now();
        std::fs::write(&file, "cell_cordoned(\n").unwrap();
        let former = in_force().unwrap();
        assert_eq!(former.facts, right.facts);
        assert!(former.fault.unwrap().to_string().contains("line 1"));
        // A removed file asserts nothing, and that counts then.
        std::fs::remove_file(&file).unwrap();
        keep_now();
        std::fs::write(&file, "x").unwrap();
        assert!(in_force().unwrap().facts.is_empty());
    }

    #[test]
    fn local_cells_get_the_host_name_used_in_facts() {
        let site = Site {
            here: "alpha".into(),
            hosts: Vec::new(),
            etcd: Vec::new(),
            runs_etcd: false,
            keys: "keys".into(),
            silence_ms: 200,
            spans: Default::default(),
            on_lost: config::cluster::OnLost::Keep,
            file: None,
        };
        let plans = [plan(0, Some("alpha"), &[4, 5]), plan(1, Some("beta"), &[])];
        let facts: Vec<String> = cells(&plans, "box", Some(&site))
            .iter()
            .map(Fact::to_string)
            .collect();
        let expected = [
            "cell(0, \"box\")",
            "cell_cpu(0, 4)",
            "cell_cpu(0, 5)",
            "cell_node(0, 0)",
            "cell(1, \"beta\")",
            "cell_node(1, 0)",
        ];
        assert_eq!(facts, expected);
        assert_eq!(cells(&plans[..1], "box", None)[0].to_string(), "cell(0, \"box\")");
    }

    #[test]
    fn malformed_file_error_names_line_and_help() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("wrong.facts");
        fs::write(&file, "# mine\nlatency_ns(\"box\", 0, 1, 300)\n").expect("written");
        let error = read(&file).expect_err("wrong").to_string();
        let said = "wrong.facts: line 2: latency_ns has 4 terms instead of 5; write `latency_ns(Host, \
            From, To, Transport, Value)`";
        assert!(error.ends_with(said), "{error}");
        let error = read(Path::new("/nowhere")).expect_err("missing").to_string();
        assert!(error.starts_with("could not read /nowhere: "), "{error}");
    }

    /// Multicast takes its costs from these facts.
    #[test]
    fn every_local_cell_pair_has_a_message_cost() {
        let mut base: Base = topology::discover().into_iter().collect();
        let plans = division(&Machine::of(&base), None).expect("a machine with CPUs");
        base.learn(cells(&plans, &topology::host_name(), None));
        let numbers: Vec<u16> = plans.iter().map(|plan| plan.number).collect();
        let costs = Costs::of(&knowledge::RouteCosts::of(&base), &numbers);
        assert_eq!(costs.node.len(), plans.len());
        assert!(costs.latency_ns.iter().flatten().all(|ns| *ns > 0));
    }
}
