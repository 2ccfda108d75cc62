//! `update`: changes the host resources that a running VM uses.

use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use config::{Size, cpulist};
use miette::{Result, miette};
use registry::control::Request;
use registry::update::{DiskUpdate, MemoryPages, MemoryReport, Pin, Update};

use super::clients::{ORDER_LIMIT, order};
use super::flags::{HostNodes, host_nodes};

/// Time limit for memory to move; the process that serves the VM gives up before.
const MEMORY_LIMIT: Duration = Duration::from_secs(630);
/// Maximum CPUs of a host.
const HOST_CPUS_MAX: usize = 1024;

/// Flags of `update`.
#[derive(Debug, clap::Args)]
pub struct UpdateArgs {
    /// Name of the VM
    vm: String,
    /// Its part of CPUs that VMs share, 1 to 10000, or none
    #[arg(long, value_name = "WEIGHT|none")]
    cpu_weight: Option<OrNone<u16>>,
    /// As many of the host's CPUs it uses at most, as 1.5, or none
    #[arg(long, value_name = "CPUS|none")]
    cpu_limit: Option<OrNone<f64>>,
    /// CPU time of its cell that it has before others, in CPUs, as 0.5, or none
    #[arg(long, value_name = "CPUS|none")]
    cpu_reservation: Option<OrNone<f64>>,
    /// Memory of the host that its processes use at most, as 700M, or none
    #[arg(long, value_name = "SIZE|none")]
    memory_limit: Option<OrNone<Size>>,
    /// Maximum guest memory in the host's memory, as 256M, of a VM that was started with --resident
    #[arg(long, value_name = "SIZE")]
    resident: Option<Size>,
    /// A vCPU and the CPUs of the host that it runs on, as 0=2 or 1=2-3, or 1=all; several times for several
    #[arg(long, value_name = "VCPU=CPUS")]
    pin: Vec<PinArg>,
    /// The host's NUMA nodes that its memory lies on, as 0 or 0-1,3, or all; pages on other nodes move
    #[arg(long, value_name = "NODES|all", value_parser = nodes_or_all)]
    memory_nodes: Option<HostNodes>,
    /// A disk, root or its place in the VM file from 0, and its limits, as root,bandwidth=50M; several times
    /// for several
    #[arg(long, value_name = "DISK[,bandwidth=SIZE|none][,operations=N|none]")]
    disk: Vec<DiskArg>,
}

/// Parses a list of nodes, or `all`, which is an empty list.
fn nodes_or_all(text: &str) -> std::result::Result<HostNodes, &'static str> {
    match text {
        "all" => Ok(HostNodes::default()),
        "" => Err("write nodes of the host, as 0 or 0-1,3, or all"),
        list => host_nodes(list),
    }
}

