//! Costs of messages between cells, and of memory that one cell writes and another reads. The best source
//! counts: an assertion on the two cells, a measurement between their CPUs, one between CPUs of their caches,
//! one between CPUs of their nodes, and last ACPI's distance.
//!
//! So measured pairs also stand for unmeasured ones like them (Multikernel, SOSP '09, section 4.9: one base
//! for measurements and for facts that can't be measured).

use std::collections::{BTreeMap, BTreeSet};

use crate::fact::Fact;
use crate::machine::Host;
use crate::{Base, Machine};

/// The transport between cells of one host: rings in memory.
pub const RING: &str = "ring";
/// Bulk memory, which the receiver copies.
pub const COPY: &str = "copy";
/// The transport between hosts that share memory: rings in it.
pub const SHARED: &str = "shared";
/// The transport that all hosts have.
pub const TLS: &str = "tls";

/// Default latency of a message between two CPUs that share a cache, nanoseconds: half a round trip of `make
/// bench-channels`.
const NEAR_NS: u64 = 140;
/// ACPI's distance of a node to itself.
const NEAR_DISTANCE: i64 = 10;
/// Default latency between hosts, nanoseconds: an assumption for two hosts in one room.
const ELSEWHERE_NS: u64 = 50_000;
/// Default cost of a message for its sender, nanoseconds: 36 million a second, by the same measurement.
pub const SEND_NS: u64 = 28;

/// A group of equivalent CPUs, from narrow to wide.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum CpuGroup {
    Cell(u16),
    Cache(String, String),
    Node(String, i64),
}

/// Sorted measurements between CPUs of two groups.
type ByGroups = BTreeMap<(CpuGroup, CpuGroup), Vec<u64>>;

/// A cell, from the facts.
#[derive(Clone, Debug, Default)]
struct Cell {
    host: String,
    cpus: BTreeSet<i64>,
    nodes: BTreeSet<i64>,
    /// Groups of its first CPU, the cell's own first.
    groups: Vec<CpuGroup>,
    /// NUMA node of the cell.
    node: Option<i64>,
}

/// Selects the transport of a link between two cells: the one with the shortest time from send to receipt,
/// the first of equal ones. A transport without a known time counts as fast as [`TLS`].
///
/// All callers share this decision: cells that make a link, the fact `transport(A, B, Transport)`, and the
/// costs of multicast trees.
pub fn choose<'a>(ns: &BTreeMap<String, u64>, transports: &[&'a str]) -> Option<&'a str> {
    let assumed_ns = ns.get(TLS).copied().unwrap_or(ELSEWHERE_NS);
    let of = |transport: &&&str| ns.get(**transport).copied().unwrap_or(assumed_ns);
    transports.iter().min_by_key(of).copied()
}

/// Message costs between all cells of the facts.
#[derive(Clone, Debug)]
pub struct RouteCosts {
    cells: BTreeMap<u16, Cell>,
    hosts: BTreeMap<String, Host>,
    measured_ns: ByGroups,
    copied_mb_s: ByGroups,
    /// Latency between CPUs of one node, by host.
    near_ns: BTreeMap<String, u64>,
    /// Latency between hosts, by transport.
    hosts_ns: BTreeMap<(String, String), BTreeMap<String, u64>>,
    asserted_ns: BTreeMap<(u16, u16), BTreeMap<String, u64>>,
    /// Hosts that share memory, each pair in both orders.
    sharing: BTreeSet<(String, String)>,
    send_ns: u64,
}

