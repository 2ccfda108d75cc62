//! Other nodes: processes of this host, or processes that users have started on other hosts.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use dsm::{Method, Shape};
use dsm_bench::{Peer, Session};
use miette::{Result, miette};
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

use super::{HostArgs, Poll, lost, peers, print_notes};

/// Time limit for the others to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Arguments that name the nodes.
#[derive(Debug, Args)]
pub struct NodesArgs {
    /// Processes of this host
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=16))]
    nodes: u16,
    /// Other hosts instead, where `mirrorball dsm serve` runs, as 10.0.0.2:7000,10.0.0.3:7000; NAME@ before
    /// each with keys
    #[arg(
        long,
        value_name = "ADDRESSES",
        value_delimiter = ',',
        conflicts_with = "nodes"
    )]
    peers: Vec<String>,
    /// Threads on each node that serve faults, each a part of the pages
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=32))]
    lanes: u16,
    /// Copy pages into place as kernels before 6.4 need it
    #[arg(long)]
    copy: bool,
    /// Give pages for writing that are read and then written by one node after the other
    #[arg(long)]
    migratory: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// A memory whose node 0 is this process.
#[derive(Debug)]
pub struct Nodes {
    pub session: Session,
    children: Vec<Child>,
    pub count: u16,
    pub realtime: bool,
    /// Whether pages are prefetched.
    pub ahead: bool,
    /// A CPU that node 0 does not use, if there is one.
    pub other_cpu: Option<usize>,
    /// Whether its nodes communicate over shared memory.
    pub by_memory: bool,
}

impl NodesArgs {
    /// Starts or connects to the others, with a memory of this many pages.
    pub fn start(&self, pages: u32) -> Result<Nodes> {
        self.start_placed(pages, false)
    }

    /// Possible placements of nodes here, as [`NodesArgs::start_placed`] takes them.
    pub fn placings(&self) -> &'static [bool] {
        // Other hosts can't be placed.
        if self.peers.is_empty() {
            &[false, true]
        } else {
            &[false]
        }
    }

    /// As [`NodesArgs::start`]; with `spread` every node on this host uses all CPUs, at ordinary priority. A
    /// page server and the threads that it serves then run concurrently, which they do not on a single CPU.
    pub fn start_placed(&self, pages: u32, spread: bool) -> Result<Nodes> {
        let usable = cpus()?;
        let mut host = self.host.clone();
        let mut children = Vec::new();
        let peers = if self.peers.is_empty() {
            let all = if host.cpus.is_empty() { &usable } else { &host.cpus };
            let shares = if spread {
                vec![all.clone(); usize::from(self.nodes)]
            } else {
                shares(all, self.nodes)
            };
            // A page server that polls at real-time priority blocks another node's on its CPU: a fetch took
            // 127 us instead of 25.
            let crowded = shares.len() > shares.iter().flatten().collect::<BTreeSet<_>>().len();
            host.no_realtime |= spread;
            if crowded {
                host.poll = Poll::Never;
            }
            let mut peers = Vec::new();
            for share in &shares[1..] {
                let (child, peer) = start_one(&host, share)?;
                children.push(child);
                peers.push(peer);
            }
            host.cpus.clone_from(&shares[0]);
            peers
        } else {
            peers(&self.peers)?
        };
        host.keep_to_cpus()?;
        let shape = Shape {
            nodes: peers.len() as u16 + 1,
            pages,
            lanes: self.lanes,
            migratory: self.migratory,
            method: self.copy.then_some(Method::Copy),
        };
        let security = host.security()?;
        let session = Session::coordinate(shape, &peers, host.options(&security), &host.settings(), lost)
            .map_err(|error| miette!("{error}"))?;
        print_notes(session.node());
        Ok(Nodes {
            session,
            children,
            count: shape.nodes,
            realtime: !host.no_realtime,
            ahead: !host.no_ahead,
            by_memory: host.shared_memory.is_some(),
            other_cpu: usable.into_iter().find(|cpu| !host.cpus.contains(cpu)),
        })
    }
}

impl Nodes {
    /// Ends the memory, and waits for the others.
    pub fn part(self) -> Result<()> {
        self.session.close();
        let end = Instant::now() + END_LIMIT;
        for mut child in self.children {
            while child.try_wait().map_err(|error| miette!("{error}"))?.is_none() {
                if Instant::now() > end {
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }
}

/// Starts a node as a process of this host.
fn start_one(host: &HostArgs, cpus: &[usize]) -> Result<(Child, Peer)> {
    let list: Vec<String> = cpus.iter().map(usize::to_string).collect();
    let mut command = Command::new("/proc/self/exe");
    command.args(["dsm", "serve", "--with-parent", "--cpus", &list.join(",")]);
    if host.no_realtime {
        command.arg("--no-realtime");
    }
    if let Some(poll) = host.poll.to_possible_value() {
        command.args(["--poll", poll.get_name()]);
    }
    if host.no_ahead {
        command.arg("--no-ahead");
    }
    if let Some(memory) = &host.shared_memory {
        command.arg("--shared-memory").arg(memory);
    }
    if let (Some(keys), Some(name)) = (&host.keys, &host.name) {
        command.arg("--keys").arg(keys).arg("--name").arg(name);
    }
    let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| {
        miette!(
            help = "see whether the host is out of processes",
            "can't start another node: {error}"
        )
    })?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        let _ = BufReader::new(output).read_line(&mut line);
    }
    let name = host
        .name
        .as_ref()
        .map(|name| format!("{name}@"))
        .unwrap_or_default();
    let peer = format!("{name}{}", line.trim())
        .parse()
        .map_err(|_| miette!(help = "its error is above", "another node does not start"))?;
    Ok((child, peer))
}

/// CPUs of each node: disjoint sets, or one CPU for several nodes, equally many on each.
fn shares(cpus: &[usize], nodes: u16) -> Vec<Vec<usize>> {
    let nodes = usize::from(nodes);
    (0..nodes)
        .map(
            |node| match cpus.len() * node / nodes..cpus.len() * (node + 1) / nodes {
                none if none.is_empty() => vec![cpus[none.start]],
                part => cpus[part].to_vec(),
            },
        )
        .collect()
}

fn cpus() -> Result<Vec<usize>> {
    let mine = sched_getaffinity(Pid::from_raw(0)).map_err(|error| miette!("{error}"))?;
    Ok((0..CpuSet::count())
        .filter(|cpu| mine.is_set(*cpu).unwrap_or(false))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::shares;

    #[test]
    fn every_node_has_a_cpu() {
        assert_eq!(shares(&[0, 1], 2), [[0], [1]]);
        assert_eq!(shares(&[4, 5, 6, 7], 2), [[4, 5], [6, 7]]);
        assert_eq!(shares(&[3, 8], 3), [vec![3], vec![3], vec![8]]);
        assert_eq!(shares(&[0], 2), [[0], [0]]);
        assert_eq!(shares(&[0, 1], 4), [[0], [0], [1], [1]]);
        let eight = shares(&[0, 1], 8);
        assert_eq!(eight.iter().filter(|share| share[..] == [0]).count(), 4);
    }
}