/// A value, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct OrNone<T>(Option<T>);

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> std::result::Result<Self, T::Err> {
        match text {
            "none" => Ok(Self(None)),
            text => text.parse().map(|value| Self(Some(value))),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct DiskArg(DiskUpdate);

impl FromStr for DiskArg {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        const HELP: &str = "write a disk and its limits, as root,bandwidth=50M or 0,operations=none";
        let mut parts = text.split(',');
        let disk = parts.next().unwrap_or_default().parse()?;
        let mut update = DiskUpdate {
            disk,
            bandwidth: None,
            operations: None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').ok_or(HELP)?;
            match key {
                "bandwidth" => {
                    let OrNone(size) = value
                        .parse::<OrNone<Size>>()
                        .map_err(|error| format!("bandwidth: {error}"))?;
                    update.bandwidth = Some(size);
                }
                "operations" => {
                    let OrNone(number) = value
                        .parse::<OrNone<u32>>()
                        .map_err(|_| "operations: write requests per second, or none")?;
                    update.operations = Some(number);
                }
                _ => return Err(format!("{key}: {HELP}")),
            }
        }
        match update.bandwidth.is_none() && update.operations.is_none() {
            true => Err(HELP.to_owned()),
            false => Ok(Self(update)),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct PinArg(Pin);

impl FromStr for PinArg {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, &'static str> {
        const HELP: &str = "write a vCPU and CPUs of the host, as 0=2 or 1=2-3, or 1=all";
        let (vcpu, cpus) = text.split_once('=').ok_or(HELP)?;
        let vcpu = vcpu.parse().map_err(|_| HELP)?;
        let cpus = match cpus {
            "all" => Vec::new(),
            list => cpulist::parse_below(list, HOST_CPUS_MAX).ok_or(HELP)?,
        };
        Ok(Self(Pin { vcpu, cpus }))
    }
}

/// Changes the host resources that a VM uses.
pub fn update(args: UpdateArgs) -> Result<ExitCode> {
    check_cpus("--cpu-limit", args.cpu_limit)?;
    check_cpus("--cpu-reservation", args.cpu_reservation)?;
    let update = Update {
        cpu_weight: args.cpu_weight.map(|OrNone(weight)| weight),
        cpu_limit: args.cpu_limit.map(|OrNone(limit)| limit),
        cpu_reservation: args.cpu_reservation.map(|OrNone(reserved)| reserved),
        memory_limit: args.memory_limit.map(|OrNone(limit)| limit),
        resident: args.resident,
        pins: args.pin.into_iter().map(|PinArg(pin)| pin).collect(),
        memory_nodes: args.memory_nodes.map(|HostNodes(nodes)| nodes),
        disks: args.disk.into_iter().map(|DiskArg(disk)| disk).collect(),
    };
    if update.is_empty() {
        return Err(miette!(
            help = "name one of --cpu-weight, --cpu-limit, --cpu-reservation, --memory-limit, --resident, \
                    --pin, --memory-nodes and --disk",
            "{}: nothing is to change",
            args.vm
        ));
    }
    let limit = if update.memory_nodes.is_some() {
        MEMORY_LIMIT
    } else {
        ORDER_LIMIT
    };
    order(&args.vm, &Request::Update(update), limit)
}

/// Checks a number of CPUs, which JSON can't have if it is not finite.
fn check_cpus(flag: &str, cpus: Option<OrNone<f64>>) -> Result<()> {
    match cpus {
        Some(OrNone(Some(cpus))) if !cpus.is_finite() => Err(miette!(
            help = "write a number of CPUs, as 1.5, or none",
            "{flag} {cpus}: no number of CPUs"
        )),
        _ => Ok(()),
    }
}

/// Prints the location of a VM's memory.
pub(super) fn print_memory(vm: &str, report: &MemoryReport) {
    match (&report.pages, &report.unknown) {
        (Some(pages), _) => println!("memory of {vm}: {}", pages_by_node(pages)),
        (None, why) => {
            let why = why.as_deref().unwrap_or("the host does not show it");
            println!("memory of {vm}: bound; where its pages are is not known: {why}");
        }
    }
}

fn pages_by_node(pages: &MemoryPages) -> String {
    let on_node = |(node, count): (&u32, &u64)| format!("{count} on node {node}");
    let nodes: Vec<_> = pages.nodes.iter().map(on_node).collect();
    match &nodes[..] {
        [] => "bound; its shard maps no page of it now".to_owned(),
        nodes => format!("pages of {} KiB: {}", pages.page_kib, nodes.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_shown_by_node_as_the_host_counts_them() {
        let pages = |nodes: &[(u32, u64)]| MemoryPages {
            page_kib: 2048,
            nodes: nodes.iter().copied().collect(),
        };
        assert_eq!(
            pages_by_node(&pages(&[(1, 12), (0, 3)])),
            "pages of 2048 KiB: 3 on node 0, 12 on node 1"
        );
        assert!(pages_by_node(&pages(&[])).starts_with("bound; "));
    }

    #[test]
    fn disks_are_limited_as_people_write_it() {
        let parsed = |text: &str| text.parse::<DiskArg>().map(|DiskArg(disk)| disk);
        let root = parsed("root,bandwidth=50M,operations=none").unwrap();
        assert_eq!(root.disk, config::DiskName::Root);
        assert_eq!(
            (root.bandwidth, root.operations),
            (Some(Some(Size(50 << 20))), Some(None))
        );
        let second = parsed("1,operations=200").unwrap();
        assert_eq!(second.disk, config::DiskName::Other(1));
        assert_eq!((second.bandwidth, second.operations), (None, Some(Some(200))));
        for wrong in [
            "",
            "root",
            "root,",
            "disk0,operations=1",
            "0,operations=-1",
            "0,operations=many",
            "0,bandwidth=x",
            "0,speed=1",
            "70000,operations=1",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn pins_and_values_that_may_be_none_are_read_as_people_write_them() {
        let pin = |vcpu, cpus: &[usize]| {
            PinArg(Pin {
                vcpu,
                cpus: cpus.to_vec(),
            })
        };
        assert_eq!("0=2".parse(), Ok(pin(0, &[2])));
        assert_eq!("253=0-1,1000".parse(), Ok(pin(253, &[0, 1, 1000])));
        assert_eq!("1=all".parse(), Ok(pin(1, &[])));
        for wrong in [
            "", "0", "=1", "0=", "-1=2", "256=1", "0=1024", "0=2-1", "0=none", "a=b",
        ] {
            assert!(wrong.parse::<PinArg>().is_err(), "{wrong}");
        }
        assert_eq!(nodes_or_all("0-1,3"), Ok(HostNodes(vec![0, 1, 3])));
        assert_eq!(nodes_or_all("all"), Ok(HostNodes(Vec::new())));
        for wrong in ["", "1024", "1-0", "none", "-1"] {
            assert!(nodes_or_all(wrong).is_err(), "{wrong}");
        }
        assert_eq!("none".parse(), Ok(OrNone::<u16>(None)));
        assert_eq!("7".parse(), Ok(OrNone(Some(7_u16))));
        assert!("many".parse::<OrNone<u16>>().is_err());
    }
}