impl RouteCosts {
    /// Computes the costs from the facts in `base`.
    pub fn of(base: &Base) -> Self {
        let machine = Machine::of(base);
        let mut cells = cells(base);
        let groups = groups(&machine, &cells);
        let node_of = |host: &str, cpu| {
            let groups: &Vec<CpuGroup> = groups.get(&(host.to_owned(), cpu))?;
            groups.iter().find_map(|group| match group {
                CpuGroup::Node(_, node) => Some(*node),
                _ => None,
            })
        };
        for (number, cell) in &mut cells {
            let first = cell.cpus.first().copied();
            cell.node = cell.nodes.first().copied();
            cell.node = cell.node.or_else(|| node_of(&cell.host, first?));
            let own = first.and_then(|cpu| groups.get(&(cell.host.clone(), cpu)).cloned());
            cell.groups = own.unwrap_or_else(|| vec![CpuGroup::Cell(*number)]);
            let has_node = cell
                .groups
                .iter()
                .any(|group| matches!(group, CpuGroup::Node(..)));
            if let Some(node) = cell.node.filter(|_| !has_node) {
                cell.groups.push(CpuGroup::Node(cell.host.clone(), node));
            }
        }
        let measured_ns = by_group(between_cpus(base, "latency_ns", RING), &groups);
        let mut near_ns: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for ((from, to), all) in &measured_ns {
            if let CpuGroup::Node(host, _) = from
                && from == to
            {
                near_ns.entry(host.clone()).or_default().extend(all);
            }
        }
        let near_ns = near_ns.into_iter();
        let mut sends: Vec<u64> = between_cpus(base, "send_ns", RING).map(|(.., ns)| ns).collect();
        Self {
            hosts: machine
                .hosts
                .into_iter()
                .map(|host| (host.name.clone(), host))
                .collect(),
            near_ns: near_ns
                .filter_map(|(host, mut all)| Some((host, median(&mut all)?)))
                .collect(),
            hosts_ns: hosts_ns(base),
            asserted_ns: asserted_ns(base),
            sharing: sharing(base),
            send_ns: median(&mut sends).unwrap_or(SEND_NS),
            copied_mb_s: by_group(between_cpus(base, "bandwidth_mb_s", COPY), &groups),
            cells,
            measured_ns,
        }
    }

    /// Returns the numbers of all cells.
    pub fn cells(&self) -> impl Iterator<Item = u16> {
        self.cells.keys().copied()
    }

    /// Returns the sender's cost of a message, nanoseconds: the median of the measurements.
    pub fn send_ns(&self) -> u64 {
        self.send_ns
    }

    /// Returns the host and the first NUMA node of a cell. An unknown cell is on no host.
    pub fn node(&self, cell: u16) -> (&str, Option<i64>) {
        let cell = self.cells.get(&cell);
        cell.map_or(("", None), |cell| (&cell.host, cell.node))
    }

    /// Returns the time from the send of a message to its receipt by a polling receiver, nanoseconds, for
    /// each transport between the two cells.
    pub fn between(&self, from: u16, to: u16) -> BTreeMap<String, u64> {
        let mut known = match (self.cells.get(&from), self.cells.get(&to)) {
            (Some(one), Some(other)) if one.host == other.host => {
                BTreeMap::from([(RING.to_owned(), self.within_host_ns(one, other))])
            }
            (Some(one), Some(other)) => self.between_hosts(&one.host, &other.host),
            _ => BTreeMap::from([(TLS.to_owned(), ELSEWHERE_NS)]),
        };
        known.extend(self.asserted_ns.get(&(from, to)).cloned().unwrap_or_default());
        // A receiver that sleeps is woken over the stream in any case.
        if self.transports(from, to).contains(&SHARED) {
            let tls_ns = known.get(TLS).copied().unwrap_or(ELSEWHERE_NS);
            known.entry(SHARED.to_owned()).or_insert(tls_ns);
        }
        known
    }

