//! `mirrorball dsm bench --kernels`: programs on one node and on all.

use dsm::work::kernels::{Kernel, Run};
use dsm::work::{Answer, Job};
use miette::{Result, bail, miette};
use serde::Serialize;

use super::bench::middle;
use super::nodes::Nodes;

/// Runs of each, of which the median is shown: there is room for so many.
const RUNS_MAX: u32 = 3;

/// One program.
#[derive(Debug, Serialize)]
pub struct KernelFigures {
    kernel: &'static str,
    size: u32,
    one_node_ms: f64,
    all_nodes_ms: f64,
    speedup: f64,
    /// Of the runs on all nodes, for each.
    messages: f64,
    megabytes: f64,
}

/// Pages for all runs.
pub fn pages() -> u32 {
    let each = |kernel: &Kernel| kernel.pages(kernel.size());
    let runs: u32 = Kernel::ALL.iter().map(each).sum();
    2 * RUNS_MAX * runs
}

/// How often each is run when that many rounds are asked for.
pub fn runs(rounds: u32) -> u32 {
    rounds.min(RUNS_MAX)
}

/// Runs all of them; an error if a result is not that of one node.
pub fn run(nodes: &Nodes, rounds: u32) -> Result<Vec<KernelFigures>> {
    let mut first = 0;
    let runs = runs(rounds);
    let mut figures = Vec::new();
    for kernel in Kernel::ALL {
        let mut one = |count: u16| -> Result<(f64, u64)> {
            let run = Run {
                kernel,
                size: kernel.size(),
                nodes: count,
                first,
            };
            first += kernel.pages(kernel.size());
            let jobs = vec![Job::Kernel(run); usize::from(nodes.count)];
            let answers = nodes.session.all(&jobs).map_err(|error| miette!("{error}"))?;
            match answers.first() {
                Some(Answer::Kernel { ns, sum }) => Ok((*ns as f64 / 1e6, *sum)),
                answer => bail!("node 0 answers {answer:?}"),
            }
        };
        let (mut alone, mut together) = (Vec::new(), Vec::new());
        let (mut messages, mut bytes) = (0, 0);
        for _ in 0..runs {
            let (ms, expected) = one(1)?;
            alone.push(ms);
            let before = nodes.session.meter().map_err(|error| miette!("{error}"))?;
            let (ms, sum) = one(nodes.count)?;
            together.push(ms);
            let sent = nodes.session.meter().map_err(|error| miette!("{error}"))? - before;
            (messages, bytes) = (messages + sent.messages, bytes + sent.bytes);
            if sum != expected {
                bail!(
                    "{} on {} nodes gives {sum:#x}, on one {expected:#x}",
                    kernel.name(),
                    nodes.count
                );
            }
        }
        let (one_node_ms, all_nodes_ms) = (middle(alone), middle(together));
        figures.push(KernelFigures {
            kernel: kernel.name(),
            size: kernel.size(),
            one_node_ms,
            all_nodes_ms,
            speedup: one_node_ms / all_nodes_ms,
            messages: messages as f64 / f64::from(runs),
            megabytes: bytes as f64 / 1e6 / f64::from(runs),
        });
    }
    Ok(figures)
}

/// As a table.
pub fn print(figures: &[KernelFigures]) {
    println!(
        "program           size   one node, ms   all nodes, ms   speed-up   messages   MB sent   (results equal)"
    );
    for figures in figures {
        println!(
            "{:15} {:6} {:14.1} {:15.1} {:10.2} {:10.0} {:9.1}",
            figures.kernel,
            figures.size,
            figures.one_node_ms,
            figures.all_nodes_ms,
            figures.speedup,
            figures.messages,
            figures.megabytes
        );
    }
}
