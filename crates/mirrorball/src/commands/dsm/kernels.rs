//! `mirrorball dsm bench --kernels`: programs on one node and on all, and their stalls.

use dsm::Meter;
use dsm_bench::work::kernels::{Figures, Kernel, Part, Phase, Run, Scale};
use dsm_bench::work::{Job, JobResult};
use miette::{IntoDiagnostic, Result, bail, miette};
use serde::Serialize;

use super::bench::middle;
use super::nodes::Nodes;

/// Programs to run, and the nodes.
#[derive(Debug)]
pub struct Kernels<'a> {
    pub nodes: &'a Nodes,
    pub scale: Scale,
    pub rounds: u32,
}

/// Programs on one node and on all.
#[derive(Debug, Serialize)]
pub struct Programs {
    nodes: u16,
    method: String,
    rounds: u32,
    programs: Vec<Program>,
}

/// One program. Times and counts begin after its initialization.
#[derive(Debug, Serialize)]
struct Program {
    kernel: &'static str,
    size: u32,
    /// Checksum of the result, which is the same for all numbers of nodes.
    sum: String,
    one_node_ms: f64,
    one_node_low_ms: f64,
    one_node_high_ms: f64,
    all_nodes_ms: f64,
    all_nodes_low_ms: f64,
    all_nodes_high_ms: f64,
    speedup: f64,
    /// Messages of the runs on all nodes, one value for each run.
    messages: f64,
    megabytes: f64,
}

/// Stalls of programs.
#[derive(Debug, Serialize)]
pub struct Records {
    nodes: u16,
    method: String,
    programs: Vec<Record>,
}

#[derive(Debug, Serialize)]
struct Record {
    kernel: &'static str,
    size: u32,
    runs: Vec<Recorded>,
}

/// A run on one node, and one on all.
#[derive(Debug, Serialize)]
struct Recorded {
    /// CPU time of the thread of the first run.
    alone_cpu_us: f64,
    /// Nodes of the second run.
    nodes: Vec<NodeRecord>,
}

#[derive(Debug, Serialize)]
struct NodeRecord {
    messages: u64,
    pages: u64,
    bytes: u64,
    /// Copies that were invalidated because another node wrote.
    invalidated: u64,
    /// Each: CPU time of the thread, us; faults for reading, writing and upgrades; and the same four while it
    /// had a lock.
    phases: Vec<[u64; 8]>,
}

/// Pages for all runs, which reuse the same pages in turn.
pub fn pages(scale: Scale) -> u32 {
    let each = |kernel: &Kernel| kernel.pages(kernel.size(scale));
    Kernel::ALL.iter().map(each).max().unwrap_or_default()
}

impl Kernels<'_> {
    /// Runs all programs; an error if a result differs from that of one node.
    pub fn run(&self, method: String) -> Result<Programs> {
        let mut programs = Vec::new();
        for kernel in Kernel::ALL {
            let (mut alone_ms, mut together_ms) = (Vec::new(), Vec::new());
            let mut sent = Meter::default();
            let mut sum = 0;
            for _ in 0..self.rounds {
                let (alone, together, result) = self.pair(kernel, false)?;
                alone_ms.push(alone.ns as f64 / 1e6);
                together_ms.push(together[0].ns as f64 / 1e6);
                together.iter().for_each(|figures| sent += figures.meter);
                sum = result;
            }
            let [one, all] = [alone_ms, together_ms].map(Spread::of);
            programs.push(Program {
                kernel: kernel.name(),
                size: kernel.size(self.scale),
                sum: format!("{sum:016x}"),
                one_node_ms: one.middle,
                one_node_low_ms: one.low,
                one_node_high_ms: one.high,
                all_nodes_ms: all.middle,
                all_nodes_low_ms: all.low,
                all_nodes_high_ms: all.high,
                speedup: one.middle / all.middle,
                messages: sent.messages as f64 / f64::from(self.rounds),
                megabytes: sent.bytes as f64 / 1e6 / f64::from(self.rounds),
            });
        }
        Ok(Programs {
            nodes: self.nodes.count,
            method,
            rounds: self.rounds,
            programs,
        })
    }

    /// Runs all programs with stops between phases, and returns their stalls.
    pub fn record(&self, method: String) -> Result<Records> {
        let mut programs = Vec::new();
        for kernel in Kernel::ALL {
            let mut runs = Vec::new();
            for _ in 0..self.rounds {
                let (alone, together, _) = self.pair(kernel, true)?;
                let ran_ns = |phase: &Phase| phase.together.cpu_ns + phase.in_turn.cpu_ns;
                runs.push(Recorded {
                    alone_cpu_us: alone.phases.iter().map(ran_ns).sum::<u64>() as f64 / 1e3,
                    nodes: together.iter().map(NodeRecord::of).collect(),
                });
            }
            programs.push(Record {
                kernel: kernel.name(),
                size: kernel.size(self.scale),
                runs,
            });
        }
        Ok(Records {
            nodes: self.nodes.count,
            method,
            programs,
        })
    }

    /// Runs one program on one node and then on all: returns the measurements, and the checksum of the
    /// result.
    fn pair(&self, kernel: Kernel, phases: bool) -> Result<(Figures, Vec<Figures>, u64)> {
        let one = |count: u16| -> Result<(Vec<Figures>, u64)> {
            let run = Run {
                kernel,
                size: kernel.size(self.scale),
                nodes: count,
                first: 0,
                phases,
            };
            let session = &self.nodes.session;
            let jobs = vec![Job::Kernel(run); usize::from(count)];
            let answers = session.run_all(&jobs).map_err(|error| miette!("{error}"))?;
            let (mut all, mut first) = (Vec::new(), 0);
            for answer in answers {
                match answer {
                    JobResult::Kernel { figures, sum } => {
                        all.push(figures);
                        first ^= sum;
                    }
                    answer => bail!("a node answers {answer:?}"),
                }
            }
            Ok((all, first))
        };
        let (mut alone, expected) = one(1)?;
        let (together, sum) = one(self.nodes.count)?;
        if sum != expected {
            bail!(
                "{} on {} nodes gives {sum:#x}, on one {expected:#x}",
                kernel.name(),
                self.nodes.count
            );
        }
        Ok((alone.remove(0), together, sum))
    }
}