    /// Returns the transports between two cells: the ring within a host; else shared memory, if the hosts
    /// have it, and TLS.
    pub fn transports(&self, from: u16, to: u16) -> &'static [&'static str] {
        let host = |cell| self.cells.get(&cell).map(|cell: &Cell| cell.host.clone());
        match host(from).zip(host(to)) {
            Some((one, other)) if one == other => &[RING],
            Some(pair) if self.sharing.contains(&pair) => &[SHARED, TLS],
            _ => &[TLS],
        }
    }

    /// Returns the transport that [`choose`] selects for two cells.
    pub fn transport(&self, from: u16, to: u16) -> Option<&'static str> {
        choose(&self.between(from, to), self.transports(from, to))
    }

    /// Returns the latency of a message by that transport, nanoseconds.
    pub fn fastest_ns(&self, from: u16, to: u16) -> u64 {
        let between = self.between(from, to);
        let chosen = choose(&between, self.transports(from, to));
        let known = chosen.and_then(|transport| between.get(transport));
        known.copied().unwrap_or(ELSEWHERE_NS)
    }

    /// Returns the measured latency between two cells of one host, or within one cell, nanoseconds; `None`
    /// without a measurement between their CPUs or equivalent ones.
    pub fn measured_ns(&self, from: u16, to: u16) -> Option<u64> {
        nearest(&self.measured_ns, self.cells.get(&from)?, self.cells.get(&to)?)
    }

    /// Returns the measured rate at which `to` copies memory that `from` has just written, MB/s; `None` as
    /// above.
    pub fn copied_mb_s(&self, from: u16, to: u16) -> Option<u64> {
        nearest(&self.copied_mb_s, self.cells.get(&from)?, self.cells.get(&to)?)
    }

    /// Returns ACPI's distance between the nodes of two cells of one host, if known.
    pub fn distance(&self, from: u16, to: u16) -> Option<i64> {
        self.distance_of(self.cells.get(&from)?, self.cells.get(&to)?)
    }

    fn within_host_ns(&self, from: &Cell, to: &Cell) -> u64 {
        let measured = nearest(&self.measured_ns, from, to);
        measured.unwrap_or_else(|| self.by_distance_ns(from, to))
    }

    fn distance_of(&self, from: &Cell, to: &Cell) -> Option<i64> {
        let host = self.hosts.get(&from.host).filter(|_| from.host == to.host)?;
        let group = |number| host.nodes.iter().position(|node| node.number == number);
        let distance = *host.distances.get(group(from.node?)?)?.get(group(to.node?)?)?;
        Some(distance).filter(|distance| *distance > 0)
    }

    /// Returns a latency proportional to the distance, nanoseconds.
    fn by_distance_ns(&self, from: &Cell, to: &Cell) -> u64 {
        let distance = self.distance_of(from, to).unwrap_or(NEAR_DISTANCE);
        let near_ns = self.near_ns.get(&from.host).copied().unwrap_or(NEAR_NS);
        near_ns * distance.unsigned_abs() / NEAR_DISTANCE.unsigned_abs()
    }

    fn between_hosts(&self, from: &str, to: &str) -> BTreeMap<String, u64> {
        let known = |from: &str, to: &str| self.hosts_ns.get(&(from.to_owned(), to.to_owned())).cloned();
        // A measurement of the other direction is a good estimate.
        let mut all = known(to, from).unwrap_or_default();
        all.extend(known(from, to).unwrap_or_default());
        all.entry(TLS.to_owned()).or_insert(ELSEWHERE_NS);
        all
    }

    /// `message_ns(From, To, Transport, Ns)` and `transport(From, To, Transport)` of all cells, for rules to
    /// conclude from.
    pub fn facts(&self) -> Vec<Fact> {
        let pairs = self
            .cells()
            .flat_map(|from| self.cells().map(move |to| (from, to)));
        let pairs = pairs.filter(|(from, to)| from != to);
        let facts = pairs.flat_map(|(from, to)| {
            let [one, other] = [from, to].map(|cell| i64::from(cell).into());
            let pair = [one, other];
            let chosen = self.transport(from, to).map(|transport| {
                let [one, other] = pair.clone();
                Fact::new("transport", [one, other, transport.into()])
            });
            let costs = self.between(from, to).into_iter().map(move |(transport, ns)| {
                let [one, other] = pair.clone();
                let ns = i64::try_from(ns).unwrap_or(i64::MAX);
                Fact::new("message_ns", [one, other, transport.as_str().into(), ns.into()])
            });
            chosen.into_iter().chain(costs)
        });
        facts.collect()
    }
}

fn number(fact: &Fact, group: usize) -> Option<u16> {
    u16::try_from(fact.number(group)?).ok()
}

fn cells(base: &Base) -> BTreeMap<u16, Cell> {
    let of = |fact: &Fact| Some((number(fact, 0)?, fact.text(1)?.to_owned()));
    let of_host = |(number, host)| {
        let cell = Cell {
            host,
            ..Cell::default()
        };
        (number, cell)
    };
    let mut cells: BTreeMap<u16, Cell> = base.named("cell").filter_map(of).map(of_host).collect();
    for (kind, of_cell) in [
        (
            "cell_cpu",
            (|cell| &mut cell.cpus) as fn(&mut Cell) -> &mut BTreeSet<i64>,
        ),
        ("cell_node", |cell| &mut cell.nodes),
    ] {
        for fact in base.named(kind) {
            let cell = number(fact, 0).and_then(|number| cells.get_mut(&number));
            if let (Some(cell), Some(of_it)) = (cell, fact.number(1)) {
                of_cell(cell).insert(of_it);
            }
        }
    }
    cells
}

/// Returns the groups of each CPU of each host.
fn groups(machine: &Machine, cells: &BTreeMap<u16, Cell>) -> BTreeMap<(String, i64), Vec<CpuGroup>> {
    let mut groups: BTreeMap<(String, i64), Vec<CpuGroup>> = BTreeMap::new();
    for (number, cell) in cells {
        for cpu in &cell.cpus {
            let of_cpu = groups.entry((cell.host.clone(), *cpu)).or_default();
            of_cpu.push(CpuGroup::Cell(*number));
        }
    }
    for host in &machine.hosts {
        for node in &host.nodes {
            let caches = node.caches.iter().flat_map(|cache| {
                let group = CpuGroup::Cache(host.name.clone(), cache.name.clone());
                cache.cpus.iter().map(move |cpu| (*cpu, group.clone()))
            });
            let of_node = |cpu: i64| (cpu, CpuGroup::Node(host.name.clone(), node.number));
            for (cpu, group) in caches.chain(node.cpus.iter().map(|cpu| of_node(cpu.number))) {
                groups.entry((host.name.clone(), cpu)).or_default().push(group);
            }
        }
    }
    groups
}

/// Returns the measurements of a transport: host, source CPU, target CPU, value.
fn between_cpus<'a>(
    base: &'a Base,
    kind: &'a str,
    transport: &'a str,
) -> impl Iterator<Item = (&'a str, i64, i64, u64)> {
    let of_it = base
        .named(kind)
        .filter(move |fact| fact.text(3) == Some(transport));
    of_it.filter_map(|fact| {
        let value = u64::try_from(fact.number(4)?).ok()?;
        Some((fact.text(0)?, fact.number(1)?, fact.number(2)?, value))
    })
}

fn by_group<'a>(
    measured: impl Iterator<Item = (&'a str, i64, i64, u64)>,
    groups: &BTreeMap<(String, i64), Vec<CpuGroup>>,
) -> ByGroups {
    let mut all = ByGroups::new();
    for (host, from, to, value) in measured {
        let [from, to] = [from, to].map(|cpu| groups.get(&(host.to_owned(), cpu)));
        for (from, to) in from.into_iter().flatten().zip(to.into_iter().flatten()) {
            let pair = (from.clone(), to.clone());
            all.entry(pair).or_default().push(value);
        }
    }
    all.values_mut().for_each(|all| all.sort_unstable());
    all
}

/// Returns the median measurement between the narrowest groups of two cells.
fn nearest(measured: &ByGroups, from: &Cell, to: &Cell) -> Option<u64> {
    let alike = from
        .groups
        .iter()
        .flat_map(|from| to.groups.iter().map(move |to| (from, to)));
    // Only groups of the same kind are compared: cells, caches or nodes.
    let mut alike = alike.filter(|(from, to)| std::mem::discriminant(*from) == std::mem::discriminant(*to));
    alike.find_map(|(from, to)| {
        let all = measured.get(&(from.clone(), to.clone()))?;
        all.get(all.len() / 2).copied()
    })
}

fn hosts_ns(base: &Base) -> BTreeMap<(String, String), BTreeMap<String, u64>> {
    let mut all: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for fact in base.named("host_latency_ns") {
        let ns = fact.number(3).and_then(|ns| u64::try_from(ns).ok());
        if let (Some(from), Some(to), Some(transport), Some(ns)) =
            (fact.text(0), fact.text(1), fact.text(2), ns)
        {
            let pair = (from.to_owned(), to.to_owned());
            all.entry(pair).or_default().insert(transport.to_owned(), ns);
        }
    }
    all
}

fn sharing(base: &Base) -> BTreeSet<(String, String)> {
    let pairs = base.named("shares_memory").filter_map(|fact| {
        let (one, other) = (fact.text(0)?.to_owned(), fact.text(1)?.to_owned());
        Some([(one.clone(), other.clone()), (other, one)])
    });
    pairs.flatten().collect()
}

fn asserted_ns(base: &Base) -> BTreeMap<(u16, u16), BTreeMap<String, u64>> {
    let mut all: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for fact in base.named("message_ns") {
        let ns = fact.number(3).and_then(|ns| u64::try_from(ns).ok());
        if let (Some(from), Some(to), Some(transport), Some(ns)) =
            (number(fact, 0), number(fact, 1), fact.text(2), ns)
        {
            all.entry((from, to))
                .or_default()
                .insert(transport.to_owned(), ns);
        }
    }
    all
}

/// Returns the median; `None` for an empty slice.
pub(crate) fn median<T: Copy + Ord>(all: &mut [T]) -> Option<T> {
    all.sort_unstable();
    all.get(all.len() / 2).copied()
}

#[cfg(test)]
mod tests;