/// Spread of several runs.
struct Spread {
    low: f64,
    middle: f64,
    high: f64,
}

impl Spread {
    fn of(values: Vec<f64>) -> Self {
        Self {
            low: values.iter().copied().fold(f64::INFINITY, f64::min),
            high: values.iter().copied().fold(0.0, f64::max),
            middle: middle(values),
        }
    }
}

impl NodeRecord {
    fn of(figures: &Figures) -> Self {
        let four = |part: &Part| [part.cpu_ns / 1000, part.reads, part.writes, part.upgrades];
        let eight = |phase: &Phase| {
            let ([a, b, c, d], [e, f, g, h]) = (four(&phase.together), four(&phase.in_turn));
            [a, b, c, d, e, f, g, h]
        };
        Self {
            messages: figures.meter.messages,
            pages: figures.meter.pages,
            bytes: figures.meter.bytes,
            invalidated: figures.meter.invalidated,
            phases: figures.phases.iter().map(eight).collect(),
        }
    }
}

impl Programs {
    /// Prints a table.
    pub fn print(&self) {
        println!(
            "program           size   one node, ms   all nodes, ms   speed-up   messages   MB sent   \
             (results equal)"
        );
        for program in &self.programs {
            println!(
                "{:15} {:6} {:14.1} {:15.1} {:10.2} {:10.0} {:9.1}",
                program.kernel,
                program.size,
                program.one_node_ms,
                program.all_nodes_ms,
                program.speedup,
                program.messages,
                program.megabytes
            );
        }
    }
}

impl Records {
    /// Formats as JSON, one program per line: phases are many.
    pub fn lines(&self) -> Result<String> {
        let programs: Result<Vec<String>, _> = self.programs.iter().map(serde_json::to_string).collect();
        let programs = programs.into_diagnostic()?.join(",\n");
        let method = serde_json::to_string(&self.method).into_diagnostic()?;
        Ok(format!(
            "{{\"nodes\": {}, \"method\": {method}, \"programs\": [\n{programs}\n]}}",
            self.nodes
        ))
    }

    /// Prints the sums of each run as a table.
    pub fn print(&self) {
        println!(
            "program           size   one node's CPU, ms   {} nodes: CPU at most, ms   reads   writes   \
             upgrades   messages",
            self.nodes
        );
        for record in &self.programs {
            for run in &record.runs {
                let sum =
                    |column: usize| -> u64 { run.nodes.iter().map(|node| node.of_phases(column)).sum() };
                let most = run.nodes.iter().map(|node| node.of_phases(0)).max();
                println!(
                    "{:15} {:6} {:20.1} {:25.1} {:7} {:8} {:10} {:10}",
                    record.kernel,
                    record.size,
                    run.alone_cpu_us / 1e3,
                    most.unwrap_or_default() as f64 / 1e3,
                    sum(1),
                    sum(2),
                    sum(3),
                    run.nodes.iter().map(|node| node.messages).sum::<u64>()
                );
            }
        }
    }
}

impl NodeRecord {
    /// Sum of a column, with and without a lock.
    fn of_phases(&self, column: usize) -> u64 {
        self.phases
            .iter()
            .map(|phase| phase[column] + phase[column + 4])
            .sum()
    }
}
